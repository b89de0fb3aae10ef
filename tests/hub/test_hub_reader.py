"""The durable reader of a hub root: each record of each shard once, whichever process is killed at any moment."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, start
from commands import Run
from faults import FILE_CALLS, FailingPort, RecordingPort
from schedules import ALL, some

import hub
import kvspool
from hub import HubRoot, ShardReplaced
from hub.root import positions
from hub.root.positions import Key, Position
from kvspool import Gap, GapError, system
from kvspool.engine.checksums import checksum
from kvspool.errors import Closed, Corruption, LogNotFound, NoSuchReader, NotALog, OutOfRange, ReaderBusy, UnknownVersion

FORMATS: list[dict[str, Any]] = [{"capacity": 65536}, {"format": "kvj"}]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[HubRoot]:
    with hub.create(tmp_path / "root") as root:
        yield root


@pytest.fixture(params=FORMATS, ids=["spool", "kvj"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def add(root: HubRoot, client: str, values: list[Any], bits: int = 1, **options: Any) -> None:
    """Make a client's shards if they aren't there, and append, to the shards in turn."""
    is_there = client in root.clients()
    with root.client(client) if is_there else root.create_client(client, bits=bits, **(options or {"capacity": 65536})) as shards:
        for at, value in enumerate(values):
            shards.shards[at % len(shards.shards)].append(value)


def remove(root: HubRoot, client: str) -> None:
    for path in [*root.path.glob(f"{client}.*"), *root.path.glob(f".{client}.*")]:
        shutil.rmtree(path)


def data(records: Any) -> list[Any]:
    return [record.data for record in records]


def position_file(root: HubRoot, name: str = "r") -> Path:
    return root.path / ".hub" / "readers" / f"{name}.positions"


def places_of(root: HubRoot) -> dict[Key, Position] | None:
    """Return the places that are stored; None if there is no file."""
    stored = positions.load(position_file(root))
    return None if stored is None else stored.places


# Reading.


def test_what_was_committed_is_not_read_again_and_everything_else_is(root: HubRoot, options: dict[str, Any]) -> None:
    add(root, "a", list(range(10)), **options)
    add(root, "b", list(range(10, 20)), bits=0, **options)
    with root.reader("r") as reader:
        first = data(reader.read(limit=7))
        assert reader.commit() == reader.positions
        assert sum(reader.positions.values()) == 7
        data(reader.read(limit=5))  # not committed
        assert sum(reader.positions.values()) == 12
    with root.reader("r") as reader:
        rest = data(reader.follow(timeout=0))
        assert sorted(first + rest) == list(range(20))
        reader.commit()
    with root.reader("r") as reader:
        assert data(reader.read()) == []
        add(root, "a", ["new"])
        assert data(reader.follow(timeout=0)) == ["new"]


def test_iterators_of_one_reader_take_turns(root: HubRoot) -> None:
    add(root, "a", list(range(100)))
    with root.reader("r") as reader:
        one, other = reader.read(), reader.follow(timeout=0)
        got = [next(iterator).data for _ in range(10) for iterator in (one, one, other)]
        got += data(one)
        assert sorted(got) == list(range(100))
        reader.rewind()
        assert len(data(other)) == 100
        one.close()
        assert data(one) == []


def test_a_new_reader_begins_at_its_start_and_later_clients_at_their_first_record(root: HubRoot) -> None:
    add(root, "a", ["old"], bits=0)
    with root.reader("latest", start="latest") as reader:
        add(root, "a", ["new"], bits=0)
        add(root, "b", ["first", "second"], bits=0)
        assert sorted(data(reader.follow(timeout=0))) == ["first", "new", "second"]
    with root.reader("latest") as reader:  # where it began was stored, although nothing was committed
        assert sorted(data(reader.read())) == ["first", "new", "second"]
    when = datetime.fromtimestamp(next(root.read()).timestamp / 1e9 + 1e-6, UTC)
    with root.reader("time", start=when) as reader:
        assert sorted(data(reader.read())) == ["first", "new", "second"]
    with pytest.raises(ValueError, match="start is"):
        root.reader("number", start=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        root.reader("word", start="newest")
    assert [one.name for one in root.readers()] == ["latest", "time"]


def test_a_gap_is_returned_once(root: HubRoot) -> None:
    add(root, "a", list(range(3)), bits=0, capacity=4096)
    with root.reader("r") as reader:
        reader.commit()
        add(root, "a", [b"x" * 100] * 100, bits=0)
        first = root.stats().clients[0].shards[0].first_sequence
        with pytest.raises(GapError) as caught:
            next(reader.read())
        assert (caught.value.gap.first, caught.value.gap.last) == (0, first - 1)
        assert reader.positions == {("a", 0): first}
        reader.commit()
    with root.reader("r") as reader:
        assert len(data(reader.read())) == 103 - first
    for on_gap, gaps in (("yield", 1), ("skip", 0)):
        with root.reader(on_gap) as reader:
            reader.seek({("a", 0): 0})
            reading = reader.read(on_gap=on_gap)  # type: ignore[arg-type]
            got = list(reading)
            assert (sum(isinstance(one, Gap) for one in got), len(got) - gaps) == (gaps, 103 - first)
            assert reading.missed == first


def test_seek_moves_some_shards_and_all_or_none_of_them(root: HubRoot, options: dict[str, Any]) -> None:
    add(root, "a", list(range(10)), **options)
    with root.reader("r") as reader:
        assert len(data(reader.read())) == 10
        reader.seek({("a", 1): 3})
        assert reader.positions == {("a", 0): 5, ("a", 1): 3}
        assert data(reader.read()) == [7, 9]
        for places, error in (
            ({("a", 0): 1, ("a", 1): 6}, OutOfRange),
            ({("a", 0): 1, ("b", 0): 0}, LogNotFound),
            ({("a", 0): 1, ("../a", 0): 0}, LogNotFound),
            ({("a", 0): -1}, ValueError),
            ({("a", 0): True}, ValueError),
            ({("a", 0): "latest"}, ValueError),
        ):
            with pytest.raises(error):  # type: ignore[call-overload]
                reader.seek(places)  # type: ignore[arg-type]
            assert reader.positions == {("a", 0): 5, ("a", 1): 5}
        reader.rewind()
        reader.commit()
    with root.reader("r") as reader:
        assert len(data(reader.read())) == 10


def test_seek_time_goes_to_the_first_record_that_is_not_before_it(root: HubRoot, options: dict[str, Any]) -> None:
    with root.create_client("a", bits=1, **options) as shards:
        for log in shards.shards:
            for second in range(1, 5):
                log.append(second, timestamp=second * 10**9)
    with root.reader("r") as reader:
        reader.seek_time(datetime.fromtimestamp(3, UTC))
        assert data(reader.read()) == [3, 3, 4, 4]
        with pytest.raises(TypeError):
            reader.seek_time(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            reader.seek_time(datetime(2020, 1, 1))


def test_lag_counts_what_is_there_in_each_shard(root: HubRoot, options: dict[str, Any]) -> None:
    add(root, "a", list(range(9)), **options)
    with root.reader("r") as reader:
        data(reader.read(limit=4))
        lag = reader.lag()
        assert lag.records == 5 == sum(one.records for one in lag.shards)
        assert {(one.client, one.shard): one.sequence for one in lag.shards} == reader.positions
        add(root, "b", [1, 2, 3], bits=0, **options)
        assert reader.lag().records == 8
        (stats,) = root.readers()
        assert stats.lag is not None
        assert (stats.name, stats.lag.records) == ("r", 12)
        assert f"process {os.getpid()}" in stats.holder
    assert root.readers()[0].holder == ""


# Clients that appear, disappear, and are recreated.


def test_a_removed_client_is_dropped_at_a_commit_and_another_one_of_its_name_is_new(root: HubRoot, options: dict[str, Any]) -> None:
    add(root, "a", [1, 2], bits=0, **options)
    add(root, "b", [3], bits=0, **options)
    with root.reader("r") as reader:
        assert data(reader.read()) == [1, 2, 3]
        reader.commit()
        shutil.rmtree(root.path / "a")
        assert ("a", 0) in reader.positions
        assert reader.commit() == {("b", 0): 1}
        assert ("a", 0) not in reader.positions
    assert positions.load(position_file(root)) is not None
    with root.reader("r") as reader:
        add(root, "a", [4, 5], bits=0, **options)
        assert data(reader.follow(timeout=0)) == [4, 5]


def test_a_client_recreated_between_two_runs_is_reported_once_and_read_from_its_first_record(
    root: HubRoot, options: dict[str, Any]
) -> None:
    add(root, "a", list(range(6)), **options)
    with root.reader("r") as reader:
        data(reader.read(limit=2))
        reader.commit()
    remove(root, "a")
    add(root, "a", list(range(100, 110)), **options)
    for is_committed in (False, True):
        with root.reader("r") as reader:
            told = []
            reading = reader.follow(timeout=0)
            got = []
            while True:
                try:
                    got += data(reading)
                    break
                except ShardReplaced as error:
                    told.append((error.client, error.shard, error.sequence, error.first))
            assert sorted(told) == [("a", 0, 1, 0), ("a", 1, 1, 0)]
            assert sorted(got) == list(range(100, 110))
            if is_committed:
                reader.commit()
    with root.reader("r") as reader:
        assert data(reader.read()) == []


def test_a_recreated_log_with_the_same_records_is_identified_by_its_id(root: HubRoot, options: dict[str, Any]) -> None:
    def make() -> None:
        with kvspool.create(root.path / "a", **options) as log:
            for number in range(6):
                log.append(b"%d" % number, timestamp=1000 + number)

    make()
    with root.reader("r") as reader:
        assert len(list(reader.read(limit=4))) == 4
        reader.commit()
    shutil.rmtree(root.path / "a")
    make()
    with root.reader("r") as reader:
        with pytest.raises(ShardReplaced, match="recreated"):
            list(reader.read())
        assert len(list(reader.read())) == 6


def test_a_place_without_an_id_is_known_by_the_time_of_the_record_before_it(root: HubRoot) -> None:
    """As another kvspool wrote it, for which journals had none."""
    with kvspool.create(root.path / "a", format="kvj") as log:
        log.append_many([b"1", b"2", b"3"], timestamp=1000)
    for time, count in ((1000, 1), (999, 3)):
        with root.reader("r") as reader:
            reader.commit()
        positions.store(position_file(root), {("a", 0): Position(0, 2, "", time)})
        with root.reader("r") as reader:
            if count == 3:
                with pytest.raises(ShardReplaced, match="another one"):
                    list(reader.read())
            assert len(list(reader.read())) == count


def test_a_shard_restored_from_an_older_copy_is_reported(root: HubRoot, options: dict[str, Any], tmp_path: Path) -> None:
    add(root, "a", [1], bits=0, **options)
    root.close()
    shutil.copytree(root.path / "a", tmp_path / "old")
    with hub.open(root.path) as again:
        add(again, "a", [2, 3], bits=0)
        with again.reader("r") as reader:
            assert data(reader.read()) == [1, 2, 3]
            reader.commit()
    shutil.rmtree(root.path / "a")
    shutil.copytree(tmp_path / "old", root.path / "a")
    with hub.open(root.path) as again, again.reader("r") as reader:
        reading = reader.read()
        with pytest.raises(ShardReplaced, match="the log ends before the reader's position.* was 3"):
            next(reading)
        assert data(reading) == [1]
        assert data(reader.read(on_gap="skip")) == []


def test_changes_are_not_lost_when_another_iterator_begins(root: HubRoot) -> None:
    add(root, "a", [1, 2], bits=0)
    with root.reader("r") as reader:
        assert data(reader.read()) == [1, 2]
        remove(root, "a")
        shutil.rmtree(root.path / "a")
        add(root, "a", [3], bits=0)
        reading = reader.read()
        with pytest.raises(ShardReplaced):
            next(reading)
        assert data(reader.follow(timeout=0)) == [3]


def test_a_client_with_another_number_of_shards_is_another_client(root: HubRoot) -> None:
    add(root, "a", [1, 2], bits=1)
    with root.reader("r") as reader:
        assert data(reader.read()) == [1, 2]
        reader.commit()
    remove(root, "a")
    add(root, "a", [1, 2, 3, 4], bits=2)
    with root.reader("r") as reader:
        assert root.held("a", 0) == 0
        assert sorted(data(reader.read())) == [1, 2, 3, 4]
        reader.commit()
        assert root.held("a", 0) == 1


def test_a_client_removed_and_recreated_while_following_is_read_to_its_end_and_then_again(root: HubRoot) -> None:
    add(root, "a", [1, 2], bits=0)
    with root.reader("r") as reader, closing(reader.follow(timeout=0)) as following:
        assert next(following).data == 1
        reader.commit()
        shutil.rmtree(root.path / "a")
        reader.commit()
        add(root, "a", [3], bits=0)
        assert data(following) == [2, 3]
        reader.commit()
    with root.reader("r") as reader:
        assert data(reader.read()) == []


# Exclusive.


def test_a_reader_is_open_once_and_the_error_names_the_holder(root: HubRoot) -> None:
    with root.reader("r"):
        with pytest.raises(ReaderBusy, match=rf"'r' is already open in process {os.getpid()} "):
            root.reader("r")
        with hub.open(root.path) as other, pytest.raises(ReaderBusy):
            other.reader("r")
        with pytest.raises(ReaderBusy):
            root.delete_reader("r")
        root.reader("other").close()

        def child() -> str:
            with hub.open(root.path) as ours, pytest.raises(ReaderBusy) as caught:
                ours.reader("r")
            return str(caught.value)

        assert f"process {os.getpid()} " in in_child(child)
    root.reader("r").close()


def test_a_killed_holder_s_reader_is_free_and_stands_at_its_commit(root: HubRoot) -> None:
    add(root, "a", list(range(50)))

    def child() -> None:
        with hub.open(root.path) as ours:
            reader = ours.reader("r")
            data(reader.read(limit=20))
            reader.commit()
            data(reader.read(limit=5))
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Died):
        in_child(child)
    with root.reader("r") as reader:
        assert len(data(reader.read())) == 30


def test_a_forked_child_opens_the_reader_again_when_its_parent_has_closed_it(root: HubRoot) -> None:
    add(root, "a", list(range(10)))
    go, ready = os.pipe()
    refused, tell = os.pipe()
    reader = root.reader("r")
    data(reader.read(limit=3))
    reader.commit()
    data(reader.read(limit=3))

    def child() -> list[Any]:
        with pytest.raises(ReaderBusy):
            next(reader.read())
        os.write(tell, b"x")
        os.read(go, 1)
        got = data(reader.read())
        reader.commit()
        return got

    wait = start(child)
    assert len(data(reader.read(limit=1))) == 1
    os.read(refused, 1)
    reader.close()
    os.write(ready, b"x")
    assert len(wait()) == 7
    with root.reader("r") as again:
        assert data(again.read()) == []
    for fd in (go, ready, refused, tell):
        os.close(fd)


def test_a_closed_reader_refuses_everything_and_leaves_nothing_open(root: HubRoot, open_files: Callable[[], set[str]]) -> None:
    add(root, "a", [1])
    before = open_files()
    with hub.open(root.path) as ours:
        reader = ours.reader("r")
        reading = reader.follow(timeout=0)
        assert next(reading).data == 1
        reader.close()
        reader.close()
        assert reader.closed
        assert repr(reader).endswith(" closed>")
        for call in (reader.read, reader.follow, reader.commit, reader.rewind, reader.lag, lambda: next(reading)):
            with pytest.raises(Closed):
                call()  # type: ignore[operator]
    assert open_files() == before


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "-x", "a\0", "a b", "é", "x" * 201])
def test_a_name_that_could_leave_its_directory_is_refused(root: HubRoot, name: str) -> None:
    for call in (root.reader, root.delete_reader):
        with pytest.raises(ValueError):
            call(name)  # type: ignore[operator]
    assert not (root.path / ".hub").exists()


def test_readers_of_every_allowed_name_are_stored_side_by_side(root: HubRoot) -> None:
    names = ["a", "a.positions", "a.positions.tmp", "a.lock", "A@b_c-1", "x" * 200]
    for name in names:
        root.reader(name).close()
    assert [one.name for one in root.readers()] == sorted(names)
    for name in names:
        root.delete_reader(name)
        with pytest.raises(NoSuchReader):
            root.delete_reader(name)
    assert list((root.path / ".hub" / "readers").iterdir()) == []


def test_files_are_for_the_owner_alone_and_no_client(root: HubRoot) -> None:
    add(root, "a", [1])
    with root.reader("r") as reader:
        reader.commit()
        assert root.clients() == ["a"]
        assert [(path.name, path.stat().st_mode & 0o777) for path in sorted(root.path.glob(".hub/**/*"))] == [
            ("readers", 0o700),
            ("r.lock", 0o600),
            ("r.positions", 0o600),
        ]
    assert root.stats().records == 1


def test_what_is_no_directory_in_the_place_of_the_readers_is_refused(root: HubRoot, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root.path / ".hub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotALog, match="is not a directory"):
        root.reader("r")
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Held back.


def test_held_is_the_lowest_committed_position_of_all_readers(root: HubRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "a", list(range(20)))
    assert root.held("a", 0) is None
    with root.reader("one") as one, root.reader("other") as other:
        assert root.held("a", 0) == 0
        for reader, most in ((one, 10), (other, 4)):
            data(reader.read(limit=most))
            reader.commit()
        assert (root.held("a", 0), root.held("a", 1)) == (2, 2)
        assert root.held("b", 0) == 0  # they will begin at its earliest record
        data(other.read())
        assert root.held("a", 0) == 2
        other.commit()
        assert root.held("a", 0) == 5
        monkeypatch.setattr("hub.root.file_version.STABLE", -(1 << 62))
        assert root.held("a", 0) == 5
        with system.replaced(RecordingPort()) as port:
            assert root.held("a", 0) == 5
        assert port.calls == []  # type: ignore[attr-defined]
        other.rewind()
        other.commit()
        assert root.held("a", 0) == 0
    root.delete_reader("other")
    assert root.held("a", 0) == 5
    position_file(root, "one").write_bytes(b"damaged")
    assert root.held("a", 0) == 0
    root.delete_reader("one")
    assert root.held("a", 0) is None


# Crashes, faults, damage.


class Dying(RecordingPort):
    """Kills the process at the n-th call, counted from 0."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.nth = nth
        for name in ("names", "look_up"):
            setattr(self, name, self._noting(name, getattr(self, name)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            if len(self.calls) == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls.append(name)
            if name == "write":  # one that is killed half-way has written a part
                fd, content, at = args
                super(RecordingPort, self).write(fd, content[: len(content) // 2], at)
            return call(*args, **options)

        return noted


@pytest.mark.parametrize("first", [True, False])
def test_a_kill_at_any_system_call_of_a_commit_leaves_the_old_positions_or_the_new_ones(root: HubRoot, first: bool) -> None:
    """Before each third call, and before each around the rename, which is the change."""
    add(root, "a", list(range(40)))
    add(root, "j", list(range(40)), format="kvj")
    if not first:
        with root.reader("r") as reader:
            reader.seek({("a", 0): 7, ("j", 1): 5})
            reader.commit()

    def commit(nth: int) -> list[str]:
        with hub.open(root.path) as ours, contextlib.ExitStack() as stack:
            port = Dying(nth)
            if first:
                stack.enter_context(system.replaced(port))
            reader = ours.reader("r")
            data(reader.read(limit=66))
            if not first:
                stack.enter_context(system.replaced(port))
            reader.commit()
        return port.calls

    def undo(before: dict[Key, Position] | None) -> None:
        if first:
            root.delete_reader("r")
        else:
            assert before is not None
            positions.store(position_file(root), before)

    for _ in range(2):  # the first one makes directories
        before = places_of(root)
        calls = in_child(lambda: commit(-1))
        undo(before)
    renamed = max(at for at, name in enumerate(calls) if name == "rename")
    seen = Counter[str]()
    for nth in sorted({*some(range(len(calls)), 8), *range(renamed - 5, len(calls))}):
        before = places_of(root)
        try:
            in_child(lambda nth=nth: commit(nth))  # type: ignore[misc]
        except Died as died:
            assert died.signal == signal.SIGKILL
        else:
            break
        after = places_of(root)
        with root.reader("r") as reader:
            total = sum(reader.positions.values())
            rest = len(data(reader.read()))
        assert total + rest == 80
        moved = after is not None and (before is None or after != before)
        seen["new" if moved else "old"] += 1
        if moved:
            if not first:
                assert sum(one.sequence for one in (after or {}).values()) == sum(one.sequence for one in (before or {}).values()) + 66
            undo(before)
    assert seen["old"] > (10 if ALL else 5)
    assert seen["new"] >= 2  # the flush and the close of the directory come after the change


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_commit_that_fails_leaves_the_old_positions_or_the_new_ones_and_can_be_repeated(
    root: HubRoot, number: int, open_files: Callable[[], set[str]]
) -> None:
    add(root, "a", list(range(100)))
    with root.reader("r") as reader:
        for nth in itertools.count(1):
            before = places_of(root)
            data(reader.read(limit=1))
            files = open_files()
            port = FailingPort(nth, number, only=(*FILE_CALLS, "names"))
            with system.replaced(port):
                try:
                    reader.commit()
                except OSError as error:
                    assert error.errno == number
            stored = places_of(root)
            assert stored is not None
            expected = {key: sequence for key, sequence in reader.positions.items()}
            if not port.failed:
                break
            assert stored == before or {key: one.sequence for key, one in stored.items()} == expected
            assert open_files() == files
            reader.commit()
            assert {key: one.sequence for key, one in (places_of(root) or {}).items()} == expected
        assert nth > 5


def test_the_records_of_a_journal_are_on_disk_before_the_position_after_them(root: HubRoot) -> None:
    add(root, "a", list(range(4)), bits=0, format="kvj")

    class Noting(system.Port):
        def __init__(self) -> None:
            super().__init__()
            self.flushed: list[str] = []

        def flush_data(self, fd: int) -> None:
            self.flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
            super().flush_data(fd)

        def rename(self, source: Any, target: Any) -> None:
            self.flushed.append(str(target))
            super().rename(source, target)

    with root.reader("r") as reader, system.replaced(Noting()) as port:
        data(reader.read())
        reader.commit()
        assert isinstance(port, Noting)
        assert [str(root.path / "a") in name for name in port.flushed] == [True, False]
        assert port.flushed[1] == str(position_file(root))
        port.flushed.clear()
        reader.commit()
        assert port.flushed == []


def packed(body: bytes, version: int = 1) -> bytes:
    return b"kvspool-hub-positions %d %08x\n" % (version, checksum(body)) + body


HOSTILE = [
    b"",
    b"[]",
    packed(b""),
    packed(b"{}"),
    packed(b"[1]"),
    packed(b'[["a",1,""]]'),
    packed(b'[["a",1,"",0,0]]'),
    packed(b'[["a",-1,"",0]]'),
    packed(b'[["a",9223372036854775808,"",0]]'),
    packed(b'[["a",1.5,"",0]]'),
    packed(b'[["a",1,"xyz",0]]'),
    packed(b'[["a",1,"",0],["a",2,"",0]]'),
    packed(b'[["a",1,"",0],["a.1.000",2,"",0]]'),
    packed(b'[["../../etc",1,"",0]]'),
    packed(b'[["",1,"",0]]'),
    packed(b'[["1.000",1,"",0]]'),
    packed(b'[["a.1.002",1,"",0]]'),
    packed(b'[["' + b"a" * 101 + b'",1,"",0]]'),
    packed(b"[" * 100_000),
    packed(b"[]")[:-1],
    packed(b"[]") + b" ",
    b"\0" * 4096,
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_positions_that_could_not_be_ours_are_refused_and_the_reader_can_be_deleted(root: HubRoot, content: bytes) -> None:
    add(root, "a", [1], bits=0)
    root.reader("r").close()
    position_file(root).write_bytes(content)
    with pytest.raises(Corruption, match=r"r\.positions has no valid positions"):
        root.reader("r")
    (stats,) = root.readers()
    assert stats.lag is None
    assert "r.positions" in stats.problem
    root.delete_reader("r")
    with root.reader("r") as reader:
        assert data(reader.read()) == [1]


def test_every_changed_byte_of_a_position_file_is_noticed(root: HubRoot) -> None:
    content = positions.pack({("a", 0): Position(1, 77, "0" * 32, 5), ("a", 1): Position(1, 3), ("b", 0): Position(0, 1)})
    assert positions.parse(content).places == {("a", 0): Position(1, 77, "0" * 32, 5), ("a", 1): Position(1, 3), ("b", 0): Position(0, 1)}
    for at in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            with pytest.raises((ValueError, UnknownVersion)):
                positions.parse(bytes(changed))
    for end in range(len(content)):
        with pytest.raises(ValueError):
            positions.parse(content[:end])


def test_a_file_of_a_newer_version_or_kind_is_refused(root: HubRoot) -> None:
    root.reader("r").close()
    position_file(root).write_bytes(packed(b"[]", version=3))
    with pytest.raises(UnknownVersion, match="upgrade, or delete the reader"):
        root.reader("r")
    position_file(root).unlink()
    os.mkfifo(position_file(root))
    with pytest.raises(Corruption, match="not a regular file, but a FIFO"):
        root.reader("r")
    position_file(root).unlink()
    with open(position_file(root), "wb") as file:
        file.truncate(positions.LARGEST + 1)
    with pytest.raises(Corruption, match=f"larger than {positions.LARGEST} bytes"):
        root.reader("r")


def test_an_interrupt_loses_no_record_and_doubles_none(root: HubRoot) -> None:
    """A signal handler raises at random moments."""
    add(root, "a", list(range(600)), bits=2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    got: list[Any] = []
    interrupts = 0
    with root.reader("r") as reader:
        gc.disable()  # an interrupt in one of its callbacks would be swallowed there
        try:
            while len(got) < 500 and interrupts < 100:
                reading = reader.read()
                sequences = reader.positions
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + interrupts % 7 * 0.0003)
                    while len(got) < 500:
                        sequences = reader.positions
                        got.append(next(reading))
                except KeyboardInterrupt:
                    interrupts += 1
                    if sum(reader.positions.values()) != len(got):
                        reader.seek(sequences)  # it came after the reader had handed the record out, before we had noted it
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            gc.enable()
        got += list(reader.read())
    assert interrupts
    assert Counter((record.shard, record.sequence) for record in got) == Counter((record.shard, record.sequence) for record in root.read())


# The command.


def test_the_command_lists_readers_and_deletes_one(root: HubRoot, run: Run) -> None:
    path = str(root.path)
    assert run("hub", "readers", path) == ("", "no durable readers\n")
    add(root, "a", list(range(10)))
    with root.reader("spark") as reader:
        data(reader.read(limit=4))
        reader.commit()
        out = run("hub", "readers", path).out
        assert "spark" in out
        assert "open: process" in out.replace("\n", " ")
        assert "is already open" in run("hub", "readers", path, "--delete", "spark", code=6).err
    root.reader("broken").close()
    position_file(root, "broken").write_bytes(b"x")
    broken, spark = run("hub", "readers", path, "--json").object
    assert (broken["lag"], spark["lag"]["records"], spark["holder"]) == (None, 6, "")
    assert "broken.positions" in broken["problem"]
    assert spark["lag"]["shards"] == [
        {"client": "a", "shard": 0, "sequence": 2, "records": 3},
        {"client": "a", "shard": 1, "sequence": 2, "records": 3},
    ]
    assert run("hub", "readers", path, "--delete", "spark").out == "deleted the reader 'spark'\n"
    assert "Examples:" in run("hub", "readers", "--help").out


def test_a_reader_of_the_synced_sees_only_what_is_on_disk(root: HubRoot) -> None:
    with root.create_client("a", bits=0, capacity=65536) as shards:
        shards.append("safe", durable=True)
        shards.append("not yet")
        with root.reader("r", isolation="synced") as reader:
            assert data(reader.read()) == ["safe"]
            assert data(reader.follow(timeout=0)) == []
            shards.shards[0].sync()
            assert data(reader.follow(timeout=0)) == ["not yet"]


def test_a_kvspool_log_is_no_root_and_a_root_of_readers_alone_is_one(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    with pytest.raises(NotALog):
        hub.open(tmp_path / "log")
    with hub.create(tmp_path / "root") as root:
        root.reader("r").close()
        assert root.clients() == []
        assert list(root) == []
    with hub.open(tmp_path / "root") as root:
        assert [one.name for one in root.readers()] == ["r"]
