"""Files of a log that were restored from a copy, one without the other or both: no sequence is given out twice."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child
from faults import FailingPort
from images import ReadOnly

import kvspool
from kvspool import Gap, Spool, errors, system
from kvspool.kernel import frames_py as frames
from kvspool.spool import format

CAPACITY = 65536


class SameStart(ReadOnly):
    """A user without permission to write, in the same start of the machine."""

    def boot_id(self) -> bytes:
        return system.Port.boot_id(self)


def made(path: Path, **options: Any) -> Spool:
    return kvspool.create(path, capacity=CAPACITY, **options)


def opened(path: Path) -> Spool:
    return kvspool.open(path)  # type: ignore[return-value]


def value(number: int) -> bytes:
    return b"%06d" % number + bytes(500)


def fill(log: Spool, count: int) -> None:
    """Append so many records, each with its own sequence as its value."""
    for _ in range(count):
        log.append(value(log.end()))


def in_place(copy: Path, target: Path) -> None:
    """Overwrite the bytes of a file; it stays the same inode."""
    target.write_bytes(copy.read_bytes())


def as_another_file(copy: Path, target: Path) -> None:
    """Put another inode in the place of a file."""
    shutil.copy2(copy, target.with_suffix(".new"))
    target.with_suffix(".new").rename(target)


def under_the_same_number(copy: Path, target: Path) -> None:
    """Remove the file and recreate it: file systems reuse the number of the inode."""
    target.unlink()
    shutil.copy2(copy, target)


def kept(log: Spool) -> list[int]:
    """Return the sequences of the records that are there; those that a recovery leaves out are a Gap after them."""
    return [record.sequence for record in log.read(on_gap="skip")]


def copied(log: Spool, name: str, directory: Path) -> Path:
    return Path(shutil.copy2(log.path / name, directory / f"copy of {name}"))


def word(path: Path, at: int) -> int:
    return int.from_bytes(path.read_bytes()[at : at + 8], "little")


def echo_of(log: Spool) -> int:
    return word(log.path / format.DATA_FILE, format.ECHO_AT)


def echoes_of(log: Spool) -> tuple[int, int]:
    return echo_of(log), word(log.path / format.DATA_FILE, format.ECHO_AT + 8)


def ends_of(log: Spool) -> tuple[int, int]:
    """Return tail and head, as the control block has them."""
    path = log.path / format.CONTROL_FILE
    return word(path, frames.TAIL * 8), word(path, frames.HEAD * 8)


def put_and_be_killed(path: Path, values: list[bytes]) -> None:
    """Put records without publishing them, in a process that is killed then."""

    def put() -> None:
        def work(writer: Any) -> None:
            writer.begin()
            writer.put_many(None, values, 0, bytes(len(values)), -1)
            os.kill(os.getpid(), signal.SIGKILL)

        opened(path)._locked(work, 10.0)

    with pytest.raises(Died):
        in_child(put)


@pytest.mark.parametrize(
    ("restore", "later", "synced"),
    [
        *[(in_place, later, synced) for later in (1, 30, 200, 1000) for synced in ("never", "before", "after")],
        (as_another_file, 30, "never"),
        (under_the_same_number, 30, "never"),
    ],
)
def test_an_older_control_block_is_noticed_and_no_sequence_is_given_out_twice(
    tmp_path: Path, restore: Callable[[Path, Path], None], later: int, synced: str
) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 50)
        if synced == "before":
            log.sync()
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, later)
        if synced == "after":
            log.sync()
        there = [record.sequence for record in log]
    restore(copy, tmp_path / "log" / format.CONTROL_FILE)
    with opened(tmp_path / "log") as log:
        assert log.recovery is not None
        assert kept(log)[-len(there) :] == there
        assert [record.value for record in log.read(there[0], limit=len(there))] == [value(number) for number in there]
        assert log.append(b"new") > there[-1]
        assert kept(log)[-2] == there[-1]
    with opened(tmp_path / "log") as log:
        assert log.recovery is None
        assert log.verify().is_sound


def test_frames_that_a_killed_writer_did_not_publish_are_no_reason_to_recover(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 5)
        put_and_be_killed(log.path, [value(5)] * 20)
    with opened(tmp_path / "log") as log:
        assert log.recovery is None
        assert log.append(value(5)) == 5
        assert [record.value for record in log] == [value(number) for number in range(6)]


def test_a_writer_that_is_killed_before_it_stores_the_echo_is_no_reason_to_recover(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 5)
        before = echo_of(log)
        fill(log, 1)
        fd = os.open(log.path / format.DATA_FILE, os.O_WRONLY)
        os.pwrite(fd, before.to_bytes(8, "little"), format.ECHO_AT)
        os.close(fd)
    with opened(tmp_path / "log") as log:
        assert log.recovery is None
        assert log.append(value(6)) == 6
        assert echo_of(log) == word(log.path / format.CONTROL_FILE, frames.TAIL * 8)


def test_a_data_file_without_an_echo_is_opened_as_it_is(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 300)
    fd = os.open(tmp_path / "log" / format.DATA_FILE, os.O_WRONLY)
    os.pwrite(fd, bytes(16), format.ECHO_AT)
    os.close(fd)
    with opened(tmp_path / "log") as log:
        assert (log.recovery, log.append(value(300))) == (None, 300)
        assert echoes_of(log) == ends_of(log)


@pytest.mark.parametrize("restore", [in_place, as_another_file, under_the_same_number])
def test_a_pair_that_was_restored_together_is_opened_as_it_is(tmp_path: Path, restore: Callable[[Path, Path], None]) -> None:
    names = (format.CONTROL_FILE, format.DATA_FILE)
    with made(tmp_path / "log") as log:
        fill(log, 300)
        copies = [copied(log, name, tmp_path) for name in names]
        fill(log, 300)
    for copy, name in zip(copies, names, strict=True):
        restore(copy, tmp_path / "log" / name)
    with opened(tmp_path / "log") as log:
        assert (log.recovery, log.append(value(300))) == (None, 300)
        assert [record.value for record in log][-2:] == [value(299), value(300)]


def test_a_log_that_was_moved_copied_or_resized_is_opened_as_it_is(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 300)
    (tmp_path / "log").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    kvspool.resize(tmp_path / "copy", 2 * CAPACITY)
    for name in ("moved", "copy"):
        with opened(tmp_path / name) as log:
            assert log.recovery is None
            assert log.append(value(300)) == 300


def test_a_resized_log_notices_an_older_control_block(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 300)
    kvspool.resize(tmp_path / "log", 2 * CAPACITY)
    with opened(tmp_path / "log") as log:
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, 10)
    as_another_file(copy, tmp_path / "log" / format.CONTROL_FILE)
    with opened(tmp_path / "log") as log:
        assert log.recovery is not None
        assert kept(log)[-10:] == list(range(300, 310))


def test_a_copy_that_was_made_while_others_appended_is_recovered(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 100)
        (tmp_path / "backup").mkdir()
        shutil.copy2(log.path / format.CONTROL_FILE, tmp_path / "backup")
        fill(log, 10)
        shutil.copy2(log.path / format.DATA_FILE, tmp_path / "backup")
    with opened(tmp_path / "backup") as log:
        assert log.recovery is not None
        assert kept(log)[-20:] == list(range(90, 110))


def test_a_handle_whose_control_block_is_overwritten_appends_nothing_until_the_log_is_recovered(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 5)
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, 5)
        fd = os.open(log.path / format.CONTROL_FILE, os.O_WRONLY)
        os.pwrite(fd, copy.read_bytes(), 0)
        os.close(fd)
        for append in (lambda: log.append(b""), lambda: log.append_many([b""])):
            with pytest.raises(errors.Corruption, match="older than the data: it was restored from a copy; open the log again"):
                append()
        with opened(log.path) as other:
            assert other.recovery is not None
        assert log.append(b"new") > 9
        assert [record.value for record in log.read(on_gap="skip")] == [*[value(number) for number in range(10)], b"new"]


@pytest.mark.parametrize("round", [0, 1], ids=["before", "after its first look"])
def test_a_resize_next_to_an_older_control_block_costs_no_record(tmp_path: Path, round: int) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 5)
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, 5)
    looks = []

    def progress(position: int, end: int) -> None:
        if len(looks) == round:
            with (log.path / format.CONTROL_FILE).open("r+b") as file:
                file.write(copy.read_bytes())
        looks.append(position)

    with pytest.raises(errors.Corruption, match="restored from a copy during the resize; nothing was changed"):
        kvspool.resize(log.path, 2 * CAPACITY, progress=progress)
    with opened(log.path) as again:
        assert again.recovery is not None
        assert kept(again) == list(range(10))
        assert again.append(b"new") > 9
    assert kvspool.resize(log.path, 2 * CAPACITY).records >= 11


def test_a_user_without_write_permission_gets_an_error(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, 5)
    in_place(copy, tmp_path / "log" / format.CONTROL_FILE)
    with system.replaced(SameStart()), pytest.raises(errors.Unrecovered, match=r"spool\.ctl is an older copy; let a user"):
        opened(tmp_path / "log")
    opened(tmp_path / "log").close()
    with system.replaced(SameStart()), opened(tmp_path / "log") as log:
        assert kept(log) == list(range(5))


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_recovery_that_fails_is_done_again(tmp_path: Path, nth: int) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 50)
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, 200)
        there = [record.sequence for record in log]
    in_place(copy, tmp_path / "log" / format.CONTROL_FILE)
    port = FailingPort(nth, errno.EIO, ("write", "flush_data", "flush"))
    with system.replaced(port):
        try:
            opened(tmp_path / "log").close()
        except (errors.Poisoned, OSError):
            assert port.failed
    with opened(tmp_path / "log") as log:
        assert kept(log)[-len(there) :] == there
        assert log.append(b"new") > there[-1]


def test_repair_recovers_it_too(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, 5)
    in_place(copy, tmp_path / "log" / format.CONTROL_FILE)
    assert kvspool.repair(tmp_path / "log").recovery is not None
    with opened(tmp_path / "log") as log:
        assert log.recovery is None
        assert kept(log) == list(range(5))


def test_a_producers_batch_is_stored_once_after_an_older_control_block(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        log.producer("p").append_many([value(number) for number in range(10)], batch=1)
    in_place(copy, tmp_path / "log" / format.CONTROL_FILE)
    with opened(tmp_path / "log") as log:
        assert log.producer("p").append_many([value(number) for number in range(10)], batch=1).repeated
        assert kept(log) == list(range(10))


SIZES = pytest.mark.parametrize("size", [506, 100, 3000])  # of records that a killed writer leaves; the log has some of 506 bytes


def with_older_head(tmp_path: Path, size: int) -> list[int]:
    """Make a log whose control block is from before a writer made room and was killed; return the sequences that were left."""
    with made(tmp_path / "log") as log:
        fill(log, 300)
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        before = ends_of(log)
        put_and_be_killed(log.path, [b"never published" + bytes(size - 15)] * 4)
        after = ends_of(log)
        assert before[0] == after[0] and before[1] < after[1]
        there = [record.sequence for record in log]
    in_place(copy, tmp_path / "log" / format.CONTROL_FILE)
    return there


@SIZES
def test_an_older_head_next_to_the_same_tail_is_noticed(tmp_path: Path, size: int) -> None:
    there = with_older_head(tmp_path, size)
    with opened(tmp_path / "log") as log:
        assert log.recovery is not None and (log.recovery.case, log.recovery.damaged_records) == ("as it was published", 0)
        assert [(record.sequence, record.value) for record in log.read(on_gap="skip")] == [(number, value(number)) for number in there]
        assert log.verify().is_sound and log.verify().records == len(there)
        assert echoes_of(log) == ends_of(log)
        assert log.append(b"new") > there[-1]
    with opened(tmp_path / "log") as log:
        assert log.recovery is None
        assert log.verify().is_sound


def test_repair_puts_an_older_head_right(tmp_path: Path) -> None:
    there = with_older_head(tmp_path, 506)
    report = kvspool.repair(tmp_path / "log")
    assert report.recovery is not None and report.verify.is_sound
    with opened(tmp_path / "log") as log:
        assert (log.recovery, kept(log)) == (None, there)


def test_a_user_without_write_permission_is_refused_an_older_head(tmp_path: Path) -> None:
    with_older_head(tmp_path, 506)
    with system.replaced(SameStart()), pytest.raises(errors.Unrecovered, match=r"spool\.ctl is an older copy"):
        opened(tmp_path / "log")


def test_an_append_of_an_open_handle_passes_over_frames_that_an_older_head_still_counts(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 300)
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        put_and_be_killed(log.path, [b"never published"] * 40)
        there = [record.sequence for record in log]
        in_place(copy, log.path / format.CONTROL_FILE)
        assert log.append(value(300)) == 300
        assert [record.value for record in log.read(on_gap="skip")] == [value(number) for number in [*there, 300]]
        assert echoes_of(log) == ends_of(log)
    with opened(tmp_path / "log") as log:
        assert (log.recovery, log.verify().is_sound) == (None, True)


@pytest.mark.parametrize("at", [0, 8], ids=["tail", "head"])
@pytest.mark.parametrize("bit", [0, 1, 2, 3, *range(10, 18), 30, 63])
@pytest.mark.parametrize("count", [20, 90])
def test_a_flipped_bit_of_the_echo_costs_nothing(tmp_path: Path, count: int, bit: int, at: int) -> None:
    with made(tmp_path / "log") as log:
        for number in range(count):
            log.append(b"%06d" % number + bytes(1000 - 6 - 8))  # frames of 1024 bytes: positions differ by powers of two
        there = [record.sequence for record in log]
        echo = word(log.path / format.DATA_FILE, format.ECHO_AT + at)
    fd = os.open(tmp_path / "log" / format.DATA_FILE, os.O_WRONLY)
    os.pwrite(fd, (echo ^ 1 << bit).to_bytes(8, "little"), format.ECHO_AT + at)
    os.close(fd)
    with opened(tmp_path / "log") as log:
        assert kept(log)[-len(there) :] == there
        assert at == 0 or log.recovery is None
        assert log.append(b"new") >= count
        assert echoes_of(log) == ends_of(log)
        assert log.verify().is_sound


def test_frames_that_were_not_published_stay_so_next_to_an_older_control_block(tmp_path: Path) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 300)
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        fill(log, 300)

        def work(writer: Any) -> bool:
            writer.begin()
            writer.put_many(None, [b"never published"] * 20, 0, bytes(20), -1)
            return True

        log._locked(work, 10.0)
    in_place(copy, tmp_path / "log" / format.CONTROL_FILE)
    with opened(tmp_path / "log") as log:
        assert log.recovery is not None and log.recovery.case == "as it was published"
        assert kept(log)[-100:] == list(range(500, 600))
        assert b"never published" not in [record.value for record in log.read(on_gap="skip")]
        assert log.verify().is_sound


@pytest.mark.parametrize("later", [1, 30, 200, 1000])
def test_an_older_data_file_is_reported_as_gaps_and_no_sequence_is_assigned_twice(tmp_path: Path, later: int) -> None:
    with made(tmp_path / "log") as log:
        fill(log, 50)
        copy = copied(log, format.DATA_FILE, tmp_path)
        fill(log, later)
        end = log.end()
        first = log.extent()[0]
    in_place(copy, tmp_path / "log" / format.DATA_FILE)
    with opened(tmp_path / "log") as log:
        got = list(log.read(on_gap="yield"))
        sequences: list[int] = []
        for item in got:
            sequences += range(item.first, item.last + 1) if isinstance(item, Gap) else [item.sequence]
        assert sequences == list(range(sequences[0], end)) and sequences[0] <= max(first, 50)
        assert all(item.value == value(item.sequence) and item.sequence < 50 for item in got if not isinstance(item, Gap))
        assert any(isinstance(item, Gap) and item.last == end - 1 for item in got)
        assert not log.verify().is_sound
        assert log.append(value(end)) == end
        assert [record.value for record in log.read(end)] == [value(end)]


def keyed_with_older_control_block(tmp_path: Path) -> Path:
    """Make a log whose control block was restored from before two of its three keys came; return its path."""
    path = tmp_path / "log"
    with made(path, codec="keyed") as log:
        log.append({"alpha": 1})
        log.sync()
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        log.append({"beta": 2})
        log.append([{"gamma": 3}])
        log.sync()
    in_place(copy, path / format.CONTROL_FILE)
    return path


def meanings(log: Spool) -> list[Any]:
    """Return what each record says; None for one that can't be decoded."""

    def meaning(record: Any) -> Any:
        try:
            return record.data
        except errors.Undecodable:
            return None

    return [meaning(record) for record in log.read(on_gap="skip")]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_record_whose_keys_were_lost_never_gets_other_ones(
    tmp_path: Path, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keyed_with_older_control_block(tmp_path)
    if restarted:
        monkeypatch.setattr(system, "port", AnotherStart())
    with opened(path) as log:
        assert log.recovery is not None
        for number, key in enumerate(("delta", "epsilon", "alpha")):
            log.append({key: number})
        expected = [{"alpha": 1}, None, None, {"delta": 0}, {"epsilon": 1}, {"alpha": 2}]
        assert meanings(log) == expected
        assert ["key table" in problem for problem in log.verify().problems] == [True]
        kvspool.resize(path, 2 * CAPACITY)
        log.append({"zeta": 5})
    with opened(path) as log:
        assert meanings(log) == [*expected, {"zeta": 5}]


class AnotherStart(system.Port):
    """The machine was started again since."""

    def boot_id(self) -> bytes:
        return b"another start..."


def test_an_open_handle_adds_no_key_to_an_older_table(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with made(path, codec="keyed") as log, opened(path) as other:
        log.append({"alpha": 1})
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        log.append({"beta": 2})
        in_place(copy, path / format.CONTROL_FILE)
        with pytest.raises(errors.Corruption):
            other.append({"gamma": 3})
    with opened(path) as log:
        log.append({"gamma": 3})
        assert meanings(log) == [{"alpha": 1}, None, {"gamma": 3}]


def test_an_older_control_block_that_has_all_keys_keeps_its_table_open(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with made(path, codec="keyed") as log:
        log.append({"alpha": 1})
        copy = copied(log, format.CONTROL_FILE, tmp_path)
        log.append({"alpha": 2})
    in_place(copy, path / format.CONTROL_FILE)
    with opened(path) as log:
        assert log.recovery is not None
        log.append({"beta": 3})
        assert meanings(log) == [{"alpha": 1}, {"alpha": 2}, {"beta": 3}]
        assert b"beta" not in next(iter(log.read_values(log.end() - 1)))
        assert log.verify().is_sound
