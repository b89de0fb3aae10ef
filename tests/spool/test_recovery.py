"""Recovery after a crash of the machine: the table of decisions, crash images, kills at every store, damage of every kind."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from children import in_child, start
from faults import FailingPort, Killed
from images import OTHER_BOOT, ReadOnly, Rebooted
from images import crash_images as images
from loops import interpreted

import kvspool
from kvspool import Gap, errors, system
from kvspool.engine import locks
from kvspool.kernel import frames as frames_loops
from kvspool.kernel import frames_py as frames
from kvspool.kernel import machine
from kvspool.spool import cases, checkpoints, epochs, findings, format, recovery
from kvspool.spool.format import STRIDE
from kvspool.system.descriptor import Descriptor

BOOT = b"2" * 16
frames_py = interpreted("kvspool.kernel.frames")


def combinations() -> list[dict[str, str]]:
    kinds = list(cases.CONDITIONS)
    return [dict(zip(kinds, values, strict=True)) for values in itertools.product(*cases.CONDITIONS.values())]


def test_every_combination_of_conditions_has_exactly_one_case() -> None:
    matched = set()
    for conditions in combinations():
        (case,) = [case for case in cases.CASES if cases.matches(case, conditions)]
        assert cases.decide(conditions) is case
        matched.add(case.name)
    assert matched == {case.name for case in cases.CASES}
    assert len(matched) == len(cases.CASES)


def test_crash_images_recover_to_what_was_synced_and_nothing_else_and_reach_every_case() -> None:
    # A slice of the campaign; the interpreted twin is some ten times slower, and takes less of it.
    reached: set[str] = set()
    count = 2000 if frames_loops.TWIN == "compiled" else 300
    moments = [images.campaign(count, 9, unit, reached.add) for unit in images.UNITS]
    assert all(each.recovery for each in moments) and any(each.resize for each in moments)
    if frames_loops.TWIN == "compiled":
        assert all(all(each) for each in moments)
        assert reached == {case.name for case in cases.CASES}


def filled(twin: Any, count: int = 6, size: int = 40, laps: bool = False) -> Any:
    """Return a disk with some records, the first half of them synced; `laps`: and as many as go around twice."""
    disk = images.blank(4096)
    disk.twin = twin
    writer = disk.writer()
    for at in range(count * (30 if laps else 1)):
        writer.begin()
        writer.put_many([b"k"], [bytes([at % 251]) * size], 0, b"\0", 1)
        writer.publish()
        if at == count // 2:
            state = checkpoints.state(disk.reader(0, 0))
            disk.write_front(*reversed(checkpoints.successor(disk.front, disk.header, state, state.tail, bytes(16))))
    return disk


def records(disk: Any) -> list[Any]:
    return [item for item in disk.read() if not isinstance(item, Gap)]


def test_every_flipped_bit_costs_the_record_it_is_in_and_no_other(twin: ModuleType) -> None:
    whole = filled(twin, count=3, size=9)
    frame = 48
    for bit in range(3 * frame * 8):
        disk = whole.copy()
        disk.ring[bit >> 3] ^= 1 << (bit & 7)
        before = bytes(disk.ring)
        recovery.recover(disk, BOOT, 1)
        got = {item.sequence for item in records(disk)}
        assert {0, 1, 2} - got <= {(bit >> 3) // frame}, bit
        at = bit // 8 // frame * frame
        if bytes(disk.ring[at : at + 8]) != before[at : at + 8]:
            assert before[at : at + 4] > bytes([frame, 0, 0, 0]), "it would overlap the frame after it"
            before = before[:at] + bytes(8) + before[at + 8 :]
        assert bytes(disk.ring) == before, "what is damaged is left as it is"


def put(disk: Any, values: list[bytes], *, is_published: bool = True) -> None:
    writer = disk.writer()
    writer.begin()
    writer.put_many(None, values, 0, bytes(len(values)), 1)
    if is_published:
        writer.publish()


def write_checkpoint(disk: Any) -> None:
    state, synced = checkpoints.state(disk.reader(0, 0)), disk.control.cast("Q")[format.SYNCED]
    at, raw = checkpoints.successor(disk.front, disk.header, state, synced, bytes(16))
    disk.write_front(raw, at)
    checkpoints.announce(disk.control, state)


@pytest.mark.parametrize(("left", "value"), [([b"", b""], b"x" * 24), ([b"x" * 200], b"")], ids=["before the tail", "over the tail"])
def test_what_a_killed_writer_left_where_the_data_of_a_checkpoint_is_missing_costs_nothing_that_was_synced(
    twin: ModuleType, left: list[bytes], value: bytes
) -> None:
    disk = images.blank(4096)
    disk.twin = twin
    put(disk, [b"synced" * 50] * 3)
    write_checkpoint(disk)
    put(disk, [b"came to the disk"])
    put(disk, left, is_published=False)
    ring = bytes(disk.ring)
    put(disk, [value])
    write_checkpoint(disk)
    disk.ring[:] = ring
    recovery.recover(disk, BOOT, 1)
    assert [item.value for item in records(disk)][:4] == [b"synced" * 50] * 3 + [b"came to the disk"]
    assert findings.examine(disk).rejected == []


SIZES = {"equal": [224], "of two sizes": [68, 310], "of many sizes": [9, 500, 77, 0, 230, 901]}  # of values; rings have 4096 bytes


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("synced", [[], [3], [10, 14], [20, 29], [2, 62]], ids=str)
def test_a_restart_of_the_machine_with_all_pages_on_disk_costs_no_record(twin: ModuleType, sizes: list[int], synced: list[int]) -> None:
    disk = images.blank(4096)
    damaged, lost = [], []
    for number in range(synced[-1] + 70 if synced else 70):
        put(disk, [bytes([number]) * sizes[number % len(sizes)]])
        if number in synced:
            write_checkpoint(disk)
        if twin is frames_py and number % 5:
            continue  # it is some ten times slower
        there = disk.copy(twin)
        found = recovery.recover(there, BOOT, 1)
        damaged += [number] if found is None or found.damaged else []
        lost += [number] if records(there) != records(disk) else []
    assert (damaged, lost) == ([], [])


def test_records_past_a_checkpoint_bring_up_no_frames_after_a_pad(twin: ModuleType) -> None:
    disk = images.blank(4096)
    while disk.reader(0, 0).mark()[0] < 7400:
        put(disk, [b"x" * 96])
    write_checkpoint(disk)
    tail, ring = disk.reader(0, 0).mark()[0] % 4096, bytes(disk.ring)
    put(disk, [b"y" * 900])
    put(disk, [b"y"])
    disk.ring[tail + frames.HEADER :] = ring[tail + frames.HEADER :]  # the zeros after the pad's header did not reach the disk
    there = disk.copy(twin)
    found = recovery.recover(there, BOOT, 1)
    assert found is not None and found.damaged == []
    assert records(there) == records(disk)


def test_frames_that_a_killed_writer_left_after_the_end_cost_no_record_before_them(twin: ModuleType) -> None:
    disk = images.blank(4096)
    for _ in range(40):
        put(disk, [b"x" * 96])
    put(disk, [b"x" * 300, b"", b""], is_published=False)
    put(disk, [b""] * 8)
    there = disk.copy(twin)
    found = recovery.recover(there, BOOT, 1)
    assert found is not None and any(run.frames for run in found.rejected)
    assert records(there) == records(disk)


@pytest.mark.parametrize("left", [[b""] * 20, [b"x" * 500]], ids=["small", "large"])
def test_frames_that_only_a_killed_writer_put_are_not_returned_for_want_of_others(twin: ModuleType, left: list[bytes]) -> None:
    disk = images.blank(4096)
    disk.twin = twin
    put(disk, left, is_published=False)
    ring = bytes(disk.ring)
    put(disk, [b"x" * 900])
    write_checkpoint(disk)
    disk.ring[:] = bytes(64) + ring[64:]  # the data of the checkpoint did not come to the disk
    recovery.recover(disk, BOOT, 1)
    assert records(disk) == []


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("last", [33, 47, 60])
def test_a_recovery_of_records_past_a_checkpoint_that_is_killed_gives_the_same_result_when_it_is_run_again(last: int) -> None:
    whole = images.blank(4096)
    whole.twin = frames_py
    for number in range(last):
        put(whole, [bytes([number]) * 224])
        if number in (10, 28):
            write_checkpoint(whole)
    whole.ring[300] ^= 1
    once = whole.copy()
    recovery.recover(once, BOOT, 1)
    assert len(records(once)) >= 13
    for stores in itertools.count():
        again = whole.copy()
        if not killed_at(again, stores, lambda disk: recovery.recover(disk, BOOT, 1)):
            break
        recovery.recover(again, BOOT, 1)
        assert visible(again) == visible(once), stores
    assert stores > 10


def test_a_log_of_which_all_pages_are_on_disk_loses_nothing_in_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with kvspool.create(path, capacity=65536) as log:
        for number in range(1100):
            log.append(b"%d" % number * 70)
            if number in (100, 671):
                log.sync()
        there = list(log.read(on_gap="skip"))
    with system.replaced(Rebooted()), kvspool.open(path) as log:
        assert log.recovery is not None and log.recovery.damaged == []
        assert list(log.read(on_gap="skip")) == there


def test_a_damaged_frame_that_reaches_over_others_does_not_take_them_along(twin: ModuleType) -> None:
    disk = images.blank(4096)
    disk.twin = twin
    for _ in range(12):
        put(disk, [b"x" * 208])
    disk.ring[720:728] = (960).to_bytes(4, "little") + (900).to_bytes(4, "little")
    recovery.recover(disk, BOOT, 1)
    for _ in range(9):
        put(disk, [b"y" * 208])
    assert [item.sequence for item in records(disk)] == [*range(4, 12), *range(STRIDE, STRIDE + 9)]


def test_zeroed_sectors_and_swapped_ones_never_bring_up_what_was_not_there(twin: ModuleType) -> None:
    whole = filled(twin, count=30, size=60, laps=True)
    values = {item.sequence: item.value for item in whole.read()}
    for at in range(0, 4096, 512):
        for other in (None, *range(0, 4096, 512)):
            disk = whole.copy()
            piece = bytes(512) if other is None else bytes(whole.ring[other : other + 512])
            if other is not None:
                disk.ring[other : other + 512] = whole.ring[at : at + 512]
            disk.ring[at : at + 512] = piece
            recovery.recover(disk, BOOT, 1)
            got = records(disk)
            assert [item.sequence for item in got] == sorted({item.sequence for item in got})
            assert all(values.get(item.sequence, item.value) == item.value for item in got)


class Killing:
    """Memory whose stores kill once none is left."""

    def __init__(self, view: memoryview, left: list[int]) -> None:
        self.view, self.left = view, left

    def cast(self, code: str) -> Killing:
        return Killing(self.view.cast(code), self.left)  # type: ignore[call-overload]

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, at: Any) -> Any:
        return self.view[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if self.left[0] == 0:
            raise Killed
        self.left[0] -= 1
        self.view[at] = value


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands, so that the interpreted twin does the same stores in each run."""
    monkeypatch.setattr(machine, "now", lambda: 10**18)


