"""The hub root: clients that appear and disappear while a reader follows all of them."""

from __future__ import annotations

import os
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import Died, in_child, start
from clocks import WaitingClock

import hub
import kvspool
import shard
from hub import HubRecord, HubRoot
from kvspool import Gap, GapError, system
from kvspool.errors import Closed, LogExists, LogNotFound, NotALog
from kvspool.spool import format
from shard import ConflictingShardSets, IncompleteShardSet
from shard.merge import LOOK_AROUND

SMALL = 4096
BAD_IDS: list[Any] = ["", "..", ".", ".hidden", "a/b", "/", "../x", "a\0", "\0", "a\n", "a.b", "a.1.000", "a b", "é", "a" * 101, "~"]
NO_TEXTS: list[Any] = [b"a", None, 7]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[HubRoot]:
    with hub.create(tmp_path / "root") as root:
        yield root


@pytest.fixture
def clock() -> Iterator[WaitingClock]:
    clock = WaitingClock()
    with system.replaced(clock):
        yield clock


def add(root: HubRoot, client: str, values: list[Any], bits: int = 1, **options: Any) -> None:
    """Make a client's shards if they aren't there, and append."""
    with root.create_client(client, bits=bits, capacity=65536, exist_ok=True) as shards:
        shards.append_many(values, keys=[b"%d" % at for at in range(len(values))], **options)


def remove(root: HubRoot, client: str) -> None:
    for path in root.path.glob(f"{client}.*"):
        shutil.rmtree(path)


def seen(records: Any) -> list[tuple[str, Any]]:
    return sorted((record.client, record.data) for record in records)


# The root, and whose is in it.


def test_create_makes_an_empty_directory_for_its_owner_alone(tmp_path: Path) -> None:
    with hub.create(tmp_path / "root") as root:
        assert root.clients() == []
        assert list(root) == []
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700
    with pytest.raises(LogExists, match=r"hub\.open opens it"):
        hub.create(tmp_path / "root")


