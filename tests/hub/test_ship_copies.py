"""A client that ships to several hubs: what is acknowledged is at enough of them, and each ends up with every record."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes_of_a_hub import HubProcess
from serving import HubServer
from shipping import contents, eventually, gaps, numbered, shipping, stored

import hub
import kvspool
import shard
from hub.client import hubs
from hub.client.connection import Security
from hub.client.copies import Answer
from hub.client.copies_of_log import Copies
from hub.client.hub_shipper import HubShipper
from hub.client.log_sender import LogSender
from hub.client.shipper import Shipper
from hub.errors import Conflict, CopyUnreachable, Malformed
from hub.protocol.ingest import ResumePoint

CLIENT = "client"


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """The roots of three hubs."""
    found = [tmp_path / name for name in ("hub1", "hub2", "hub3")]
    for root in found:
        hub.create(root).close()
    return found


@pytest.fixture
def two(roots: list[Path]) -> Iterator[list[HubProcess]]:
    """Two hubs as processes of their own."""
    with HubProcess(roots[0]) as first, HubProcess(roots[1]) as second:
        yield [first, second]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often for what has changed without an event."""
    for name in ("hub_shipper.POLL", "hub_shipper.LOOK_AGAIN", "log_sender.LOOK_AGAIN", "log_sender.TRY_AGAIN"):
        monkeypatch.setattr(f"hub.client.{name}", 0.05)
    monkeypatch.setattr("hub.client.connection.LONGEST_BACKOFF", 0.2)


def locations(processes: list[HubProcess]) -> list[str]:
    return [one.location for one in processes]


def place(log: Any, location: str) -> int:
    """Return the position of the durable reader for a hub."""
    (found,) = [one.sequence for one in log.readers() if one.name == hubs.reader_name(location)]
    return int(found)


def at(shipper: Shipper, location: str) -> int:
    """Return how much a hub has acknowledged."""
    (found,) = [one for one in shipper.status().copies if one.hub == location]
    return found.lanes[0].acknowledged


def state_of(shipper: Shipper, location: str) -> str:
    return next(one.state for one in shipper.status().copies if one.hub == location)


def append(log: Any, count: int) -> None:
    first = log.end()
    log.append_many([b"record %d" % number for number in range(first, first + count)], keys=[b"key"] * count)


def expected(end: int) -> list[bytes]:
    return [b"record %d" % number for number in range(end)]


def values(root: Path) -> list[bytes]:
    return [row.value for row in stored(root / CLIENT).values()]