def crashed() -> Any:
    """Return an image of the campaign with a durable reader, of which a recovery erases frames."""
    choose = images.random.Random(3)
    while True:
        life = images.Life(images.blank(8192), images.History(), 0, 512, choose)
        image = life.crash(choose.randint(0, life.clock[0]), frames_py)
        found = findings.examine(image)
        if any(run.frames and run.last >= found.state.min_seq for run in found.rejected) and any(image.slots().taken()):
            return image


def visible(disk: Any) -> tuple[Any, ...]:
    """Return all that a recovery is to make the same, however often it was begun."""
    words = disk.control.cast("Q")
    commits = [(slot.number, slot.commit()[:3]) for slot in disk.slots().taken()]
    names = (frames.HEAD, frames.MIN_SEQ, frames.TAIL, frames.MARKS, frames.MARKS + 1, format.SYNCED, format.SYNCED_SEQ)
    newest = checkpoints.newest(disk.front, disk.header)[1]
    return bytes(disk.ring), disk.read(), commits, [words[at] for at in names], newest[1:7], bytes(disk.control[format.INDEX_AT :])


@pytest.mark.usefixtures("clock")
def test_a_recovery_that_is_killed_at_any_store_gives_the_same_result_when_it_is_run_again() -> None:
    whole = crashed()
    once = whole.copy()
    recovery.recover(once, BOOT, 1)
    assert bytes(once.ring) != bytes(whole.ring)
    stores = 0
    while True:
        disk = whole.copy()
        front, ring, control, left = disk.front, disk.ring, disk.control, [stores]
        disk.front, disk.ring, disk.control = Killing(front, left), Killing(ring, left), Killing(control, left)
        try:
            recovery.recover(disk, BOOT, 1)
            break
        except Killed:
            assert not epochs.is_true(control, disk.header.log_id, BOOT)
            disk.front, disk.ring, disk.control = front, ring, control
            recovery.recover(disk, BOOT, 1)
            assert visible(disk) == visible(once), stores
            stores += 1
    assert stores > 20


