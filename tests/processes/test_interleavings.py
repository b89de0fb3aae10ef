"""One handle is stopped before an opcode, another does all of its work, the first goes on: before each opcode, or a sample of them.

KVSPOOL_ALL_SCHEDULES=1 tries all of them, and pairs of stops for the smallest pair; the default is an even sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import ClockPort
from interleavings import Files, account, run
from schedules import ALL

import kvspool
from kvspool import Gap, Spool, errors, system

SCHEDULES = 40  # of each pair, evenly over all opcodes


def stops(opcodes: int) -> Iterator[tuple[int, ...]]:
    step = 1 if ALL else max(1, opcodes // SCHEDULES)
    return ((at,) for at in range(1 + random.randrange(step), opcodes + 1, step))


class Pair:
    """A log in the state from which every schedule begins, and two handles of it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        kvspool.create(path, capacity=4096, **options).close()
        self.a = kvspool.open(path, timeout=0)
        self.b = kvspool.open(path, timeout=0)
        self.fill(self.a)

    def fill(self, log: Spool) -> None:
        for at in range(50):
            log.append(b"before %d" % at + bytes(60))
        self.b.append(b"b")  # both have a writer
        self.next = log.stats().next_sequence
        self.files = Files(self.path)

    def schedules(self, first: Callable[[], Any], second: Callable[[], Any], check: Callable[[Any, list[Any]], None]) -> int:
        """Try each schedule; return how many there were."""
        opcodes = run(first, second, ())[2]
        self.files.put_back()
        count = 0
        for at in stops(opcodes):
            result, results, _ = run(first, second, at)
            if results:  # fewer opcodes this time: a new second, say
                check(result, results)
                count += 1
            self.files.put_back()
        assert count >= min(SCHEDULES // 2, opcodes // 2)
        print(f"{count} schedules of {opcodes} opcodes")
        return count

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def make(interpreted: None, tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def one(**options: Any) -> Pair:
        made.append(Pair(tmp_path / "log", **options))
        return made[-1]

    yield one
    for pair in made:
        pair.close()


def attempt(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call, with errors that another handle's lock, or lack of room, causes as its result."""

    def attempted() -> Any:
        try:
            return call()
        except (errors.LockTimeout, errors.SpoolFull, errors.ReaderBusy, errors.NoSuchReader) as error:
            return error

    return attempted


def test_append_against_append(make: Callable[..., Pair]) -> None:
    pair = make()
    refused = 0

    def check(mine: Any, others: list[Any]) -> None:
        nonlocal refused
        (other,) = others
        got = {sequence: value for sequence, value in ((mine, b"mine"), (other, b"other")) if isinstance(sequence, int)}
        refused += isinstance(other, errors.LockTimeout)
        assert isinstance(mine, int), "no handle holds the lock when it continues"
        assert sorted(got) == list(range(pair.next, pair.next + len(got)))
        for log in (pair.a, pair.b):
            found = account(log)
            assert {sequence: found[sequence] for sequence in got} == got
            assert max(found) == max(got)
        assert pair.b.append(b"after") == max(got) + 1

    count = pair.schedules(lambda: pair.a.append(b"mine"), attempt(lambda: pair.b.append(b"other")), check)
    assert 0 < refused < count, "some stops are under the lock, some are not"


def test_a_batch_that_makes_room_against_a_read(make: Callable[..., Pair]) -> None:
    pair = make()
    values = [b"%d" % at + bytes(120) for at in range(9)]

    def check(mine: Any, others: list[Any]) -> None:
        assert mine == range(pair.next, pair.next + 9)
        for found in others:
            for sequence, value in found.items():
                if sequence >= pair.next:
                    assert value == values[sequence - pair.next]
                elif sequence < 50:
                    assert value == b"before %d" % sequence + bytes(60)
        assert {at: account(pair.b)[at] for at in mine} == dict(zip(mine, values, strict=True))

    pair.schedules(lambda: pair.a.append_many(values), lambda: account(pair.b), check)


@pytest.mark.parametrize("count", [1, 9, 60], ids=["one record", "half a lap", "several laps"])
def test_a_read_against_what_runs_over_it(make: Callable[..., Pair], count: int) -> None:
    pair = make()
    gaps = 0

    def read() -> list[Any]:
        return list(pair.a.read(0, on_gap="yield"))

    def check(items: Any, others: list[Any]) -> None:
        nonlocal gaps
        expected = 0
        for item in items:
            first, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
            assert first == expected
            expected = last + 1
            gaps += isinstance(item, Gap)
            if isinstance(item, Gap):
                assert item.reason == "overrun"
            elif item.sequence < 50:
                assert item.value == b"before %d" % item.sequence + bytes(60)
            else:
                assert item.value in (b"b", b"new" + bytes(150))
        assert expected in (pair.next, pair.next + count), "up to where the log ended when the read began"

    tried = pair.schedules(read, lambda: pair.b.append_many([b"new" + bytes(150)] * count), check)
    assert gaps >= tried


def test_a_followers_asking_against_a_publication(make: Callable[..., Pair]) -> None:
    pair = make()
    following = pair.a.follow(pair.next, timeout=0)
    assert list(following) == []

    def check(items: Any, others: list[Any]) -> None:
        (sequence,) = others
        late = pair.a.follow(pair.next, timeout=0)
        assert [record.sequence for record in (*items, *late)][:1] == [sequence]
        late.close()

    def follow() -> list[Any]:
        with pair.a.follow(pair.next, timeout=0) as fresh:
            return list(fresh)

    pair.schedules(follow, lambda: pair.b.append(b"news"), check)
    following.close()


def test_a_commit_against_an_append_that_waits_for_it(make: Callable[..., Pair]) -> None:
    pair = make(policy="block")
    with pair.a.reader("reader") as reader:
        taken = [record.sequence for record in reader.read(limit=5)]
        with pytest.raises(errors.SpoolFull):
            while True:
                pair.b.append(bytes(100))
        pair.next = pair.b.stats().next_sequence
        pair.files = Files(pair.path)
        committed, place = reader._committed, reader._place()

        def commit() -> Any:
            reader._committed, reader._known = committed, place  # as it was before the schedule
            return reader.commit()

        def check(mine: Any, others: list[Any]) -> None:
            assert mine == taken[-1] + 1
            assert reader.committed == mine
            found = account(pair.b)
            assert set(range(mine, pair.next)) <= set(found), "nothing that is not committed was overwritten"
            if isinstance(others[0], int):
                assert found[others[0]] == bytes(100)
            else:
                assert isinstance(others[0], errors.SpoolFull)
                assert pair.b.append(bytes(100)) == pair.next, "there is room now"

        pair.schedules(commit, attempt(lambda: pair.b.append(bytes(100))), check)


class AgingPort(ClockPort):
    """A stopped wall clock, `age` ns later; the monotonic clock is later, too."""

    age = 0

    def now(self) -> int:
        return super().now() + self.age

    def monotonic(self) -> float:
        return super().monotonic() + self.age / 1e9


def test_giving_a_reader_up_against_its_commit(make: Callable[..., Pair]) -> None:
    """The reader has been silent for too long when it commits; a writer that finds the log full gives it up, before, meanwhile or after."""
    pair = make(policy="raise", reader_expiry=10)
    clock = AgingPort(system.port.now())
    with system.replaced(clock), pair.a.reader("reader") as reader:
        assert len(list(reader.read(limit=5))) == 5
        with pytest.raises(errors.SpoolFull):
            while True:
                pair.b.append(bytes(100))
        clock.age = 11 * 10**9
        pair.next = pair.b.stats().next_sequence
        pair.files = Files(pair.path)
        committed, place = reader._committed, reader._place()
        refused = evicted = 0

        def commit() -> Any:
            reader._committed, reader._known = committed, place  # as it was before the schedule
            return reader.commit()

        def check(mine: Any, others: list[Any]) -> None:
            nonlocal refused, evicted
            assert mine == place[1]
            refused += isinstance(others[0], errors.LockTimeout)
            assert isinstance(others[0], int | errors.LockTimeout), "it is evicted, or has moved on"
            (listed,) = pair.b.readers()
            assert (listed.sequence, listed.expired, listed.damaged) == (mine, False, False), "whatever came first, it is waited for again"
            first = pair.b.stats().first_sequence
            evicted += first > committed.sequence
            with pytest.raises(errors.SpoolFull):
                while True:
                    pair.b.append(bytes(100))
            assert pair.b.stats().first_sequence == max(first, mine), "nothing that came after the commit is overwritten"
            account(pair.b)

        count = pair.schedules(commit, attempt(lambda: pair.b.append(bytes(100))), check)
        assert refused < count and evicted


@pytest.mark.parametrize("bursting_first", [True, False])
def test_the_appends_of_a_writer_against_an_append_of_another_handle(make: Callable[..., Pair], bursting_first: bool) -> None:
    pair = make()
    gave_way = kept = 0

    def burst() -> list[int]:
        with pair.a.writer() as writer:
            return [writer.append(b"burst %d" % at) for at in range(4)]

    def ask() -> Any:
        got = attempt(lambda: pair.b.append(b"other"))()
        return got

    def check(mine: Any, others: list[Any]) -> None:
        nonlocal gave_way, kept
        (bursts, other) = (mine, others[0]) if bursting_first else (others[0], mine)
        got = {} if not isinstance(other, int) else {other: b"other"}
        if isinstance(bursts, list):
            got.update((sequence, b"burst %d" % at) for at, sequence in enumerate(bursts))
            assert bursts == sorted(bursts)
        gave_way += isinstance(other, int) and isinstance(bursts, list) and bursts[0] < other < bursts[-1]
        kept += isinstance(other, errors.LockTimeout)
        found = account(pair.b)
        assert {sequence: value for sequence, value in found.items() if sequence >= pair.next} == got
        assert sorted(got) == list(range(pair.next, pair.next + len(got))), "dense"
        assert pair.b.append(b"after") == pair.next + len(got), "no handle keeps the lock"

    first, second = (burst, ask) if bursting_first else (ask, attempt(burst))
    count = pair.schedules(first, second, check)
    if bursting_first:
        assert 0 < kept < count


@pytest.mark.parametrize("deleting_first", [False, True])
def test_opening_a_reader_against_deleting_it(make: Callable[..., Pair], deleting_first: bool) -> None:
    pair = make()
    pair.a.reader("reader").close()
    pair.files = Files(pair.path)

    def open_it() -> int:
        with pair.a.reader("reader", start="latest") as reader:
            return reader.commit()

    def check(mine: Any, others: list[Any]) -> None:
        for result in (mine, others[0]):
            assert result is None or isinstance(result, int | errors.LockTimeout | errors.ReaderBusy)
        names = [reader.name for reader in pair.b.readers()]
        assert names in ([], ["reader"])
        assert not any(reader.damaged for reader in pair.b.readers())
        with pair.b.reader("reader") as reader:
            assert reader.sequence <= pair.next

    both = attempt(open_it), attempt(lambda: pair.b.delete_reader("reader"))
    pair.schedules(*(reversed(both) if deleting_first else both), check)


def test_a_new_key_against_a_new_key(make: Callable[..., Pair]) -> None:
    pair = make(codec="keyed")

    def check(mine: Any, others: list[Any]) -> None:
        for log in (pair.a, pair.b):
            data = {record.sequence: record.data for record in log if record.sequence >= pair.next}
            if isinstance(mine, int):
                assert data[mine] == {"both": 1, "mine": 2}
            if isinstance(others[0], int):
                assert data[others[0]] == {"both": 3, "other": 4}
        with kvspool.open(pair.path) as fresh:
            assert fresh.append({"mine": 5, "other": 6}) == fresh.stats().next_sequence - 1
            assert list(fresh)[-1].data == {"mine": 5, "other": 6}

    def in_fresh(value: Any) -> Callable[[], Any]:
        def append() -> Any:
            with kvspool.open(pair.path, timeout=0) as log:  # which knows no key that a schedule before took back
                return log.append(value)

        return attempt(append)

    check_handles = pair.a, pair.b

    def check_anew(mine: Any, others: list[Any]) -> None:
        with kvspool.open(pair.path) as pair.a, kvspool.open(pair.path) as pair.b:
            check(mine, others)
        pair.a, pair.b = check_handles

    pair.schedules(in_fresh({"both": 1, "mine": 2}), in_fresh({"both": 3, "other": 4}), check_anew)


@pytest.mark.skipif(not ALL, reason="pairs of stops are for the campaign")
def test_two_appends_in_one(make: Callable[..., Pair]) -> None:
    pair = make()
    opcodes = run(lambda: pair.a.append(b"mine"), lambda: None, ())[2]
    pair.files.put_back()
    tried = 0
    for first in range(1, opcodes, 3):
        for second in range(first + 1, opcodes, 7):
            mine, others, _ = run(lambda: pair.a.append(b"mine"), attempt(lambda: pair.b.append(b"other")), (first, second))
            got = [sequence for sequence in (mine, *others) if isinstance(sequence, int)]
            assert sorted(got) == list(range(pair.next, pair.next + len(got)))
            assert account(pair.b)[mine] == b"mine"
            pair.files.put_back()
            tried += 1
    print(f"{tried} pairs of stops")