def test_each_hub_gets_every_record_and_the_log_forgets_none_before(two: list[HubProcess], roots: list[Path], path: Path) -> None:
    with kvspool.create(path, capacity="1MiB", policy="block") as log:
        append(log, 5000)
        with Shipper(path, locations(two), client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
            status = shipper.status()
        assert stored(roots[0] / CLIENT) == stored(roots[1] / CLIENT) == contents(log)
        assert [place(log, one.location) for one in two] == [5000, 5000]
    assert (status.acks, status.behind, status.lanes[0].acknowledged, [one.sent for one in status.copies]) == (2, 0, 5000, [5000, 5000])


@pytest.mark.parametrize(("acks", "degraded"), [(2, "wait"), (2, "continue"), (1, "wait")])
def test_a_lost_hub_holds_the_log_or_not_and_the_other_one_continues(
    two: list[HubProcess], roots: list[Path], path: Path, acks: int, degraded: Any
) -> None:
    """The ring is small: it forgets records that it doesn't have to hold. The hub that returns gets them from the other one."""
    lost, other = two
    with kvspool.create(path, capacity="64KiB", policy="block") as log:
        append(log, 100)
        with shipping(path, locations(two), CLIENT, copies=2, acks=acks, degraded=degraded) as shipper:
            eventually(lambda: [at(shipper, one.location) for one in two] == [100, 100])
            lost.kill()
            append(log, 200)
            eventually(lambda: at(shipper, other.location) == 300 and state_of(shipper, lost.location) != "connected")
            assert shipper.status().state == "degraded"
            holds = acks == 2 and degraded == "wait"
            assert shipper.status().lanes[0].acknowledged == (100 if holds else 300)
            if holds:
                assert place(log, lost.location) == 100
                end = 300
            else:
                for _ in range(20):
                    append(log, 200)
                end = 4300
                eventually(lambda: place(log, lost.location) > 3000)
                assert log.extent()[0] > 300
            lost.start()
            eventually(lambda: [at(shipper, one.location) for one in two] == [end, end])
            assert shipper.status().lanes[0].acknowledged == end and shipper.status().lost == 0
    assert values(roots[0]) == values(roots[1]) == expected(end)
    assert gaps(kvspool.open(roots[0] / CLIENT)) == []


def test_a_hub_that_is_silent_holds_the_log_no_longer_than_a_lost_one(two: list[HubProcess], path: Path) -> None:
    """A stopped hub ends no connection, as if its host were lost. Its answers alone would be waited for an hour."""
    lost, other = two
    with kvspool.create(path, capacity="64KiB", policy="block") as log:
        append(log, 100)
        with shipping(path, locations(two), CLIENT, copies=2, degraded="continue", silence=3600.0) as shipper:
            eventually(lambda: [at(shipper, one.location) for one in two] == [100, 100])
            lost.stop()
            append(log, 200)
            eventually(lambda: shipper.status().lanes[0].acknowledged == 300)
            assert at(shipper, other.location) == 300 and at(shipper, lost.location) == 100
            lost.go_on()
            eventually(lambda: [at(shipper, one.location) for one in two] == [300, 300])


def test_a_hub_that_lost_its_disk_gets_everything_again(two: list[HubProcess], roots: list[Path], path: Path) -> None:
    lost, other = two
    with kvspool.create(path, capacity="64KiB") as log:
        for _ in range(10):
            append(log, 300)
            with Shipper(path, locations(two), client=CLIENT, copies=2) as shipper:
                shipper.run(until_empty=True)
        assert log.extent()[0] > 1000
        lost.kill()
        shutil.rmtree(roots[0])
        hub.create(roots[0]).close()
        lost.start()
        with Shipper(path, locations(two), client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
            assert shipper.status().lost == 0
    assert values(roots[0]) == values(roots[1]) == expected(3000)


def test_records_that_only_an_unreachable_hub_may_have_are_waited_for(two: list[HubProcess], roots: list[Path], path: Path) -> None:
    """One hub was away, and then the other: the first one gets no Gap for what the other one has."""
    first, second = two
    with kvspool.create(path, capacity="64KiB") as log:
        append(log, 100)
        with shipping(path, locations(two), CLIENT, copies=2, acks=1) as shipper:
            eventually(lambda: [at(shipper, one.location) for one in two] == [100, 100])
            first.kill()
            for _ in range(20):
                append(log, 200)
                eventually(lambda: at(shipper, second.location) == log.end())
            second.kill()
            first.start()
            eventually(lambda: "hub that can't be asked may have it" in shipper.status().lanes[0].error)
            assert at(shipper, first.location) == 100
            second.start()
            eventually(lambda: [at(shipper, one.location) for one in two] == [4100, 4100])
            assert shipper.status().lost == 0
    assert values(roots[0]) == values(roots[1]) == expected(4100)


def test_a_loss_is_declared_when_the_operator_accepts_it(two: list[HubProcess], roots: list[Path], path: Path) -> None:
    first, second = two
    with kvspool.create(path, capacity="64KiB") as log:
        append(log, 100)
        with Shipper(path, locations(two), client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
        for _ in range(20):
            append(log, 200)
            with Shipper(path, second.location, client=CLIENT) as shipper:
                shipper.run(until_empty=True)
        second.kill()
        options: dict[str, Any] = {"client": CLIENT, "copies": 2, "acks": 1, "degraded": "continue"}
        with shipping(path, locations(two), CLIENT, copies=2, acks=1) as waits:
            eventually(lambda: waits.status().lanes[0].error)
            assert isinstance(waits.hubs[0].senders[0].error or waits.hubs[1].senders[0].error, CopyUnreachable)
        with Shipper(path, locations(two), may_lose=True, **options) as shipper:
            (one,) = [one for one in shipper.hubs if one.hub == first.location]
            one.run(until_empty=True)
        kept = log.extent()[0]
        with kvspool.open(roots[0] / CLIENT) as journal:
            assert gaps(journal) == [(100, kept - 1)]


def test_records_that_were_lost_before_any_hub_had_them_are_a_gap_at_once(two: list[HubProcess], roots: list[Path], path: Path) -> None:
    """A hub that isn't reachable from the beginning holds up no other one."""
    first, second = two
    second.kill()
    with kvspool.create(path, capacity="64KiB") as log:
        for _ in range(20):
            append(log, 200)
        kept = log.extent()[0]
        assert kept > 0
        with shipping(path, locations(two), CLIENT, copies=2, acks=1) as shipper:
            eventually(lambda: at(shipper, first.location) == 4000)
            assert shipper.status().lanes[0].error == ""
    with kvspool.open(roots[0] / CLIENT) as journal:
        assert gaps(journal) == [(0, kept - 1)]


def test_a_log_that_was_shipped_to_one_hub_gets_a_copy_at_another(two: list[HubProcess], roots: list[Path], path: Path) -> None:
    """The second hub gets also the records that only the first one still has."""
    with kvspool.create(path, capacity="64KiB") as log:
        for _ in range(10):
            append(log, 300)
            with Shipper(path, two[0].location, client=CLIENT) as alone:
                alone.run(until_empty=True)
        with Shipper(path, locations(two), client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
    assert values(roots[0]) == values(roots[1]) == expected(3000)


def test_two_of_three_hubs_are_chosen_by_the_client(roots: list[Path], path: Path) -> None:
    with HubServer(roots[0]) as a, HubServer(roots[1]) as b, HubServer(roots[2]) as c, kvspool.create(path, capacity=65536) as log:
        append(log, 10)
        every = [one.location for one in (a, b, c)]
        with Shipper(path, every, client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
        chosen = hubs.chosen(CLIENT, every, copies=2)
        for location, root in zip(every, roots, strict=True):
            assert (root / CLIENT).exists() == (location in chosen)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"copies": 0}, "at least one"),
        ({"copies": 3}, "as many copies as hubs are possible, at least one: 3 are wanted, and 2 named"),
        ({"copies": 2, "acks": 3}, "acks must be from 1"),
        ({"copies": 2, "acks": 0}, "acks must be from 1"),
        ({"copies": 2, "degraded": "stop"}, "degraded must be"),
    ],
)
def test_impossible_copies_are_refused(path: Path, options: dict[str, Any], words: str) -> None:
    kvspool.create(path, capacity=4096).close()
    with pytest.raises(ValueError, match=words):
        Shipper(path, ["grpc://a:1", "grpc://b:1"], client=CLIENT, **options)


# Records that a hub may have without having acknowledged them.


def test_after_a_restart_a_hub_may_have_more_than_its_durable_reader_says(
    two: list[HubProcess], roots: list[Path], path: Path, tmp_path: Path
) -> None:
    """The shipper was killed between a hub's storing and the commit; then the ring overwrote the records, and that hub is away."""
    first, second = two
    with kvspool.create(path, capacity="64KiB") as log:
        append(log, 100)
        with Shipper(path, locations(two), client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
        append(log, 50)
        with Shipper(path, second.location, client=CLIENT) as shipper:
            shipper.run(until_empty=True)
        with log.reader(hubs.reader_name(second.location)) as reader:  # as if that had been killed before its commit
            reader.seek(100)
            reader.commit()
        second.kill()
        for _ in range(20):
            append(log, 200)
        assert log.extent()[0] > 150
        with shipping(path, locations(two), CLIENT, copies=2, acks=1) as shipper:
            eventually(lambda: shipper.status().lanes[0].error or at(shipper, first.location) > 100)
            assert "hub that can't be asked may have it" in shipper.status().lanes[0].error
            second.start()
            eventually(lambda: [at(shipper, one.location) for one in two] == [log.end(), log.end()])
        kept = log.extent()[0]
    with kvspool.open(roots[0] / CLIENT) as one, kvspool.open(roots[1] / CLIENT) as other:
        assert gaps(one) == gaps(other) == [(150, kept - 1)]
    assert stored(roots[0] / CLIENT) == stored(roots[1] / CLIENT)


def test_a_record_that_is_on_its_way_to_another_hub_is_waited_for(roots: list[Path], path: Path) -> None:
    """One hub's sender has read records that the ring then overwrites. The other one's declares nothing lost before they have arrived."""
    with HubServer(roots[0]) as first, HubServer(roots[1]) as second, kvspool.create(path, capacity="64KiB") as log:
        append(log, 100)
        names = [first.location, second.location]
        with Shipper(path, names, client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
        with Shipper(path, names, client=CLIENT, copies=2, acks=1) as shipper:
            slow, quick = (next(one for one in shipper.hubs if one.hub == name) for name in names)
            append(log, 50)
            (sender,) = quick.senders
            sender.open(ResumePoint(0, 100, True), "appended")
            rows = sender.next_rows(1000, 1 << 20)
            assert rows is not None and rows.end == 150
            for _ in range(20):
                append(log, 200)
            (waiting,) = slow.senders
            waiting.open(ResumePoint(0, 100, True), "appended")
            with pytest.raises(CopyUnreachable, match="on its way"):
                waiting.next_rows(1000, 1 << 20)


def test_what_two_hubs_have_both_missed_is_a_gap_at_both(roots: list[Path], path: Path) -> None:
    """Neither sender waits for what the other one has not read either."""
    with HubServer(roots[0]) as first, HubServer(roots[1]) as second, kvspool.create(path, capacity="64KiB") as log:
        append(log, 100)
        for _ in range(2):
            with Shipper(path, [first.location, second.location], client=CLIENT, copies=2) as shipper:
                shipper.run(until_empty=True)
                assert shipper.status().lanes[0].error == ""
            kept = log.extent()[0]
            for _ in range(20):
                append(log, 200)
    for root in roots[:2]:
        with kvspool.open(root / CLIENT) as journal:
            assert gaps(journal) == [(100, kept - 1)]


def test_a_named_hub_that_is_no_longer_chosen_gives_its_records(roots: list[Path], path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log moves from one hub to two others; its old reader is reported, because it would hold a full ring."""
    with HubServer(roots[0]) as a, HubServer(roots[1]) as b, HubServer(roots[2]) as c, kvspool.create(path, capacity="64KiB") as log:
        every = [one.location for one in (a, b, c)]
        chosen = hubs.chosen(CLIENT, every, copies=2)
        (old,) = set(every) - set(chosen)
        for _ in range(10):
            append(log, 300)
            with Shipper(path, old, client=CLIENT) as shipper:
                shipper.run(until_empty=True)
        assert log.extent()[0] > 0
        with Shipper(path, every, client=CLIENT, copies=2) as shipper:
            shipper.run(until_empty=True)
        for location, root in zip(every, roots, strict=True):
            assert values(root) == expected(3000), location
    assert f"{hubs.reader_name(old)} of another hub holds records" in caplog.text


def test_an_accepted_loss_is_only_what_no_reachable_hub_has(roots: list[Path], path: Path) -> None:
    """Of three hubs one is lost for good. The last one has later records, which follow the Gap."""
    with HubServer(roots[0]) as a, HubServer(roots[2]) as c, kvspool.create(path, capacity="64KiB") as log:
        with HubServer(roots[1]) as b:
            lost = b.location
            append(log, 100)
            every = [a.location, lost, c.location]
            with Shipper(path, every, client=CLIENT, copies=3) as shipper:
                shipper.run(until_empty=True)
        for _ in range(20):
            append(log, 200)
        later = log.extent()[0]
        with Shipper(path, c.location, client=CLIENT) as shipper:
            shipper.run(until_empty=True)
        end = log.end()
        for _ in range(20):
            append(log, 200)
        with Shipper(path, every, client=CLIENT, copies=3, may_lose=True) as shipper:
            (one,) = [one for one in shipper.hubs if one.hub == a.location]
            one.run(until_empty=True)
        kept = log.extent()[0]
    with kvspool.open(roots[0] / CLIENT) as journal:
        assert gaps(journal) == [(100, later - 1), (end, kept - 1)]


# Hubs that hold a ring.


def test_a_hub_that_refuses_for_good_does_not_hold_what_enough_others_have(
    roots: list[Path], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer(roots[0]) as a, HubServer(roots[1]) as b, kvspool.create(path, capacity="64KiB", policy="block") as log:
        call = HubShipper._call

        def refused(self: HubShipper, *arguments: Any) -> None:
            if self.hub == a.location:
                raise Malformed("it speaks another version")
            call(self, *arguments)

        monkeypatch.setattr(HubShipper, "_call", refused)
        with pytest.raises(Malformed), shipping(path, [a.location, b.location], CLIENT, copies=2, acks=1) as shipper:
            eventually(lambda: state_of(shipper, a.location) == "failed")
            for _ in range(20):
                append(log, 200)
            eventually(lambda: place(log, a.location) == place(log, b.location) == 4000)


def test_a_shard_that_one_hub_refuses_is_away_there(two: list[HubProcess], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `degraded` "continue", a quarantined shard holds the log no more than a lost hub does. The hub gets the other shard."""
    first, second = two
    put = LogSender.put

    def refused(self: LogSender, *arguments: Any) -> Any:
        if self.location == first.location and self.index == 0:
            raise Conflict("other bytes than the stored ones")
        return put(self, *arguments)

    monkeypatch.setattr(LogSender, "put", refused)
    with shard.create(path, bits=1, capacity="64KiB", policy="block") as logs:
        for log in logs.shards:
            append(log, 10)
        with shipping(path, locations(two), CLIENT, copies=2, degraded="continue") as shipper:
            eventually(lambda: [one.lanes[0].error for one in shipper.status().copies if one.hub == first.location] != [""])
            for _ in range(20):
                for log in logs.shards:
                    append(log, 200)
            eventually(lambda: all(place(log, one.location) == 4010 for log in logs.shards for one in two))
            assert state_of(shipper, first.location) == "connected"


def test_a_hub_that_acknowledges_a_record_after_its_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's stream ended before the record; then the hub stored it, and the log forgot it."""
    same: dict[str, Any] = {"index": 0, "id": b"1" * 16, "acked": 0, "shipped": 0, "coming": 0, "is_quiet": True, "error": None}
    lacking, having = (SimpleNamespace(location=location, **same) for location in "ab")
    having.shipped = 6
    answers = iter((False, True))

    class Reader:
        def __init__(self, ticket: Any, table: Any, copies: Any, wait: Any) -> None:
            self.copies, self.wait = copies, wait

        def read(self, first: int, end: int) -> Iterator[Any]:
            while not next(answers):
                having.acked = 6
                self.wait(first, {self.copies[0]: Answer("ends", "it ends at sequence 5")})
            yield numbered(first, end)

    monkeypatch.setattr("hub.client.copies_of_log.CopyReader", Reader)
    copies = Copies("c", ["a", "b"], ["a", "b"], 2, "wait", Security)
    copies.begin([SimpleNamespace(senders=[one], is_connected=True) for one in (lacking, having)])  # type: ignore[list-item]
    assert [(rows.first, rows.end) for rows in copies.records(lacking, 5, 6)] == [(5, 6)]