@pytest.mark.usefixtures("clock")
def test_of_any_image_a_recovery_that_was_killed_gives_the_same_result_when_it_is_run_again() -> None:
    choose = images.random.Random(5)
    for _ in range(15):
        life = images.Life(images.blank(choose.choice((4096, 8192)), 1), images.History(), 0, choose.choice(images.UNITS), choose)
        for _ in range(10):
            image = life.crash(choose.randint(0, life.clock[0]), frames_py)
            once, again = image.copy(), image.copy()
            recovery.recover(once, BOOT, 1)
            front, ring, control, left = again.front, again.ring, again.control, [choose.randrange(40)]
            again.front, again.ring, again.control = Killing(front, left), Killing(ring, left), Killing(control, left)
            with suppress(Killed):
                recovery.recover(again, BOOT, 1)
            again.front, again.ring, again.control = front, ring, control
            if not epochs.is_true(control, again.header.log_id, BOOT):
                recovery.recover(again, BOOT, 1)
            assert visible(again) == visible(once)


def killed_at(disk: Any, stores: int, work: Callable[[Any], object]) -> bool:
    """Do some work on a disk whose process is killed after so many stores; return whether it was."""
    front, ring, control, left = disk.front, disk.ring, disk.control, [stores]
    disk.front, disk.ring, disk.control = Killing(front, left), Killing(ring, left), Killing(control, left)
    try:
        work(disk)
    except Killed:
        return True
    finally:
        disk.front, disk.ring, disk.control = front, ring, control
    return False


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("size", [40, 90, 300])
def test_an_older_head_is_noticed_wherever_its_writer_or_its_recovery_is_killed(twin: ModuleType, size: int, writers: int) -> None:
    def put(disk: Any, writer: int = 0, count: int = 900 // (size + 40)) -> None:
        writer = disk.writer(bytes([writer]) * 48)
        writer.begin()
        writer.put_many(None, [b"u" * size] * count, 0, bytes(count), 7)

    def recover(disk: Any) -> Any:
        return recovery.recover_untrue(disk, bytes(16), 1)

    whole = filled(frames_py, laps=True)
    published = records(whole)
    stores, noticed, is_killed = 0, 0, True
    while is_killed:
        disk = whole.copy()
        is_killed = killed_at(disk, stores, put)
        if writers == 2:
            put(disk, 1, 1)  # and this one is killed, too
        disk.twin = twin
        left = records(disk)
        disk.control = memoryview(bytearray(whole.control))
        restored = disk.copy()
        found = recover(disk)
        assert found is None or found.damaged == []
        noticed += found is not None
        got = records(disk)
        assert left == got[len(got) - len(left) :] and got == published[-len(got) :]
        stores += 1
    assert 1 < noticed <= stores and len(left) == len(got) < len(published)
    for stores in itertools.count():
        again = restored.copy(frames_py)
        if not killed_at(again, stores, recover):
            break
        recover(again)
        assert visible(again) == visible(disk)
    assert stores > 20


def test_numbers_never_go_back_next_to_an_older_head(twin: ModuleType) -> None:
    disk = filled(frames_py, laps=True)
    for boot in (b"1" * 16, BOOT):
        recovery.recover(disk, boot, 1)
    following = disk.reader(0, 0).mark()[1]
    assert following == 2 * STRIDE
    control = bytes(disk.control)
    writer = disk.writer()
    writer.begin()
    writer.put_many(None, [b"u" * 40] * 4, 0, bytes(4), 7)
    disk.control, disk.twin = memoryview(bytearray(control)), twin
    assert recovery.recover_untrue(disk, BOOT, 1) is not None  # type: ignore[arg-type]
    assert disk.reader(0, 0).mark()[1] > following


def test_an_older_control_block_costs_no_record_before_leftovers_of_an_earlier_lap(twin: ModuleType) -> None:
    disk = images.blank(4096)

    def append(first: int, end: int) -> None:
        writer = disk.writer()
        for number in range(first, end):
            writer.begin()
            writer.put_many(None, [b"%032d" % number], 0, b"\0", 1)  # 64 bytes: the frames of each lap are in the same places
            writer.publish()

    append(0, 64)
    earlier = bytes(disk.ring)
    append(64, 120)
    control = bytes(disk.control)
    append(120, 128)
    disk.ring[30 * 64 : 35 * 64] = earlier[30 * 64 : 35 * 64]  # as a crash of the machine leaves it
    there = records(disk)
    assert len(there) == 59
    disk.control, disk.twin = memoryview(bytearray(control)), twin
    assert recovery.recover_untrue(disk, bytes(16), 1) is not None  # type: ignore[arg-type]
    assert records(disk) == there


def test_a_log_that_is_opened_in_another_start_of_the_machine_continues_at_a_multiple_of_two_to_the_32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"a", b"b", b"c"])
        log.sync()
        assert log.recovery is None
        assert log.stats().recoveries == 0
    with system.replaced(Rebooted()), caplog.at_level(logging.INFO, "kvspool"):
        with kvspool.open(tmp_path / "log") as log:
            assert log.recovery is not None
            assert (log.recovery.case, log.recovery.records, log.recovery.checkpoint) == ("as it was synced", 3, "A")
            assert len(caplog.records) == 1
            assert log.append(b"d") == STRIDE
            items = list(log.read(on_gap="yield"))
            assert [item.value for item in items if not isinstance(item, Gap)] == [b"a", b"b", b"c", b"d"]
            assert [item for item in items if isinstance(item, Gap)] == [Gap(3, STRIDE - 1, "machine restart", str(tmp_path / "log"))]
            stats = log.stats()
            assert (stats.recoveries, stats.lost_records, stats.recovered > 0) == (1, 0, True)
            assert [record.value for record in log.read(start=2, limit=1)] == [b"c"]
        with kvspool.open(tmp_path / "log") as log:
            assert log.recovery is None


