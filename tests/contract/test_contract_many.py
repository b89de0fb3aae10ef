"""The promises of a log that a shard set and a hub root keep too, for many logs at once: reads, followers, event loops, appends, ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import hub
import shard
from kvspool.errors import Closed, GapError, OutOfRange, Unencodable, Unsupported
from kvspool.record import Gap

COUNT = 30


@pytest.fixture(params=["spool", "kvj"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[shard.ShardSet]:
    """An empty set of four shards, of each kind."""
    limits = {"capacity": 65536} if request.param == "spool" else {"segment_bytes": 400, "format": request.param}
    with shard.create(tmp_path / "root", prefix="JFK", bits=2, **limits) as made:
        yield made


@pytest.fixture(params=["set", "root"])
def many(request: pytest.FixtureRequest, shards: shard.ShardSet) -> Iterator[Any]:
    """The shard set, and the hub root with this client, with 30 records of ascending times; their values are `b"%04d" % number`."""
    for number in range(COUNT):
        shards.append(b"%04d" % number, key=b"k%d" % number, timestamp=1_000_000_000 * number)
    if request.param == "set":
        yield shards
    else:
        with hub.open(shards.path) as root:
            yield root


def values(items: Any) -> list[bytes]:
    return [item.value for item in items]


def expected(first: int = 0, end: int = COUNT) -> list[bytes]:
    return [b"%04d" % number for number in range(first, end)]


def test_all_records_are_read_as_those_of_one_log(many: Any) -> None:
    assert many
    assert len(many) == COUNT
    assert values(many) == values(many.read()) == list(many.read_values()) == expected()
    assert values(many.read(limit=7)) == list(many.read_values(limit=7)) == expected(0, 7)
    assert list(many.read("latest")) == list(many.read_values("latest")) == []
    late = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=16.5)
    assert values(many.read(late)) == list(many.read_values(late)) == values(many.follow(late, timeout=0)) == expected(17)
    assert values(many.read(late + timedelta(days=1))) == []
    assert sum(end - first for first, end in many.extent().values()) == COUNT


def test_a_read_ends_where_the_logs_ended_when_it_began(many: Any, shards: shard.ShardSet) -> None:
    reading = many.read()
    shards.append(b"late")
    assert values(reading) == expected()
    assert list(reading) == []
    assert len(list(many)) == COUNT + 1


@pytest.mark.parametrize("limit", [0, 1, COUNT, COUNT + 1])
def test_a_limit_ends_a_read(many: Any, limit: int) -> None:
    most = min(limit, COUNT)
    assert values(many.read(limit=limit)) == values(many.follow(limit=limit, timeout=0)) == expected(0, most)


@pytest.mark.parametrize("count", [0, 1, 7, COUNT, 99])
def test_the_last_records_are_those_of_a_read(many: Any, count: int) -> None:
    assert many.last(count) == list(many)[COUNT - min(count, COUNT) :]
    with pytest.raises(ValueError, match="must not be negative"):
        many.last(-1)


def test_a_record_is_found_by_its_place(many: Any) -> None:
    for record in many:
        place = (record.shard, record.sequence) if isinstance(many, shard.ShardSet) else (record.client, record.shard, record.sequence)
        assert many.get(*place) == record
        with many.view(*place) as view:
            assert bytes(view) == record.value
        with pytest.raises(OutOfRange):
            many.get(*place[:-1], 99)
    for wrong in (-1, 4):
        with pytest.raises((ValueError, hub.HubError, FileNotFoundError)):
            many.get(*place[:-2], wrong, 0)


@pytest.mark.parametrize("verb", ["read", "read_values", "follow", "follow_async"])
@pytest.mark.parametrize("arguments", [{"limit": -1}, {"on_gap": "ignore"}, {"isolation": "committed"}, {"start": "soon"}], ids=str)
def test_options_that_cannot_be_are_refused(many: Any, verb: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        getattr(many, verb)(**arguments)


def test_a_follower_refuses_times_that_are_none(many: Any) -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            many.follow(spin=wrong)
    with pytest.raises(ValueError):
        many.follow_async(timeout=float("nan"))


@pytest.mark.parametrize("verb", ["read", "follow"])
def test_a_gap_says_which_records_of_a_shard_are_lost(shards: shard.ShardSet, verb: str) -> None:
    key = next(key for key in (b"%d" % number for number in range(99)) if shards.shard_of(key) == 2)
    log: Any = shards.shards[2]
    while log.extent()[0] == 0:
        shards.append_many([b"x" * 1000] * 9, keys=[key] * 9)
        if log.kind != "spool":
            log.trim(before=9, force=True)
    shards.append(b"other", key=next(key for key in (b"%d" % number for number in range(99)) if shards.shard_of(key) == 1))
    first = log.extent()[0]
    with hub.open(shards.path) as root:
        for many, start in ((shards, {2: 0, 1: 0}), (root.reader("r"), None)):
            for on_gap in ("yield", "skip"):
                more = {"timeout": 0} if verb == "follow" else {}
                if start is None:
                    many.seek({("JFK", 2): 0})
                reading = getattr(many, verb)(**({} if start is None else {"start": start}), on_gap=on_gap, **more)
                gaps = [item for item in reading if isinstance(item, Gap)]
                assert [(gap.first, gap.last) for gap in gaps] == ([(0, first - 1)] if on_gap == "yield" else [])
                assert reading.missed == first
    with pytest.raises(GapError):
        shards.get(2, 0)
    assert len(shards.last(5)) == min(5, len(shards))


@pytest.mark.parametrize("spin", [0.0, 0.01])
def test_a_follower_gets_records_as_they_come(many: Any, shards: shard.ShardSet, spin: float) -> None:
    following = many.follow("latest", timeout=30, spin=spin)
    thread = threading.Thread(target=lambda: [(shards.append(b"%04d" % number), time.sleep(0.002)) for number in range(50)])
    thread.start()
    assert sorted(next(following).value for _ in range(50)) == expected(0, 50)
    thread.join()
    following.close()
    assert list(many.follow("latest", timeout=-1, spin=0.5)) == []


def test_an_event_loop_follows_many_logs_while_it_does_other_work(many: Any, shards: shard.ShardSet) -> None:
    async def run() -> list[bytes]:
        found = []
        async with many.follow_async(timeout=30) as following:
            asyncio.get_running_loop().call_later(0.01, shards.append_many, expected(COUNT, 40))
            async for record in following:
                found.append(record.value)
                if len(found) == 40:
                    break
        assert following.missed == 0
        return found

    assert sorted(asyncio.run(run())) == expected(0, 40)


def test_an_event_loop_ends_at_its_limit_and_after_its_timeout(many: Any) -> None:
    async def run(**arguments: Any) -> list[bytes]:
        return [record.value async for record in many.follow_async(**arguments)]

    assert asyncio.run(run(limit=7)) == expected(0, 7)
    assert asyncio.run(run(limit=0)) == []
    assert asyncio.run(run(timeout=0)) == asyncio.run(run(timeout=0.05)) == expected()


def test_a_cancelled_wait_of_an_event_loop_loses_no_record(many: Any, shards: shard.ShardSet) -> None:
    async def run() -> list[bytes]:
        following = many.follow_async("latest")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(following), 0.01)
        shards.append_many([b"a", b"b"], keys=[b"k", b"k"])
        found = [(await anext(following)).value for _ in range(2)]
        await following.aclose()
        return found

    assert asyncio.run(run()) == [b"a", b"b"]


def test_an_event_loop_gets_each_record_while_another_thread_appends(many: Any, shards: shard.ShardSet) -> None:
    async def run() -> list[bytes]:
        thread = threading.Thread(target=lambda: [(shards.append(b"%04d" % number), time.sleep(0.001)) for number in range(200)])
        following = many.follow_async("latest", timeout=30, limit=200)
        thread.start()
        found = [record.value async for record in following]
        thread.join()
        return found

    assert sorted(asyncio.run(run())) == expected(0, 200)


def test_an_event_loop_finds_a_new_client(tmp_path: Path) -> None:
    hub.create(tmp_path / "root").close()

    def append() -> None:
        with shard.create(tmp_path / "root", prefix="EWR", bits=1, capacity="1MiB") as made:
            made.append(b"first")

    async def run() -> list[bytes]:
        with hub.open(tmp_path / "root") as root:
            asyncio.get_running_loop().call_later(0.01, append)
            return [record.value async for record in root.follow_async(timeout=30, limit=1)]

    assert asyncio.run(run()) == [b"first"]


@pytest.mark.parametrize("does", ["close", "aclose"])
def test_closing_ends_the_wait_of_an_event_loop(many: Any, does: str) -> None:
    async def run() -> list[Any]:
        following = many.follow_async("latest")
        task = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0.01)
        if does == "aclose":
            await following.aclose()
        else:
            many.close()
        return await asyncio.gather(task, return_exceptions=True)

    assert [type(error) for error in asyncio.run(run())] == [Closed if does == "close" else StopAsyncIteration]


def test_an_event_loop_moves_a_durable_reader_of_a_root(shards: shard.ShardSet) -> None:
    shards.append_many(expected(), keys=[b"k"] * COUNT)

    async def run(root: hub.HubRoot, limit: int) -> list[bytes]:
        with root.reader("r") as reader:
            found = [record.value async for record in reader.follow_async(limit=limit, timeout=0)]
            assert max(reader.commit().values()) == max(reader.committed.values()) == max(reader.positions.values())
            return found

    with hub.open(shards.path) as root:
        assert asyncio.run(run(root, 10)) == expected(0, 10)
        assert asyncio.run(run(root, 99)) == expected(10)


# Closed.

CALLS: dict[str, Callable[[Any], object]] = {
    "read": lambda many: many.read(),
    "read_values": lambda many: many.read_values(),
    "follow": lambda many: many.follow(),
    "follow_async": lambda many: many.follow_async(),
    "extent": lambda many: many.extent(),
    "last": lambda many: many.last(),
    "len": len,
    "iter": iter,
    "stats": lambda many: many.stats(),
    "get": lambda many: many.get(0, 0) if isinstance(many, shard.ShardSet) else many.get("JFK", 0, 0),
    "view": lambda many: (many.view(0, 0) if isinstance(many, shard.ShardSet) else many.view("JFK", 0, 0)).__enter__(),
}
OF_SETS: dict[str, Callable[[Any], object]] = {
    "append": lambda shards: shards.append(b"four"),
    "append_many": lambda shards: shards.append_many([b"four"]),
    "append_many of no record": lambda shards: shards.append_many([]),
    "writer": lambda shards: shards.writer(),
    "producer": lambda shards: shards.producer("one"),
    "producers": lambda shards: shards.producers(),
    "forget_producers": lambda shards: shards.forget_producers(["one"]),
    "retire_producers": lambda shards: shards.retire_producers("one"),
    "sync": lambda shards: shards.sync(),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_shared_verb_of_a_closed_handle_raises_closed(many: Any, name: str) -> None:
    assert not many.closed
    many.close()
    many.close()
    assert many.closed
    assert repr(many).endswith(" closed>")
    with pytest.raises(Closed):
        CALLS[name](many)


@pytest.mark.parametrize("name", OF_SETS)
def test_every_appending_verb_of_a_closed_set_raises_closed(shards: shard.ShardSet, name: str) -> None:
    shards.close()
    with pytest.raises(Closed):
        OF_SETS[name](shards)


# Appends of a shard set.


@pytest.mark.parametrize("wrong", ["abcd", b"abcd", bytearray(b"abcd"), memoryview(b"abcd")], ids=lambda wrong: type(wrong).__name__)
def test_one_value_is_no_batch(shards: shard.ShardSet, wrong: Any) -> None:
    with pytest.raises(TypeError, match="values are an iterable with one for each record, not one"):
        shards.append_many(wrong)
    with pytest.raises(TypeError, match="keys are an iterable"):
        shards.append_many([b"four"] * 4, keys=wrong)
    with shards.writer() as writer, pytest.raises(TypeError, match="values are an iterable"):
        writer.append_many(wrong)
    assert len(shards) == 0


def test_keys_are_bytes_or_text(shards: shard.ShardSet) -> None:
    assert shards.append(b"a", key="ключ", timeout=5).shard == shards.shard_of("ключ".encode())
    assert shards.append_many([b"b"], keys=["ключ"], timeout=5).keys() == {shards.shard_of("ключ")}
    assert [record.key for record in shards] == ["ключ".encode()] * 2
    with pytest.raises(Unencodable):
        shards.append(b"four", key="\ud800")


def test_a_writer_appends_until_it_is_closed(shards: shard.ShardSet) -> None:
    with shards.writer(timeout=5) as writer:
        place = writer.append(b"one", key=b"k")
        assert writer.append_many([b"two"], keys=[b"k"]) == {place.shard: range(1, 2)}
        assert writer.sync()[place.shard] == 2
        assert not writer.closed
    assert writer.closed
    for call in (lambda: writer.append(b"four"), lambda: writer.append_many([b"four"]), writer.sync):
        with pytest.raises(Closed):
            call()
    assert shards.append(b"three", key=b"k") == (place.shard, 2)  # the set stays open


def test_a_durable_append_is_on_disk_when_it_returns(shards: shard.ShardSet) -> None:
    pa = pytest.importorskip("pyarrow")
    shards.append(b"one", durable=True)
    shards.append_many([b"two"] * 9, keys=[b"%d" % number for number in range(9)], durable=True, timeout=5)
    shards.append_arrow(pa.table({"value": [b"three"] * 9}), durable=True, timeout=5)
    assert sum(end - first for first, end in shards.extent("synced").values()) == len(shards) == 19


def test_a_producers_batch_is_stored_once_and_its_accounts_are_forgotten(shards: shard.ShardSet) -> None:
    keys = [b"%d" % number for number in range(20)]
    for _ in range(2):
        shards.producer("one").append_many(keys, keys=keys, batch=0)
    assert len(shards) == 20
    assert [[one.name for one in of_shard] for of_shard in shards.producers()] == [["one"]] * 4
    assert shards.forget_producers(iter(["one"])) == 4
    assert shards.producers() == [[]] * 4


def test_the_capabilities_of_a_set_are_those_of_all_its_shards(shards: shard.ShardSet, tmp_path: Path) -> None:
    assert shards.capabilities == {"codecs", "keys", "producers", "timestamps", "types"}
    with shard.create(tmp_path / "other", bits=1, format="sej") as other:
        assert other.capabilities == {"keys", "timestamps", "types"}
        assert other.producers() == [[]] * 2
        for call in (lambda: other.producer("one"), lambda: other.forget_producers(["one"]), lambda: other.retire_producers("one")):
            with pytest.raises(Unsupported):
                call()
