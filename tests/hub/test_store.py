"""A hub's shard and everything that it can receive: each row of the table of decisions; and crashes, damage and a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from faults import FILE_CALLS, FailingPort
from shipping import LOG, OTHER, contents, gaps, numbered, shard_of, stored

import kvspool
from hub.errors import AccessError, Conflict, Fenced, HubFull, Malformed, Restored, RootInUse, Unexpected
from hub.protocol.ingest import LAST
from hub.protocol.reading import Generation
from hub.root.columns import SequencedBatch
from hub.root.store import GENERATIONS, MOST_GENERATIONS, CountedShard, Outcome, Shard, Store
from kvspool import system
from kvspool.errors import Corruption, LogNotFound, LogVanished, Poisoned

THIRD = b"c" * 16


def reached(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def shard(root: Path) -> Iterator[Shard]:
    with shard_of(root) as shard:
        yield shard


def texts(shard: Shard) -> list[tuple[int, bytes]]:
    return [(sequence, row.value) for sequence, row in contents(shard.journal).items()]


# The table of decisions.


def test_a_new_log_begins_at_zero(shard: Shard) -> None:
    assert shard.enter(LOG, 0) == (0, False)
    assert shard.put(LOG, numbered(0, 3), 0) == Outcome(3, 3)
    assert texts(shard) == [(0, b"record 0"), (1, b"record 1"), (2, b"record 2")]


def test_a_known_log_continues(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 3), 0)
    assert shard.enter(LOG, 3) == (3, True)
    assert shard.put(LOG, numbered(3, 5), 3) == Outcome(5, 2)
    assert shard.next(LOG) == 5


def test_repeated_records_are_not_written_again(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 5), 0)
    assert shard.put(LOG, numbered(0, 5), 0) == Outcome(5, 0, 5)
    assert shard.put(LOG, numbered(1, 3), 1) == Outcome(5, 0, 2)
    assert shard.put(LOG, numbered(3, 8), 3) == Outcome(8, 3, 2)
    assert [sequence for sequence, _ in texts(shard)] == list(range(8))


@pytest.mark.parametrize("rows", [numbered(0, 5, "other"), numbered(4, 9, "other"), numbered(2, 3, "other")])
def test_repeated_records_that_differ_are_a_conflict(shard: Shard, rows: SequencedBatch) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 5), 0)
    before = contents(shard.journal)
    with pytest.raises(Conflict, match=f"record {rows.first} was sent again"):
        shard.put(LOG, rows, rows.first)
    assert contents(shard.journal) == before and shard.next(LOG) == 5


def test_an_undeclared_gap_is_refused(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 2), 0)
    with pytest.raises(Unexpected) as caught:
        shard.put(LOG, numbered(3, 5), 3)
    assert caught.value.expected == 2 and shard.next(LOG) == 2
    with pytest.raises(Unexpected):
        shard.put(LOG, numbered(5, 6), 3)  # lost from 3 on, but what of 2?
    assert gaps(shard.journal) == []


def test_a_gap_that_was_declared_is_kept_and_exact(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 2), 0)
    assert shard.put(LOG, numbered(10, 12), 2) == Outcome(12, 2, 0, 8)
    assert gaps(shard.journal) == [(2, 9)]
    assert shard.put(LOG, numbered(10, 12), 2) == Outcome(12, 0, 2, 0)
    assert shard.put(LOG, numbered(20, 21), 11) == Outcome(21, 1, 0, 8)
    assert gaps(shard.journal) == [(2, 9), (12, 19)]


def test_a_log_may_begin_with_a_gap(shard: Shard) -> None:
    shard.enter(LOG, 1000)
    assert shard.put(LOG, numbered(990, 1000), 0) == Outcome(1000, 10, 0, 990)
    assert [sequence for sequence, _ in texts(shard)] == list(range(990, 1000))
    assert shard.enter(LOG, 1000) == (1000, True)


def test_a_gap_over_what_is_stored_changes_nothing_of_it(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 6), 0)
    assert shard.put(LOG, numbered(10, 11), 3) == Outcome(11, 1, 0, 4)
    assert [sequence for sequence, _ in texts(shard)] == [*range(6), 10]
    assert shard.put(LOG, numbered(4, 6), 1) == Outcome(11, 0, 2)


def test_records_that_were_declared_lost_do_not_come_back(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 2), 0)
    shard.put(LOG, numbered(6, 8), 2)
    with pytest.raises(Conflict, match="record 2"):
        shard.put(LOG, numbered(2, 6), 2)
    with pytest.raises(Conflict, match="record 2"):
        shard.put(LOG, numbered(0, 8), 0)
    assert gaps(shard.journal) == [(2, 5)]


def test_a_log_that_was_restored_is_refused(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 5), 0)
    with pytest.raises(Restored, match="up to 5"):
        shard.enter(LOG, 4)
    assert shard.enter(LOG, 5) == (5, True)


def test_a_log_that_was_recreated_begins_a_generation(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 5), 0)
    assert shard.enter(OTHER, 2) == (0, False)
    assert shard.put(OTHER, numbered(0, 2, "other"), 0) == Outcome(2, 2)
    assert texts(shard)[4:] == [(4, b"record 4"), (5, b"other 0"), (6, b"other 1")]
    assert shard.generations == [Generation(LOG.hex(), 0), Generation(OTHER.hex(), 5)]
    assert shard.enter(OTHER, 2) == (2, True)


def test_a_new_generation_may_begin_with_a_gap(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 5), 0)
    shard.enter(OTHER, 100)
    assert shard.put(OTHER, numbered(98, 100, "other"), 0) == Outcome(100, 2, 0, 98)
    assert gaps(shard.journal) == [(5, 102)]


def test_a_log_that_was_replaced_is_fenced(shard: Shard) -> None:
    shard.enter(LOG, 0)
    shard.put(LOG, numbered(0, 5), 0)
    shard.enter(OTHER, 0)
    for refused in (
        lambda: shard.enter(LOG, 5),
        lambda: shard.put(LOG, numbered(5, 6), 5),
        lambda: shard.put(LOG, numbered(0, 5), 0),
        lambda: shard.next(LOG),
        lambda: shard.put(THIRD, numbered(0, 1), 0),
    ):
        with pytest.raises(Fenced):
            refused()
    assert len(texts(shard)) == 5


def test_generations_come_to_an_end(shard: Shard) -> None:
    shard.generations = [Generation(f"{number:032x}", 0) for number in range(MOST_GENERATIONS)]
    with pytest.raises(Conflict, match="which is the limit"):
        shard.enter(LOG, 0)
    shard._store(shard.generations)
    shard.journal.close()
    again = Shard(shard.path)  # the largest table can be read
    assert len(again.generations) == MOST_GENERATIONS
    again.close()


@pytest.mark.parametrize("first", [1 << 32, (1 << 32) - 2, (1 << 62) + 5, LAST - 4])
def test_sequences_may_be_large(shard: Shard, first: int) -> None:
    shard.enter(LOG, first)
    assert shard.put(LOG, numbered(first, first + 3), 0).expected == first + 3
    assert shard.put(LOG, numbered(first + 1, first + 3), first) == Outcome(first + 3, 0, 2)
    assert shard.enter(LOG, first + 3) == (first + 3, True)
    assert gaps(shard.journal) == [(0, first - 1)]


def test_a_sequence_that_no_journal_has_room_for_is_refused(shard: Shard) -> None:
    shard.enter(LOG, LAST - 1)
    with pytest.raises(Malformed):
        shard.put(LOG, numbered(LAST - 2, LAST), 0)
    shard.put(LOG, numbered(LAST - 4, LAST - 2), 0)
    shard.enter(OTHER, 10)
    with pytest.raises(Malformed):
        shard.put(OTHER, numbered(0, 3), 0)
    assert len(texts(shard)) == 2


# Shards after trimming, damage and loss.


def fill(root: Path, **options: int) -> Path:
    """Let a shard have 40 records; return its path."""
    path = root / "client"
    root.mkdir()
    kvspool.create(path, format="kvj", segment_bytes=300, **options).close()
    with shard_of(root) as shard:
        shard.enter(LOG, 40)
        shard.put(LOG, numbered(0, 40), 0)
    return path


def test_a_trimmed_journal_still_says_what_is_stored(root: Path) -> None:
    path = fill(root)
    with kvspool.open(path) as journal:
        journal.trim(before=40)
    with shard_of(root) as shard:
        assert shard.enter(LOG, 40) == (40, True)
        assert shard.put(LOG, numbered(0, 40), 0) == Outcome(40, 0, 40)
        assert shard.put(LOG, numbered(30, 45), 30) == Outcome(45, 5, 10)
        with pytest.raises(Conflict):
            shard.put(LOG, numbered(0, 45, "other"), 0)


def damage(path: Path, text: bytes) -> None:
    for segment in (path / "kvj").iterdir():
        data = bytearray(segment.read_bytes())
        if text in data:
            data[data.index(text)] ^= 1
            segment.write_bytes(data)
            return
    raise AssertionError("it is not there")


def test_a_journal_that_is_damaged_before_its_end_takes_what_comes(root: Path) -> None:
    path = fill(root)
    damage(path, b"record 7")
    with shard_of(root) as shard:
        assert shard.enter(LOG, 40) == (40, True)
        assert shard.put(LOG, numbered(0, 42), 0) == Outcome(42, 2, 40)


def test_a_journal_whose_last_record_is_damaged_continues_after_it(root: Path) -> None:
    path = fill(root)
    damage(path, b"record 39")
    with shard_of(root) as shard:
        assert shard.enter(LOG, 40) == (40, True)
        assert shard.put(LOG, numbered(38, 41), 38) == Outcome(41, 1, 2)
    with kvspool.open(path) as journal:
        assert gaps(journal)[-1] == (39, 39) and list(contents(journal)) == [*range(39), 40]


def test_a_last_record_that_the_machine_has_torn_comes_from_the_client_again(root: Path) -> None:
    path = fill(root)
    damage(path, b"record 39")
    (path / "lock").unlink()  # as after a restart of the machine: nothing says where the end was
    with shard_of(root) as shard:
        assert shard.enter(LOG, 41) == (39, True)
        assert shard.put(LOG, numbered(38, 41), 38) == Outcome(41, 2, 1)
    assert list(stored(path)) == list(range(41))


def test_a_torn_record_at_the_end_is_asked_for_again(root: Path) -> None:
    path = fill(root)
    last = max((path / "kvj").iterdir())
    os.truncate(last, last.stat().st_size - 3)
    (path / "lock").unlink()  # as after a restart of the machine: nothing says that there was more
    with shard_of(root) as shard:
        assert shard.enter(LOG, 40) == (39, True)
        assert shard.put(LOG, numbered(38, 40), 38) == Outcome(40, 1, 1)
    assert list(stored(path)) == list(range(40))


def test_without_its_table_of_generations_a_shard_that_has_records_is_not_begun_again(root: Path) -> None:
    path = fill(root)
    (path / GENERATIONS).unlink()
    with pytest.raises(Corruption, match="has records"), shard_of(root):
        pass


def test_an_empty_shard_without_a_table_is_new(root: Path) -> None:
    with shard_of(root) as shard:
        shard.enter(LOG, 0)
    (root / "client" / GENERATIONS).unlink()
    with shard_of(root) as shard:
        assert shard.enter(OTHER, 0) == (0, False)


GOOD = {"log": LOG.hex(), "base": 0}


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b"[1]",
        msgspec.json.encode([GOOD])[:-1],
        msgspec.json.encode([GOOD | {"more": 1}]),
        msgspec.json.encode([GOOD | {"base": -1}]),
        msgspec.json.encode([GOOD | {"base": LAST}]),
        msgspec.json.encode([GOOD | {"log": "../.."}]),
        msgspec.json.encode([GOOD, GOOD]),
        msgspec.json.encode([{"log": OTHER.hex(), "base": 3}, GOOD]),
        msgspec.json.encode([GOOD] * 20_000),
    ],
    ids=lambda table: str(table[:50]),
)
def test_a_damaged_table_of_generations_is_refused(root: Path, table: bytes) -> None:
    path = fill(root)
    (path / GENERATIONS).write_bytes(table)
    with pytest.raises(Corruption, match="table of generations"), shard_of(root):
        pass


def test_a_generation_whose_first_record_was_not_written_yet_continues(root: Path) -> None:
    fill(root)
    with shard_of(root) as shard:
        assert shard.enter(OTHER, 7) == (0, False)
    with shard_of(root) as shard:
        assert shard.enter(OTHER, 7) == (0, True)
        assert shard.put(OTHER, numbered(0, 7, "other"), 0) == Outcome(7, 7)
    assert list(stored(root / "client")) == list(range(47))


def test_a_generation_that_begins_after_the_end_leaves_a_gap(root: Path) -> None:
    """The table is from before a crash of the machine that took records away; they were synced, so this is damage, and costs no more."""
    path = fill(root)
    (path / GENERATIONS).write_bytes(msgspec.json.encode([Generation(LOG.hex(), 0), Generation(OTHER.hex(), 50)]))
    with shard_of(root) as shard:
        assert shard.enter(OTHER, 3) == (0, True)
        assert shard.put(OTHER, numbered(0, 3), 0) == Outcome(3, 3)
    assert list(stored(path)) == [*range(40), 50, 51, 52]


# The store.


def test_one_hub_at_a_time_has_a_root(root: Path) -> None:
    root.mkdir()
    with Store(root), pytest.raises(RootInUse, match="stop it first"):
        Store(root)
    Store(root).close()


def test_shards_are_made_and_kept_open(root: Path) -> None:
    root.mkdir()
    with Store(root) as store:
        store.enter("JFK", 2)
        store.enter("JFK", 2)
        assert sorted(os.listdir(root)) == [".hub", "JFK.2.000", "JFK.2.001", "JFK.2.002", "JFK.2.003"]
        assert store.take("JFK", 2, 1) is store.take("JFK", 2, 1)
        shutil.rmtree(root / "JFK.2.002")
        store.enter("JFK", 2)
        assert store.take("JFK", 2, 2).enter(LOG, 0) == (0, False)
        with pytest.raises(Conflict, match="has 4 shards"):
            store.enter("JFK", 1)
        with pytest.raises(LogNotFound):
            store.take("LAX", 0, 0)


@pytest.mark.parametrize("client", ["", "..", "a/b", "a.1.000", ".hub", "a\0", "é", "a" * 101])
def test_no_name_leaves_the_root(root: Path, client: str) -> None:
    root.mkdir()
    with Store(root) as store:
        with pytest.raises(Malformed):
            store.enter(client, 1)
        assert os.listdir(root) == [".hub"]


def test_open_journals_are_bounded_although_all_shards_have_a_shipper(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.root.store.MOST_OPEN", 2)
    root.mkdir()
    with Store(root) as store:
        store.enter("JFK", 3)
        taken = [store.take("JFK", 3, index) for index in range(8)]
        for shard in taken:
            assert shard.enter(LOG, 6) == (0, False)
        for at in range(0, 6, 2):
            for shard in taken:
                assert shard.put(LOG, numbered(at, at + 2), at) == Outcome(at + 2, 2)
                assert store.open_journals <= 2
        assert sum(shard.is_open for shard in taken) == 2
        for shard in taken:
            shard.sync()
            assert shard.next(LOG) == 6
    assert not any(shard.is_open for shard in taken)


def test_a_journal_in_use_is_not_closed_for_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.root.store.MOST_OPEN", 1)
    root.mkdir()
    with Store(root) as store:
        store.enter("JFK", 2)
        first, *others = [store.take("JFK", 2, index) for index in range(4)]
        with first.using() as journal:
            for shard in others:
                shard.enter(LOG, 1)
            assert not journal.closed
            assert store.open_journals <= 2
        others[0].put(LOG, numbered(0, 1), 0)
        assert journal.closed and store.open_journals == 1


def test_a_quiet_shard_that_was_replaced_is_not_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.root.store.MOST_OPEN", 1)
    root.mkdir()
    with Store(root) as store:
        store.enter("JFK", 1)
        quiet, other = store.take("JFK", 1, 0), store.take("JFK", 1, 1)
        quiet.enter(LOG, 1)
        other.enter(LOG, 1)
        shutil.rmtree(root / "JFK.1.000")
        kvspool.create(root / "JFK.1.000", format="kvj").close()
        assert not quiet.is_open
        with pytest.raises(LogVanished):
            quiet.put(LOG, numbered(0, 1), 0)


def test_shards_of_many_clients_are_made_with_one_flush(root: Path) -> None:
    class Counting(system.Port):
        """Counts flushes; the first one waits until all clients have asked."""

        flushes: ClassVar[list[str]] = []
        first = threading.Event()
        others = threading.Event()

        def flush_filesystem(self, fd: int) -> None:
            self.flushes.append("all")
            self.first.set()
            assert self.others.wait(60)
            super().flush_filesystem(fd)

    root.mkdir()
    with Store(root) as store, system.replaced(Counting()):
        with ThreadPoolExecutor(9) as pool:
            done = [pool.submit(store.enter, "first", 5)]
            assert Counting.first.wait(60)
            done += [pool.submit(store.enter, f"c{number}", 4) for number in range(8)]
            reached(lambda: len(store._maker._orders) == 8)
            Counting.others.set()
            for one in done:
                one.result()
        assert Counting.flushes == ["all", "all"]
        for number in range(8):
            assert store.take(f"c{number}", 4, 15).enter(LOG, 0) == (0, False)
        assert os.listdir(root / ".hub") == ["lock"]
    ids = {kvspool.open(path).log_id for path in root.glob("c*")}
    assert len(ids) == 8 * 16


def test_a_new_shard_expects_the_log_that_was_announced(root: Path) -> None:
    root.mkdir()
    with Store(root) as store:
        store.enter("JFK", 1, {0: LOG, 1: OTHER})
        for index, log in enumerate((LOG, OTHER)):
            shard = store.take("JFK", 1, index)
            assert [one.log for one in shard.generations] == [log.hex()]
            assert shard.enter(log, 3) == (0, False)
            assert shard.enter(log, 3) == (0, True)
            assert shard.put(log, numbered(0, 3), 0) == Outcome(3, 3)
        with pytest.raises(Fenced):
            store.take("JFK", 1, 0).put(OTHER, numbered(0, 1), 0)


def test_what_a_crash_left_of_new_shards_is_removed(root: Path) -> None:
    root.mkdir()
    (root / ".hub" / "new" / "JFK.1.000" / "kvj").mkdir(parents=True)
    with Store(root) as store:
        assert os.listdir(root / ".hub") == ["lock"]
        store.enter("JFK", 1)
        assert store.take("JFK", 1, 0).enter(LOG, 0) == (0, False)


@pytest.mark.parametrize("name", ["make_directory", "open", "write", "flush", "rename"])
def test_a_shard_that_cannot_be_made_is_refused_and_made_later(root: Path, name: str) -> None:
    root.mkdir()
    with Store(root) as store:
        store.enter("before", 1)
        with system.replaced(FailingPort(1, errno.ENOSPC, (name,), every=True)), pytest.raises(HubFull, match="No space"):
            store.enter("JFK", 1)
        store.enter("JFK", 1)
        assert store.take("JFK", 1, 1).enter(LOG, 0) == (0, False)


def test_sizes_follow_what_others_do_and_unchanged_shards_are_not_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    with Store(root) as store:
        for name in ("a", "b"):
            with kvspool.create(root / name, format="kvj") as log:
                log.append_many([b"1", b"2"])
        store.count()
        assert {client: shards[0].next for client, shards in store.sizes().items()} == {"a": 2, "b": 2}
        reached(lambda: not store.count() and all(shards[0].is_current for shards in store._counted.values()))
        with kvspool.open(root / "a") as log:
            log.append(b"3")
        counted: list[str] = []
        count = CountedShard.at
        monkeypatch.setattr(CountedShard, "at", lambda path: counted.append(path.name) or count(path))
        store.count()
        assert counted == ["a"] and store.sizes()["a"][0].next == 3
        shutil.rmtree(root / "b")
        store.count()
        assert list(store.sizes()) == ["a"]


def test_a_shard_that_was_removed_is_reopened(root: Path) -> None:
    root.mkdir()
    with Store(root) as store:
        store.enter("JFK", 0)
        before = store.take("JFK", 0, 0)
        before.enter(LOG, 1)
        before.put(LOG, numbered(0, 1), 0)
        shutil.rmtree(root / "JFK")
        store.enter("JFK", 0)
        after = store.take("JFK", 0, 0)
        assert after is not before and after.enter(LOG, 1) == (0, False)
        store.give_back("JFK", 0)
        store.give_back("JFK", 0)


# A disk that is full, or fails.


@pytest.mark.parametrize(("nth", "number"), [(1, errno.ENOSPC), (3, errno.EIO)])
def test_whatever_call_fails_nothing_is_lost_or_doubled(tmp_path: Path, nth: int, number: int) -> None:
    """Let one call of the system fail, each fourth in turn: the client gets an error, and afterwards all works again."""
    while True:
        nth += 4
        root = tmp_path / f"{nth}"
        port = FailingPort(nth, number, tuple(name for name in FILE_CALLS if name != "close"))  # the collector calls that, too
        expected = 0
        with system.replaced(port):
            try:
                with shard_of(root) as shard:
                    expected, _ = shard.enter(LOG, 10)
                    expected = shard.put(LOG, numbered(0, 6), 0).expected
                    shard.sync()
                    expected = shard.put(LOG, numbered(4, 10), 4).expected
                    shard.enter(OTHER, 2)
            except (HubFull, Poisoned, OSError) as error:
                assert port.failed, error
        if (root / "client").exists():
            kvspool.repair(root / "client")  # takes the note of a failed flush away
        with shard_of(root) as shard:
            if shard.generations and shard.generations[-1].log == OTHER.hex():
                assert shard.generations[-1].base == expected == 10
            else:
                found, _ = shard.enter(LOG, 10)
                assert found >= expected
                shard.put(LOG, numbered(0, 10), 0)
        assert {sequence: row.value for sequence, row in stored(root / "client").items()} == {at: b"record %d" % at for at in range(10)}
        if not port.failed:
            assert nth > 20
            break
        shutil.rmtree(root)


def test_a_shard_continues_when_there_is_room_again(root: Path) -> None:
    with shard_of(root) as shard:
        shard.enter(LOG, 10)
        shard.put(LOG, numbered(0, 3), 0)
        for _ in range(3):
            with system.replaced(FailingPort(1, errno.ENOSPC, ("write", "allocate"), every=True)), pytest.raises(HubFull, match="space"):
                shard.put(LOG, numbered(3, 6), 3)
            assert shard.next(LOG) == 3
        assert shard.put(LOG, numbered(3, 6), 3) == Outcome(6, 3)
    assert list(stored(root / "client")) == list(range(6))


def test_a_disk_that_fails_to_flush_never_acknowledges(root: Path) -> None:
    with shard_of(root) as shard:
        shard.enter(LOG, 10)
        shard.put(LOG, numbered(0, 3), 0)
        with system.replaced(FailingPort(1, errno.EIO, ("flush_data", "flush"), every=True)):
            for _ in range(2):
                with pytest.raises(Poisoned):
                    shard.sync()
        with pytest.raises(Poisoned):
            shard.put(LOG, numbered(3, 6), 3)
    kvspool.repair(root / "client")
    with shard_of(root) as shard:
        assert shard.enter(LOG, 10) == (3, True)
        shard.sync()


def test_a_root_that_anybody_may_write_is_refused_and_left_alone(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(AccessError, match=rf"mode {mode:o}\); chmod o-w {tmp_path}"):
            Store(tmp_path)
    assert os.listdir(tmp_path) == []
    for mode in (0o770, 0o755, 0o700):
        tmp_path.chmod(mode)
        Store(tmp_path).close()


def test_a_root_of_another_user_is_refused_to_all_but_root(tmp_path: Path) -> None:
    class As(system.Port):
        def __init__(self, user: int) -> None:
            self.user = user

        def user_id(self) -> int:
            return self.user

        def look_up(self, path: str | os.PathLike[str]) -> os.stat_result | None:
            """Say that everything belongs to user 1000."""
            found = super().look_up(path)
            return None if found is None else os.stat_result((*found[:4], 1000, *found[5:]))

    with system.replaced(As(1001)), pytest.raises(AccessError, match="belongs to user 1000, not to user 1001"):
        Store(tmp_path)
    assert os.listdir(tmp_path) == []
    for user in (1000, 0):
        with system.replaced(As(user)):
            Store(tmp_path).close()