def test_what_the_control_block_knew_of_and_is_gone_is_reported(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"1" * 68] * 5)
        log.sync()
        log.append_many([b"2" * 68] * 3)
    with (tmp_path / "log" / format.DATA_FILE).open("r+b") as file:
        file.seek(format.DATA_START + 520)
        file.write(bytes(300))
    with system.replaced(Rebooted()), kvspool.open(tmp_path / "log") as log:
        assert log.recovery is not None
        assert (log.recovery.case, log.recovery.cut_records, log.recovery.cut_bytes) == ("as it was synced, unsynced records lost", 3, 312)
        assert (log.stats().lost_records, log.stats().lost_bytes) == (3, 312)
        assert "3 records (312 bytes) that were not synced are lost" in str(log.recovery)


def fill(log: kvspool.Spool) -> list[int]:
    """Append until there is no room, and return the sequences."""
    appended: list[int] = []
    with pytest.raises(errors.SpoolFull):
        while len(appended) < 10:
            appended.append(log.append(b"x" * 900))
    assert len(appended) >= 2
    return appended


@pytest.mark.parametrize("policy", ["overwrite", "block", "raise"])
def test_a_durable_reader_ahead_of_the_recovered_log_gets_a_gap_and_no_record_twice(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "log"
    with kvspool.create(path, capacity=4096, policy=policy) as log:
        log.append_many([b"kept"] * 3)
        log.sync()
        log.append_many([b"lost" * 100] * 4)
        with log.reader("one") as reader:
            assert len(list(reader.read(limit=5))) == 5
            reader.commit()
    with (path / format.DATA_FILE).open("r+b") as file:
        file.seek(format.DATA_START + 120)
        file.write(bytes(3000))
    with system.replaced(Rebooted()), kvspool.open(path) as log:
        assert log.append(b"new") == STRIDE
        with log.reader("one") as reader:
            assert reader.sequence == 5
            items = list(reader.read(on_gap="yield"))
            assert [(item.first, item.last) for item in items if isinstance(item, Gap)] == [(5, STRIDE - 1)]
            assert [item.value for item in items if not isinstance(item, Gap)] == [b"new"]
            # Writers know where it stands: nothing that it has yet to commit is overwritten.
            if policy == "raise":
                appended = fill(log)
                assert [record.sequence for record in reader.read()] == appended


def test_a_lagging_durable_reader_continues_at_its_record(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy="raise") as log:
        for lap in range(40):
            with log.reader("one") as reader:
                log.append_many([b"%d" % lap * 100] * 2)
                list(reader.read(limit=1 if lap == 39 else None))
                reader.commit()
        expected = list(log.read(79))
    # No sync: there is no checkpoint, and positions start again.
    with system.replaced(Rebooted()), kvspool.open(tmp_path / "log") as log, log.reader("one") as reader:
        assert log.recovery is not None and log.recovery.checkpoint == "none"
        assert list(reader.read(limit=1)) == expected[:1]
        appended = fill(log)
        assert [record.sequence for record in reader.read(on_gap="skip")] == appended


def test_keyed_values_are_decoded_after_a_restart(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536, codec="keyed") as log:
        log.append_many([{"a": 1}, {"b": 2}])
    with system.replaced(Rebooted()), kvspool.open(tmp_path / "log") as log:
        log.append({"c": 3})
        assert [record.data for record in log.read(on_gap="skip")] == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_a_user_without_write_permission_learns_that_the_log_must_be_recovered_first(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=65536).close()
    with system.replaced(ReadOnly()), pytest.raises(errors.Unrecovered, match="with write permission"):
        kvspool.open(tmp_path / "log")
    with system.replaced(Rebooted()):
        kvspool.open(tmp_path / "log").close()
    with system.replaced(ReadOnly()), kvspool.open(tmp_path / "log") as log:
        assert list(log) == []


def test_an_opener_waits_for_another_ones_recovery_and_then_says_so(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=65536).close()
    file = Descriptor(tmp_path / "log" / format.CONTROL_FILE, os.O_RDWR)
    try:
        with (
            locks.held(file, format.ADMIN_LOCK, 1, lambda: ""),
            system.replaced(Rebooted()),
            pytest.raises(errors.LockTimeout, match="recovered"),
        ):
            kvspool.open(tmp_path / "log", timeout=0)
    finally:
        file.close()


def test_a_forked_child_recovers_a_log_too(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append(b"a")

        def child() -> int:
            with system.replaced(Rebooted()):
                return log.append(b"b")

        assert in_child(child) == STRIDE


def test_openers_at_once_recover_a_log_once(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=1 << 20).close()

    def child() -> bool:
        with system.replaced(Rebooted()), kvspool.open(tmp_path / "log") as log:
            return log.recovery is not None

    waits = [start(child) for _ in range(6)]
    assert sum(wait() for wait in waits) == 1


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_flush_that_fails_leaves_the_log_to_be_recovered(tmp_path: Path, nth: int) -> None:
    class Failing(FailingPort):
        def boot_id(self) -> bytes:
            return OTHER_BOOT

    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append(b"a")
    with system.replaced(Failing(nth, 5, ("flush_data",))), pytest.raises(errors.Poisoned):
        kvspool.open(tmp_path / "log")
    with system.replaced(Rebooted()), kvspool.open(tmp_path / "log") as log:
        assert [record.value for record in log.read(on_gap="skip")] == [b"a"]
        assert log.append(b"b") == STRIDE


def test_opening_in_the_same_start_of_the_machine_looks_at_no_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvspool.create(tmp_path / "log", capacity=65536).close()
    monkeypatch.setattr(recovery, "examine", None)
    kvspool.open(tmp_path / "log").close()


@pytest.mark.parametrize(
    ("last", "goes_on"),
    [(0, STRIDE), (1 << 31, STRIDE), ((1 << 31) + 1, 2 * STRIDE), (STRIDE, 2 * STRIDE), (STRIDE - 1, 2 * STRIDE)],
)
def test_numbers_continue_at_a_multiple_that_leaves_room_for_what_the_crash_took(last: int, goes_on: int) -> None:
    assert findings.next_multiple(last) == goes_on