def test_what_is_no_directory_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(LogNotFound, match=r"hub\.create makes a hub root"):
        hub.open(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NotALog, match="is not a directory, so it can.t be a hub root"):
        hub.open(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        hub.create(tmp_path / "none" / "root")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_clients_are_the_prefixes_of_the_shard_sets_sorted(root: HubRoot) -> None:
    for client in ("zeta", "alpha", "a" * 100, "-", "_1"):
        root.create_client(client, bits=1, capacity=SMALL).close()
    root.create_client("solo", bits=0, capacity=SMALL).close()
    shard.create(root.path, prefix="", bits=1, capacity=SMALL).close()
    shard.create(root.path, prefix="a" * 101, bits=1, capacity=SMALL).close()
    for name in ("notes.txt", "x.1.000.old"):
        (root.path / name).mkdir()
    (root.path / "file").touch()

    assert root.clients() == ["-", "_1", "a" * 100, "alpha", "solo", "zeta"]
    assert list(root) == []
    assert [one.client for one in root.stats().clients] == root.clients()


@pytest.mark.parametrize("client", [*BAD_IDS, *NO_TEXTS], ids=ascii)
def test_an_id_that_could_leave_the_root_is_refused_everywhere(root: HubRoot, client: Any) -> None:
    for call in (
        lambda: root.client(client),
        lambda: root.create_client(client, bits=1, capacity=SMALL),
        lambda: root.create_client(client, bits=0, capacity=SMALL),
    ):
        with pytest.raises(ValueError, match="a client's id|a prefix may have only the characters"):
            call()
    assert list(root.path.iterdir()) == []
    assert [path.name for path in root.path.parent.iterdir()] == ["root"]


def test_a_client_s_shards_are_a_shard_set(root: HubRoot) -> None:
    with root.create_client("jfk", bits=2, capacity=SMALL, codec="msgpack", mode=0o640) as shards:
        place = shards.append({"n": 1}, key=b"k")
        assert {one.codec for one in shards.stats()} == {"msgpack"}
    assert sorted(path.name for path in root.path.iterdir()) == [f"jfk.2.00{index}" for index in range(4)]
    with root.client("jfk") as shards:
        assert [(record.shard, record.data) for record in shards] == [(place.shard, {"n": 1})]
        shards.append("more", key=b"k")
    with pytest.raises(LogExists):
        root.create_client("jfk", bits=2)
    with pytest.raises(ConflictingShardSets):
        root.create_client("jfk", bits=3)
    with pytest.raises(LogNotFound, match="no shard set with prefix 'lga'; it has 'jfk'"):
        root.client("lga")


def test_the_root_s_timeout_is_that_of_its_clients(tmp_path: Path) -> None:
    with hub.create(tmp_path / "root", timeout=0.25) as root, root.create_client("a", bits=1, capacity=SMALL) as shards:
        assert {one.timeout for one in shards.shards} == {0.25}
        with root.client("a") as again:
            assert {one.timeout for one in again.shards} == {0.25}


# Reading.


def test_read_gives_the_records_of_all_clients_by_time_with_whose_they_are(root: HubRoot) -> None:
    with root.create_client("a", bits=1, capacity=SMALL) as a, root.create_client("b", bits=0, capacity=SMALL) as b:
        for at in range(20):
            (a if at % 3 else b).append(at, key=b"%d" % at, timestamp=1000 + at, type=at)
        records = list(root.read())
    assert [record.data for record in records] == list(range(20))
    for record in records:
        assert isinstance(record, HubRecord)
        assert record.client == ("a" if record.data % 3 else "b")
        assert record.shard == (a.shard_of(record.key) if record.client == "a" else 0)
        assert (record.type, record.key, record.timestamp) == (record.data, b"%d" % record.data, 1000 + record.data)


def test_a_synced_reader_sees_of_every_client_only_what_is_on_disk(root: HubRoot, clock: WaitingClock) -> None:
    with root.create_client("a", bits=0, capacity=SMALL) as client:
        client.append("one")
        assert list(root.read(isolation="synced")) == []
        with root.follow(isolation="synced", timeout=1) as following:
            assert list(following) == []
            client.sync()
            client.append("two")
            assert [record.data for record in following] == ["one"]
            with root.create_client("b", bits=0, capacity=SMALL) as other:
                other.append("three")
                assert list(following) == []
                other.append("four", durable=True)
                assert [record.data for record in following] == ["three", "four"]
        assert [record.data for record in root.read(isolation="synced")] == ["one", "three", "four"]


def test_a_gap_is_raised_returned_or_skipped(root: HubRoot) -> None:
    with root.create_client("a", bits=0, capacity=SMALL) as shards, closing(root.follow(timeout=0)) as following:
        shards.append_many([b""] * 20)
        assert next(following).sequence == 0
        shards.append_many([bytes(100)] * 100)
        with pytest.raises(GapError) as failure:
            list(following)
        rest = list(following)
        assert failure.value.gap.path == str(root.path / "a")
        assert failure.value.gap.last + 1 == rest[0].sequence
        assert rest[-1].sequence == 119
        assert following.missed == failure.value.gap.count

    with root.client("a") as shards:
        for on_gap in ("yield", "skip"):
            with closing(root.follow("latest", timeout=0, on_gap=on_gap)) as following:  # type: ignore[arg-type]
                shards.append_many([bytes(100)] * 100)
                gaps = [item for item in following if isinstance(item, Gap)]
                assert len(gaps) == (on_gap == "yield")
                assert following.missed > 50


def test_a_client_that_is_being_made_is_read_as_far_as_it_is_there(root: HubRoot) -> None:
    add(root, "a", list(range(10)), bits=2)
    whole = seen(root)
    shutil.rmtree(root.path / "a.2.003")
    part = seen(root)
    assert 0 < len(part) < len(whole)
    assert root.clients() == ["a"]
    assert len(root.stats().clients[0].shards) == 3
    with pytest.raises(IncompleteShardSet, match=r"a\.2\.003"):
        root.client("a")


def test_the_bits_of_a_client_that_is_being_made_are_those_that_it_will_have(root: HubRoot) -> None:
    add(root, "a", [1], bits=3)
    for index in range(3, 8):
        shutil.rmtree(root.path / f"a.3.00{index}")
    assert root.stats().clients[0].bits == 3


@pytest.mark.parametrize("missing", [["a.2.000"], ["a.2.001"], ["a.2.001", "a.2.003"]], ids=str)
def test_a_client_with_a_hole_in_its_shards_is_refused(root: HubRoot, missing: list[str]) -> None:
    add(root, "a", [1], bits=2)
    for name in missing:
        shutil.rmtree(root.path / name)
    for call in (root.read, root.stats, lambda: root.client("a")):
        with pytest.raises(IncompleteShardSet, match="shards of prefix 'a' are missing"):
            call()  # type: ignore[operator]
    assert root.clients() == ["a"]


def test_a_client_with_two_numbers_of_shards_is_refused(root: HubRoot) -> None:
    add(root, "a", [1], bits=2)
    kvspool.create(root.path / "a.1.000", capacity=SMALL).close()
    for call in (root.read, root.stats, lambda: root.client("a"), lambda: root.create_client("a", bits=2)):
        with pytest.raises(ConflictingShardSets, match="prefix 'a' has shards of 1 and of 2 bits"):
            call()  # type: ignore[operator]


def test_a_follow_that_is_refused_leaves_nothing_open(root: HubRoot, left_open: Callable[..., set[str]]) -> None:
    add(root, "a", [1])
    root.stats()  # so that the logs are open before
    assert left_open(ValueError, lambda: root.follow("newest")) == set()


# Following.


def test_a_client_made_by_another_process_is_noticed(root: HubRoot) -> None:
    gate, release = os.pipe()

    def make() -> None:
        os.read(gate, 1)
        with hub.open(root.path) as ours, ours.create_client("new", bits=2, capacity=SMALL) as shards:
            shards.append_many(list(range(8)), keys=[b"%d" % at for at in range(8)])

    wait = start(make)
    with closing(root.follow(limit=8)) as following:
        os.write(release, b"x")
        assert seen(following) == [("new", at) for at in range(8)]
    wait()
    os.close(gate)
    os.close(release)


def test_a_client_that_comes_while_following_from_the_latest_is_read_from_its_first_record(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "old", ["before"])
    with closing(root.follow("latest", timeout=1)) as following:
        add(root, "new", ["first", "second"])
        add(root, "old", ["after"])
        assert seen(following) == [("new", "first"), ("new", "second"), ("old", "after")]


def test_the_last_shards_of_a_client_being_made_are_read_when_they_come(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", list(range(10)), bits=2)
    whole = seen(root)
    away = root.path.parent / "a.2.003"
    (root.path / "a.2.003").rename(away)
    with closing(root.follow(timeout=1)) as following:
        part = seen(following)
        away.rename(root.path / "a.2.003")
        rest = seen(following)
    assert rest
    assert sorted(part + rest) == whole


def test_a_client_that_comes_with_a_hole_is_an_error_while_following(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "good", [1])
    with closing(root.follow(timeout=1)) as following:
        assert next(following).data == 1
        kvspool.create(root.path / "bad.1.001", capacity=SMALL).close()
        with pytest.raises(IncompleteShardSet, match="prefix 'bad'"):
            next(following)


def test_a_client_that_comes_is_noticed_while_another_one_never_stops(root: HubRoot) -> None:
    with root.create_client("busy", bits=0, capacity="1MiB") as busy, closing(root.follow(timeout=0)) as following:
        busy.append_many([b""] * 10 * LOOK_AROUND)
        assert next(following).client == "busy"
        add(root, "new", ["me too"], timestamp=1)
        heard = next(at for at, record in enumerate(following) if record.client == "new")
    assert heard <= 2 * LOOK_AROUND


def test_a_client_that_was_removed_is_read_to_its_end_and_then_forgotten(
    root: HubRoot, clock: WaitingClock, open_files: Callable[[], set[str]]
) -> None:
    add(root, "a", list(range(1000)))
    add(root, "b", ["stays"])
    with closing(root.follow(timeout=1)) as following:
        first = next(following)
        remove(root, "a")
        rest = list(following)
        assert seen([first, *rest]) == [*(("a", at) for at in range(1000)), ("b", "stays")]
        assert {key[0] for key in following.sources} == {"b"}  # type: ignore[index]
        # The root itself may be asked again at any time.
        assert seen(root) == [("b", "stays")]
        assert root.clients() == ["b"]


def test_the_disk_space_of_a_client_that_was_forgotten_is_given_back(
    root: HubRoot, clock: WaitingClock, open_files: Callable[[], set[str]]
) -> None:
    add(root, "a", [1])
    with closing(root.follow(timeout=1)) as following:
        assert seen(following) == [("a", 1)]
        remove(root, "a")
        assert list(following) == []
        assert {name for name in open_files() if "/a.1.00" in name} == set()


def test_a_client_that_was_removed_and_recreated_is_read_again(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", ["old"])
    with closing(root.follow(timeout=1)) as following:
        assert seen(following) == [("a", "old")]
        remove(root, "a")
        assert list(following) == []
        add(root, "a", ["new"])
        (record,) = following
        assert (record.data, record.sequence) == ("new", 0)


def test_a_client_recreated_before_its_removal_was_noticed_loses_nothing(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", ["old"])
    with closing(root.follow(timeout=1)) as following:
        remove(root, "a")
        add(root, "a", ["new"])
        assert [record.data for record in following] == ["old", "new"]
    assert seen(root) == [("a", "new")]
    assert root.stats().records == 1


def test_a_client_that_is_removed_one_shard_after_the_other_disturbs_no_follower(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", list(range(20)), bits=2)
    add(root, "b", ["stays"])
    with closing(root.follow(timeout=1)) as following:
        assert len(list(following)) == 21
        for index in (2, 0, 3, 1):
            shutil.rmtree(root.path / f"a.2.00{index}")
            assert list(following) == []
        add(root, "b", ["more"])
        assert seen(following) == [("b", "more")]


def test_a_client_whose_files_are_gone_but_not_yet_its_directories_disturbs_no_follower(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", [1, 2, 3])
    with closing(root.follow(timeout=1)) as following:
        assert len(list(following)) == 3
        for path in root.path.glob("a.*/spool.*"):
            path.unlink()
        assert list(following) == []
        add(root, "b", ["goes on"])
        assert seen(following) == [("b", "goes on")]


def test_one_descriptor_serves_the_root_and_all_shards(root: HubRoot, open_files: Callable[[], set[str]]) -> None:
    def descriptors() -> int:
        return sum("inotify" in name for name in open_files())

    class Counting(WaitingClock):
        """Counts while the follower sleeps."""

        def __init__(self) -> None:
            super().__init__()
            self.counts: set[int] = set()

        def wait_readable(self, fd: int, timeout: float) -> bool:
            self.counts.add(descriptors())
            return super().wait_readable(fd, timeout)

    before = descriptors()
    for client in ("a", "b", "c"):
        add(root, client, [1], bits=3)
    counting = Counting()
    with system.replaced(counting), closing(root.follow(timeout=1)) as following:
        assert len(list(following)) == 3
        add(root, "d", [1], bits=3)
        assert len(list(following)) == 1
    assert counting.counts == {before + 1}
    assert descriptors() == before


def test_two_followers_of_one_handle_both_read_a_removed_client_to_its_end(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", [1, 2, 3])
    with closing(root.follow(timeout=1)) as one, closing(root.follow(timeout=1)) as other, closing(root.read()) as reading:
        remove(root, "a")
        assert len(list(one)) == 3
        assert len(list(other)) == 3
        assert len(list(reading)) == 3


def test_a_client_of_which_one_shard_is_gone_and_another_one_half_disturbs_no_follower(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", [1, 2, 3])
    with closing(root.follow(timeout=1)) as following:
        assert len(list(following)) == 3
        shutil.rmtree(root.path / "a.1.000")
        (root.path / "a.1.001" / format.DATA_FILE).unlink()
        assert list(following) == []
        remove(root, "a")
        add(root, "b", ["goes on"])
        assert seen(following) == [("b", "goes on")]


def test_a_root_that_was_removed_while_following_is_read_to_its_end(root: HubRoot, clock: WaitingClock) -> None:
    add(root, "a", [1])
    with closing(root.follow(timeout=1)) as following:
        remove(root, "a")
        assert seen(following) == [("a", 1)]


def test_every_acknowledged_record_of_three_writers_arrives_once_although_one_is_killed(root: HubRoot) -> None:
    """Three writer processes, one of them killed at a random moment, and a follower that counts meanwhile."""
    number = struct.Struct("<q")
    acks = {client: os.pipe() for client in ("ewr", "jfk", "lga")}

    def write(client: str, batches: int) -> None:
        for other in acks.keys() - {client}:
            # The pipe of another writer must end with that writer.
            os.close(acks[other][1])
        at = 0
        with hub.open(root.path) as ours, ours.create_client(client, bits=1, capacity="4MiB") as shards:
            while at < batches * 5:
                shards.append_many(list(range(at, at + 4)), keys=[b"%d" % (at + more) for more in range(4)])
                shards.append(at + 4, key=None)
                at += 5
                os.write(acks[client][1], number.pack(at))

    waits = {client: start(lambda client=client: write(client, 400 if client != "jfk" else 1 << 40)) for client in acks}  # type: ignore[misc]
    for _, end in acks.values():
        os.close(end)

    def supervise() -> dict[str, int]:
        """Kill one writer in the middle, wait for the others, and put up the sign that all is written."""
        acknowledged = dict.fromkeys(acks, 0)
        try:
            for client, (ack, _) in acks.items():
                with open(ack, "rb") as pipe:
                    while data := pipe.read(number.size):
                        (acknowledged[client],) = number.unpack(data)
                        if client == "jfk" and acknowledged[client] == 1000:
                            os.kill(waits[client].pid, signal.SIGKILL)  # type: ignore[attr-defined]
            for client, wait in waits.items():
                try:
                    wait()
                except Died as death:
                    assert (client, death.signal) == ("jfk", signal.SIGKILL)
        finally:
            with hub.open(root.path) as ours:
                add(ours, "zz-done", ["done"])
        return acknowledged

    got: list[HubRecord] = []
    with ThreadPoolExecutor(1) as pool, closing(root.follow(timeout=60)) as following:
        supervising = pool.submit(supervise)
        for record in following:
            got.append(record)
            if record.client == "zz-done":
                break
        acknowledged = supervising.result()
        stored = list(root.read())
        got += [next(following) for _ in range(len(stored) - len(got))]

    assert Counter((record.client, record.shard, record.sequence) for record in got) == Counter(
        (record.client, record.shard, record.sequence) for record in stored
    )
    for client, count in acknowledged.items():
        numbers = Counter(record.data for record in got if record.client == client)
        assert set(numbers.values()) == {1}
        assert numbers.keys() >= set(range(count))
        # At most one batch was under way when the writer was killed.
        assert len(numbers) == count if client != "jfk" else count <= len(numbers) <= count + 5
    assert acknowledged["ewr"] == acknowledged["lga"] == 2000
    assert acknowledged["jfk"] >= 1000
    last: dict[tuple[str, int], int] = {}
    for record in got:
        assert record.sequence == last.get((record.client, record.shard), -1) + 1
        last[record.client, record.shard] = record.sequence


# Maintenance.


def test_stats_add_up_what_the_clients_have(root: HubRoot) -> None:
    add(root, "a", list(range(10)), timestamp=77)
    add(root, "b", list(range(5)), bits=2, timestamp=99)
    root.create_client("empty", bits=0, capacity=SMALL).close()
    stats = root.stats()
    assert stats.path == str(root.path)
    assert [(one.client, one.bits, len(one.shards), one.records, one.last_timestamp) for one in stats.clients] == [
        ("a", 1, 2, 10, 77),
        ("b", 2, 4, 5, 99),
        ("empty", 0, 1, 0, 0),
    ]
    assert (stats.records, stats.capacity) == (15, 6 * 65536 + SMALL)
    assert stats.used == sum(one.used for one in stats.clients) == sum(spool.used for one in stats.clients for spool in one.shards)
    assert msgspec.json.decode(msgspec.json.encode(stats))["clients"][0]["shards"][0]["path"] == str(root.path / "a.1.000")


def test_stats_and_reading_see_a_client_that_was_replaced(root: HubRoot) -> None:
    add(root, "a", [1, 2, 3])
    assert root.stats().records == 3
    assert len(list(root)) == 3
    remove(root, "a")
    assert (root.stats().records, list(root), root.clients()) == (0, [], [])
    add(root, "a", [4])
    assert root.stats().records == 1
    assert seen(root) == [("a", 4)]


def test_a_client_removed_between_the_look_and_the_opening_is_left_out(root: HubRoot) -> None:
    add(root, "a", [1])
    add(root, "b", [2])

    class Removing(system.Port):
        """Removes a client as soon as the names of the root have been read."""

        def names(self, path: Any) -> list[str]:
            found = super().names(path)
            remove(root, "a")
            return found

    with system.replaced(Removing()):
        assert seen(root) == [("b", 2)]


def test_a_shard_that_is_damaged_is_an_error_that_names_it(root: HubRoot) -> None:
    add(root, "a", [1])
    (root.path / "a.1.001" / format.DATA_FILE).write_bytes(b"")
    with pytest.raises(kvspool.KvspoolError, match=r"a\.1\.001"):
        next(root.read())
    with pytest.raises(kvspool.KvspoolError, match=r"a\.1\.001"):
        root.stats()


def test_a_closed_root_refuses_everything_and_may_be_closed_twice(root: HubRoot, open_files: Callable[[], set[str]]) -> None:
    before = open_files()
    add(root, "a", [1])
    reading = root.read()
    root.stats()
    assert not root.closed
    root.close()
    root.close()
    assert root.closed
    assert repr(root).endswith(" closed>")
    for call in (root.clients, root.read, root.stats, lambda: root.client("a"), lambda: root.create_client("b", bits=1)):
        with pytest.raises(Closed):
            call()  # type: ignore[operator]
    with pytest.raises(Closed):
        next(reading)
    reading.close()
    assert open_files() == before


def test_a_root_survives_a_fork(root: HubRoot) -> None:
    add(root, "a", ["parent"])
    assert seen(root) == [("a", "parent")]

    def child() -> list[Any]:
        add(root, "b", ["child"])
        return seen(root)

    assert in_child(child) == [("a", "parent"), ("b", "child")]
    assert seen(root) == [("a", "parent"), ("b", "child")]


def test_a_root_closes_all_logs_though_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Stubborn:
        def close(self) -> None:
            closed.append(self)
            raise ZeroDivisionError

    root = hub.create(tmp_path / "root")
    monkeypatch.setattr(root, "_logs", {("jfk", index): Stubborn() for index in range(3)})
    with pytest.raises(ZeroDivisionError):
        root.close()
    assert len(closed) == 3
    root.close()
