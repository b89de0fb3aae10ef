"""Mirrors: pulled records equal those of the source, through crashes, cuts and restarts; conflicting records are never overwritten."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from faults import Killed
from pyarrow import flight
from serving import HubServer

import hub
import kvspool
from hub.client import mirror as mirrors
from hub.client import mirrored_shard
from hub.client.mirror import Mirror
from hub.client.shipper import Shipper
from hub.errors import Conflict, Fenced, HubError, HubFull, Malformed, Restored, RootInUse, ShardDamaged
from hub.protocol import reading
from hub.protocol.reading import Changes, Generation, ServerInfo, ShardState
from hub.root.store import GENERATIONS, load_generations
from kvspool import arrow, system
from kvspool.journal import Journal
from kvspool.journal.format import JournalBatch
from kvspool.record import Codec, Gap
from kvspool.system import disk

Items = list[tuple[Any, ...]]


def contents(path: Path, start: Any = "earliest") -> Items:
    """Return all that a log gives: records, and Gaps without their reason, which a copy can't know."""
    with kvspool.open(path) as log:
        return [
            ("gap", item.first, item.last)
            if isinstance(item, Gap)
            else (item.sequence, item.timestamp, item.type, item.key, item.value, item.codec)
            for item in log.read(start, on_gap="yield")
        ]


def generations(path: Path) -> list[Generation]:
    return load_generations(path / GENERATIONS)


def pull(location: str, root: Path, **options: Any) -> mirrors.MirrorStatus:
    """Pull everything, and return the mirror's status."""
    with Mirror(location, root, **options) as mirror:
        mirror.run(until_empty=True)
        return mirror.status()


def tree(root: Path) -> dict[str, bytes]:
    """Return the bytes of all files under a root, but of locks and journals' pages, which say who has looked last."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.parent.name != ".hub" and path.name != "lock"]
    return {str(path): path.read_bytes() for path in files}


def some_records(log: Journal, first: int, count: int) -> None:
    for number in range(first, first + count):
        value: Any = [b"%d" % number, f"text {number}", {"number": number}][number % 3]
        log.append(value, key=b"k%d" % (number % 5) if number % 4 else None, type=number % 7)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A hub root with two clients: one of two journals, one a journal with left-out sequences."""
    hub.create(tmp_path / "source").close()
    for name in ("JFK.1.000", "JFK.1.001"):
        with kvspool.create(tmp_path / "source" / name, format="kvj") as log:
            some_records(log, 0, 300)
    with kvspool.create(tmp_path / "source" / "EWR", format="kvj") as log:
        some_records(log, 0, 20)
        log.append_batch(JournalBatch([b"x", b"y"], [b"k", None], timestamps=[1, 2], codecs=bytes([Codec.RAW, Codec.MSGPACK])), at=50)
        some_records(log, 52, 10)
    return tmp_path / "source"


@pytest.fixture
def server(source: Path) -> Iterator[HubServer]:
    """A hub that serves the source."""
    with HubServer(source) as server:
        yield server


NAMES = ("EWR", "JFK.1.000", "JFK.1.001")


def test_a_mirror_has_the_same_records_gaps_and_logs(source: Path, server: HubServer, tmp_path: Path) -> None:
    status = pull(server.location, tmp_path / "mirror")
    for name in NAMES:
        assert contents(tmp_path / "mirror" / name) == contents(source / name)
        with kvspool.open(source / name) as log:
            assert generations(tmp_path / "mirror" / name) == [Generation(log.log_id.hex(), 0)]
    assert ("gap", 20, 49) in contents(tmp_path / "mirror" / "EWR")
    assert (status.state, status.behind, status.pulled, status.lost, status.outages) == ("stopped", 0, 632, 30, 0)
    assert [(shard.client, shard.shard, shard.next) for shard in status.shards] == [("EWR", 0, 62), ("JFK", 0, 300), ("JFK", 1, 300)]
    with hub.open(tmp_path / "mirror") as root:
        assert root.clients() == ["EWR", "JFK"]
        assert sum(1 for _ in root.read(on_gap="skip")) == 632


def test_pulling_again_writes_nothing(server: HubServer, tmp_path: Path) -> None:
    pull(server.location, tmp_path / "mirror")
    before = tree(tmp_path / "mirror")
    assert pull(server.location, tmp_path / "mirror").pulled == 0
    assert tree(tmp_path / "mirror") == before


def test_what_comes_later_is_pulled_as_it_comes(source: Path, server: HubServer, tmp_path: Path) -> None:
    with running(Mirror(server.location, tmp_path / "mirror")) as mirror, kvspool.open(source / "EWR") as log:
        for number in range(3):
            end = log.append(b"%d" % number) + 1
            until(lambda end=end: any(shard.client == "EWR" and shard.next == end for shard in mirror.status().shards))
        with kvspool.create(source / "LGA", format="kvj") as late:
            late.append(b"a new client")
        until(lambda: len(mirror.status().shards) == 4 and mirror.status().behind == 0)
    assert mirror.status().state == "stopped"
    assert contents(tmp_path / "mirror" / "EWR") == contents(source / "EWR")
    assert contents(tmp_path / "mirror" / "LGA") == contents(source / "LGA")


def test_the_generations_of_shipped_shards_come_along(server: HubServer, tmp_path: Path) -> None:
    for generation in range(2):
        with kvspool.create(tmp_path / f"log{generation}", capacity="1MiB") as log:
            log.append_many([b"%d" % generation] * 5)
            with Shipper(tmp_path / f"log{generation}", server.location, client="LAX") as shipper:
                shipper.run(until_empty=True)
        pull(server.location, tmp_path / "mirror")
        found = generations(tmp_path / "mirror" / "LAX")
        assert found == generations(server.root / "LAX")
        assert [one.base for one in found] == [0, 5][: generation + 1]
    assert contents(tmp_path / "mirror" / "LAX") == contents(server.root / "LAX")


def test_spools_are_mirrored_as_journals(source: Path, server: HubServer, tmp_path: Path) -> None:
    with kvspool.create(source / "LGA", codec="keyed", capacity="64KiB") as log:
        for number in range(3000):
            log.append({"number": number, "more": "x" * 50}, key=b"k")
        status = pull(server.location, tmp_path / "mirror", clients="LGA")
        first = log.stats().first_sequence
        with kvspool.open(tmp_path / "mirror" / "LGA", format="kvj") as copy:
            items = list(copy.read(on_gap="yield"))
            assert (items[0].first, items[0].last, status.lost) == (0, first - 1, first)
            assert [(one.sequence, one.timestamp, one.key, one.data) for one in items[1:]] == [
                (one.sequence, one.timestamp, one.key, one.data) for one in log.read()
            ]


def test_only_the_clients_that_are_wanted_are_pulled(server: HubServer, tmp_path: Path) -> None:
    pull(server.location, tmp_path / "one", clients="J*")
    pull(server.location, tmp_path / "two", clients=["EWR", "X?"])
    with hub.open(tmp_path / "one") as one, hub.open(tmp_path / "two") as two:
        assert (one.clients(), two.clients()) == (["JFK"], ["EWR"])


def test_what_the_source_trimmed_before_it_was_pulled_is_a_gap(tmp_path: Path) -> None:
    hub.create(tmp_path / "source").close()
    with kvspool.create(tmp_path / "source" / "JFK", format="kvj", segment_bytes=1000) as log, HubServer(tmp_path / "source") as server:
        some_records(log, 0, 100)
        log.trim(before=40)
        first = log.first()
        assert first > 0
        pull(server.location, tmp_path / "mirror")
        assert contents(tmp_path / "mirror" / "JFK") == [("gap", 0, first - 1), *contents(tmp_path / "source" / "JFK")]
        some_records(log, 100, 100)
        log.trim(before=190)
        second = log.first()
        assert second > 101
        pull(server.location, tmp_path / "mirror")
    assert contents(tmp_path / "mirror" / "JFK", 40)[-(200 - second) - 1] == ("gap", 100, second - 1)
    assert contents(tmp_path / "mirror" / "JFK", second) == contents(tmp_path / "source" / "JFK", second)


def test_at_the_level_disk_all_is_on_disk_on_both_sides(source: Path, server: HubServer, tmp_path: Path) -> None:
    pull(server.location, tmp_path / "mirror", level="disk", isolation="synced")
    for path in (source, tmp_path / "mirror"):
        with kvspool.open(path / "JFK.1.000") as log:
            assert log.stats().synced_sequence == 300


# Chains.

SERVE = """
import sys, time
from hub.server.server import HubServer
from hub.security.access import Access
server = HubServer(sys.argv[1], access=Access.anonymous(), least_free=1 << 20, listen=("127.0.0.1", int(sys.argv[2])))
server.start()
print(server.location, flush=True)
time.sleep(600)
"""
PULL = """
import sys
from hub.client.mirror import Mirror
mirror = Mirror(sys.argv[1], sys.argv[2])
print("ready", flush=True)
mirror.run()
"""


@contextmanager
def process(script: str, *arguments: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a script in a process of its own until it has said a line; it is killed in the end."""
    with subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


@contextmanager
def running(mirror: Mirror) -> Iterator[Mirror]:
    """Let a mirror run in a thread inside the `with` block."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            mirror.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.stop()
        thread.join(60)
        mirror.close()
    assert not thread.is_alive()
    assert errors == []


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_of(path: Path) -> int:
    with suppress(kvspool.KvspoolError, OSError), kvspool.open(path) as log:
        return int(log.end())
    return -1


def test_a_chain_of_three_hubs_with_crashes_in_the_middle(source: Path, tmp_path: Path) -> None:
    region, centre = tmp_path / "region", tmp_path / "centre"
    port = free_port()
    with HubServer(source) as server, kvspool.open(source / "EWR") as log:
        with process(PULL, server.location, region) as (first, _), process(SERVE, region, port) as (serving, location):
            with running(Mirror(location, centre)) as mirror:
                for number in range(2000):
                    log.append(b"%d" % number, key=b"k")
                    if number == 700:
                        until(lambda: end_of(centre / "EWR") > 62)
                        kill(first)
                        kill(serving)
                with process(PULL, server.location, region), process(SERVE, region, port):
                    until(lambda: end_of(centre / "EWR") == 2062)
                    until(lambda: end_of(centre / "JFK.1.001") == 300)
                assert mirror.status().outages > 0
        for name in NAMES:
            assert contents(source / name) == contents(region / name) == contents(centre / name)
            assert generations(region / name) == generations(centre / name) != []


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# Crashes, cuts and restarts.


class DyingPort(system.Port):
    """Kills this thread at the n-th of the calls that change files."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.left = nth
        self._thread = threading.get_ident()
        for name in ("open", "write", "flush", "make_directory", "rename", "truncate", "remove"):
            setattr(self, name, self._dying(name, getattr(self, name)))

    def _dying(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.left -= 1
                if self.left == 0 and name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:], **options)
                if self.left <= 0:
                    raise Killed
            return call(*args, **options)

        return counted


def test_a_mirror_may_crash_at_every_system_call(
    source: Path, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub.client.mirrored_shard.TURN_BYTES", 4000)
    monkeypatch.setattr("hub.client.mirrored_shard.LEAST_ROWS", 100)
    deaths, nth = 0, 1
    root = tmp_path / "mirror"
    hub.create(root).close()
    while True:
        mirror = Mirror(server.location, root, clients="E*")
        with monkeypatch.context() as patch:
            patch.setattr(system, "port", DyingPort(nth))
            try:
                mirror.run(until_empty=True)
                break
            except Killed:
                deaths += 1
        mirror.close()
        known = contents(root / "EWR") if (root / "EWR").exists() else []
        assert known == contents(source / "EWR")[: len(known)]
        nth += 1
        if deaths % 2:
            shutil.rmtree(root / "EWR", ignore_errors=True)  # every other time from the beginning
    mirror.close()
    assert deaths > 20
    assert contents(root / "EWR") == contents(source / "EWR")


def test_a_mirror_that_is_killed_continues_where_its_journals_end(source: Path, server: HubServer, tmp_path: Path) -> None:
    with kvspool.open(source / "EWR") as log:
        for number in range(2):
            log.append_many([b"x" * 100] * 20_000)
            with process(PULL, server.location, tmp_path / "mirror") as (child, _):
                until(lambda number=number: end_of(tmp_path / "mirror" / "EWR") > 62 + 20_000 * number)
                kill(child)
    pull(server.location, tmp_path / "mirror")
    for name in NAMES:
        assert contents(tmp_path / "mirror" / name) == contents(source / name)


@contextmanager
def cutting(location: str, sizes: list[int]) -> Iterator[str]:
    """Stand between a client and a hub: of the hub's bytes so many go through, for one connection after the other, then it is cut."""
    target = int(location.rpartition(":")[2])
    listener = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = [listener]

    def forward(one: socket.socket, other: socket.socket, left: float) -> None:
        with suppress(OSError):
            while left > 0 and (data := one.recv(min(65536, int(min(left, 65536))))):
                other.sendall(data)
                left -= len(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                hub_side = socket.create_connection(("127.0.0.1", target))
                sockets.extend([client, hub_side])
                left = sizes.pop(0) if sizes else float("inf")
                threading.Thread(target=forward, args=(client, hub_side, float("inf")), daemon=True).start()
                threading.Thread(target=forward, args=(hub_side, client, left), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"grpc://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for one in sockets:
            one.close()
        thread.join()


def test_a_connection_that_is_cut_anywhere_loses_and_doubles_nothing(
    source: Path, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(mirrors, "LONGEST_BACKOFF", 0.01)
    with kvspool.open(source / "EWR") as log:
        log.append_many([os.urandom(1000) for _ in range(1500)])
    sizes = [*range(0, 3000, 120), *range(10_000, 1_000_000, 100_000)]
    with cutting(server.location, sizes) as location:
        status = pull(location, tmp_path / "mirror")
    assert status.outages > 20
    for name in NAMES:
        assert contents(tmp_path / "mirror" / name) == contents(source / name)


def test_a_source_that_is_restarted_is_pulled_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "LONGEST_BACKOFF", 0.2)
    port = free_port()
    with running(Mirror(f"grpc://127.0.0.1:{port}", tmp_path / "mirror")) as mirror:
        for number in range(2):
            with process(SERVE, source, port) as (child, _), kvspool.open(source / "EWR") as log:
                end = log.append(b"%d" % number) + 1
                until(lambda end=end: end_of(tmp_path / "mirror" / "EWR") == end)
                kill(child)
        until(lambda: mirror.status().state == "waiting" and mirror.status().retry_in >= 0)
    assert contents(tmp_path / "mirror" / "EWR") == contents(source / "EWR")


def test_of_many_shards_few_are_open(source: Path, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "MOST_OPEN", 1)
    with Mirror(server.location, tmp_path / "mirror") as mirror:
        for number in range(2):
            for name in NAMES:
                with kvspool.open(source / name) as log:
                    log.append(b"%d" % number)
            mirror.run(until_empty=True)
            assert sum(str(tmp_path / "mirror") in file and file.endswith(".kvj") for file in open_files()) <= 2
    for name in NAMES:
        assert contents(tmp_path / "mirror" / name) == contents(source / name)


def open_files() -> list[str]:
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return files


# Refused sources.


def refused(location: str, root: Path, kind: type[Exception]) -> str:
    """Check that a pull is refused, and changes nothing; return what it says."""
    before = tree(root)
    with Mirror(location, root) as mirror, pytest.raises(kind) as raised:
        mirror.run(until_empty=True)
    assert tree(root) == before
    return str(raised.value)


def test_a_source_that_was_restored_from_an_older_state_is_refused(source: Path, tmp_path: Path) -> None:
    with HubServer(source) as server:
        shutil.copytree(source, tmp_path / "older")  # with its id
        with kvspool.open(source / "EWR") as log:
            some_records(log, 62, 10)
        pull(server.location, tmp_path / "mirror")
    with HubServer(tmp_path / "older") as server:
        assert "older state" in refused(server.location, tmp_path / "mirror", Restored)
        with kvspool.open(tmp_path / "older" / "EWR") as log:
            some_records(log, 62, 20)  # it continues with other records
        assert "record 71" in refused(server.location, tmp_path / "mirror", Conflict)


def test_another_hub_at_the_address_is_refused(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "other")  # before it was served: it gets an id of its own
    with HubServer(source) as server:
        pull(server.location, tmp_path / "mirror")
    with HubServer(tmp_path / "other") as server:
        assert "another hub" in refused(server.location, tmp_path / "mirror", Conflict)


def test_a_log_that_was_recreated_at_the_source_is_refused(source: Path, server: HubServer, tmp_path: Path) -> None:
    pull(server.location, tmp_path / "mirror")
    shutil.rmtree(source / "EWR")
    with kvspool.create(source / "EWR", format="kvj") as log:
        some_records(log, 0, 100)
    assert "another log" in refused(server.location, tmp_path / "mirror", Fenced)


def test_a_source_that_has_forgotten_a_generation_is_refused(source: Path, server: HubServer, tmp_path: Path) -> None:
    logs = [Generation("00" * 16, 0), Generation("11" * 16, 40)]
    disk.replace(source / "EWR" / GENERATIONS, msgspec.json.encode(logs), 0o600)
    pull(server.location, tmp_path / "mirror")
    disk.replace(source / "EWR" / GENERATIONS, msgspec.json.encode(logs[:1]), 0o600)
    assert "2 logs" in refused(server.location, tmp_path / "mirror", Restored)


def test_a_shard_that_is_no_mirror_s_is_never_written_to(server: HubServer, tmp_path: Path) -> None:
    hub.create(tmp_path / "mirror").close()
    with kvspool.create(tmp_path / "mirror" / "EWR", format="kvj") as log:
        log.append(b"ours")
    with Mirror(server.location, tmp_path / "mirror") as mirror, pytest.raises(Conflict, match="was not pulled from another hub"):
        mirror.run(until_empty=True)
    assert len(contents(tmp_path / "mirror" / "EWR")) == 1
    assert contents(tmp_path / "mirror" / "JFK.1.000") == contents(server.root / "JFK.1.000")


def test_a_client_with_another_number_of_shards_is_refused(server: HubServer, tmp_path: Path) -> None:
    with hub.create(tmp_path / "mirror") as root:
        root.create_client("JFK", bits=2, capacity="1MiB").close()
    with Mirror(server.location, tmp_path / "mirror") as mirror, pytest.raises(Conflict, match="another number of shards"):
        mirror.run(until_empty=True)
    assert not (tmp_path / "mirror" / "JFK.1.000").exists()


def test_a_mirror_takes_no_records_of_its_clients_from_shippers(server: HubServer, tmp_path: Path) -> None:
    pull(server.location, tmp_path / "mirror")
    before = tree(tmp_path / "mirror" / "EWR")
    kvspool.create(tmp_path / "log", capacity="1MiB").close()
    with HubServer(tmp_path / "mirror") as region:
        with Shipper(tmp_path / "log", region.location, client="EWR") as shipper, pytest.raises(Fenced, match="mirrored"):
            shipper.run(until_empty=True)
        with Shipper(tmp_path / "log", region.location, client="LGA") as shipper:
            shipper.run(until_empty=True)
    assert tree(tmp_path / "mirror" / "EWR") == before


def test_a_hub_does_not_mirror_itself_and_no_two_mirror_the_same(source: Path, server: HubServer, tmp_path: Path) -> None:
    with Mirror(server.location, source) as mirror, pytest.raises(Conflict, match="itself"):
        mirror.run(until_empty=True)
    with Mirror(server.location, tmp_path / "mirror"), pytest.raises(RootInUse):
        Mirror(server.location, tmp_path / "mirror")
    Mirror(server.location, tmp_path / "mirror").close()


def test_foreign_records_in_a_mirror_are_found(source: Path, server: HubServer, tmp_path: Path) -> None:
    pull(server.location, tmp_path / "mirror")
    with kvspool.open(tmp_path / "mirror" / "EWR") as log, kvspool.open(source / "EWR") as there:
        log.append(b"not from there")
        there.append(b"another one")
        there.append(b"and one more")
    refused(server.location, tmp_path / "mirror", Conflict)


def test_a_damaged_shard_is_reported_and_the_others_are_pulled(source: Path, server: HubServer, tmp_path: Path) -> None:
    sound = contents(source / "EWR")[:-1]
    (segment,) = (source / "EWR" / "kvj").iterdir()
    with open(segment, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff\xff\xff")
    with Mirror(server.location, tmp_path / "mirror") as mirror, pytest.raises(ShardDamaged):
        mirror.run(until_empty=True)
    status = mirror.status()
    assert [bool(shard.error) for shard in status.shards] == [True, False, False]
    assert contents(tmp_path / "mirror" / "JFK.1.001") == contents(source / "JFK.1.001")
    assert contents(tmp_path / "mirror" / "EWR") == sound


# A hub with wrong answers.


def test_a_full_disk_is_waited_out_when_a_generation_is_taken_over(
    source: Path, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = disk.replace, []

    def replace(path: Path, data: bytes, mode: int) -> None:
        if path.name == GENERATIONS and len(failed) < 3:
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, data, mode)

    monkeypatch.setattr(disk, "replace", replace)
    monkeypatch.setattr(HubFull.__init__, "__defaults__", (0.01,))  # seconds until the next attempt
    status = pull(server.location, tmp_path / "mirror")
    assert len(failed) == 3 and status.outages == 3
    for name in NAMES:
        assert contents(tmp_path / "mirror" / name) == contents(source / name)


def test_a_shard_takes_records_only_after_its_name_is_on_disk(
    source: Path, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mirror"

    class Failing(system.Port):
        failed = 0

        def flush(self, fd: int) -> None:
            if root.exists() and os.path.samestat(os.fstat(fd), os.stat(root)) and (root / NAMES[0]).exists() and self.failed < 3:
                assert contents(root / NAMES[0]) == []
                self.failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().flush(fd)

    monkeypatch.setattr(HubFull.__init__, "__defaults__", (0.01,))  # seconds until the next attempt
    port = Failing()
    with system.replaced(port):
        status = pull(server.location, root)
    assert port.failed == 3 and status.outages == 3
    for name in NAMES:
        assert contents(root / name) == contents(source / name)


def test_a_shard_whose_files_can_not_be_read_is_reported_and_the_others_are_pulled(
    source: Path, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(shard: mirrored_shard.MirroredShard) -> None:
        if shard.path.name == NAMES[0]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(shard.path))

    monkeypatch.setattr(mirrored_shard.MirroredShard, "_check_mark", check)
    with pytest.raises(PermissionError, match=NAMES[0]):
        pull(server.location, tmp_path / "mirror")
    for name in NAMES[1:]:
        assert contents(tmp_path / "mirror" / name) == contents(source / name)


class Liar(flight.FlightServerBase):  # type: ignore[misc]
    """Returns the given state and records for its one shard."""

    def __init__(self, state: ShardState, chunks: list[tuple[pa.RecordBatch, dict[str, Any]]]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._state, self._chunks = state, chunks

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        if action.type == "server":
            yield msgspec.json.encode(ServerInfo(1, "process", "ab" * 16, 0))
        else:
            yield msgspec.json.encode(Changes("ab" * 16, "1", [] if b'"1"' in action.body.to_pybytes() else [self._state]))

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        schema = self._chunks[0][0].schema
        return flight.GeneratorStream(schema, ((batch, json.dumps(beside).encode()) for batch, beside in self._chunks))


def rows(*sequences: int, **columns: Any) -> pa.RecordBatch:
    count = len(sequences)
    data = {"sequence": sequences, "timestamp": [1] * count, "type": [0] * count, "key": [None] * count, "value": [b"v"] * count}
    return pa.record_batch(data | {"codec": [0] * count} | columns, schema=arrow.CODED_SCHEMA)


NONE = rows()
STATE = ShardState("JFK", 0, 0, 0, 10, [])


@pytest.mark.parametrize(
    ("chunks", "kept"),
    [
        ([(rows(1, 2), {}), (NONE, {"next": 3})], 0),
        ([(rows(0, 1), {}), (rows(3), {}), (NONE, {"next": 4})], 2),
        ([(rows(0, 1), {}), (rows(1, 2), {}), (NONE, {"next": 3})], 2),
        ([(rows(0, 2), {}), (NONE, {"next": 3})], 0),
        ([(rows(0, 1), {}), (NONE, {"gap": {"first": 4, "last": 5, "reason": "x"}}), (rows(6), {})], 2),
        ([(rows(0, 1), {}), (NONE, {"gap": {"first": 0, "last": 1, "reason": "x"}})], 2),
        ([(rows(0, 1), {}), (NONE, {"gap": {"first": 2, "last": 1, "reason": "x"}})], 2),
        ([(rows(0, 1), {}), (NONE, {"gap": 5})], 2),
        ([(rows(0, type=[300]), {})], 0),
        ([(rows(0, type=[-1]), {})], 0),
        ([(rows(0, codec=[4]), {})], 0),
        ([(rows(0, codec=[None]), {})], 0),
        ([(rows(0, value=[None]), {})], 0),
        ([(rows(-1), {})], 0),
        ([(rows(0, key=[b"k" * 65535]), {})], 0),
        ([(rows(0).select(["sequence", "value"]), {})], 0),
    ],
)
def test_what_a_source_may_not_say_is_refused_and_not_stored(tmp_path: Path, chunks: Any, kept: int) -> None:
    with Liar(STATE, chunks) as liar, Mirror(f"grpc://127.0.0.1:{liar.port}", tmp_path / "mirror") as mirror:
        with pytest.raises(kvspool.KvspoolError) as raised:
            mirror.run(until_empty=True)
    assert isinstance(raised.value, HubError)
    assert len(contents(tmp_path / "mirror" / "JFK")) == kept


@pytest.mark.parametrize(
    "state",
    [
        ShardState("../evil", 0, 0, 0, 10, []),
        ShardState("", 0, 0, 0, 10, []),
        ShardState("JFK", 11, 0, 0, 10, []),
        ShardState("JFK", 1, 2, 0, 10, []),
        ShardState("JFK", 0, -1, 0, 10, []),
        ShardState("JFK", 0, 0, 11, 10, []),
        ShardState("JFK", 0, 0, 0, 1 << 63, []),
        ShardState("JFK", 0, 0, 0, 10, [Generation("../x", 0)]),
        ShardState("JFK", 0, 0, 0, 10, [Generation("00" * 16, 5), Generation("11" * 16, 4)]),
    ],
)
def test_a_shard_that_cannot_be_is_refused(tmp_path: Path, state: ShardState) -> None:
    with Liar(state, [(rows(0), {})]) as liar, Mirror(f"grpc://127.0.0.1:{liar.port}", tmp_path / "mirror") as mirror:
        with pytest.raises(Malformed):
            mirror.run(until_empty=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mirror"]
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == [".hub"]


def test_a_mirror_waits_for_a_missing_source_and_stops_on_request(tmp_path: Path) -> None:
    with running(Mirror(f"grpc://127.0.0.1:{free_port()}", tmp_path / "mirror")) as mirror:
        until(lambda: mirror.status().state == "waiting" and mirror.status().outages > 0)
        assert "127.0.0.1" in mirror.status().error


@pytest.mark.parametrize("location", ["http://x:1", "grpc://x", "x"])
def test_a_source_that_is_no_location_is_refused(tmp_path: Path, location: str) -> None:
    with pytest.raises(ValueError, match="a hub is"):
        Mirror(location, tmp_path / "mirror")


def test_tickets_of_a_mirror_fit() -> None:
    ticket = reading.Ticket("x" * 100, 1023, 1 << 62, 1 << 62, limit=1 << 62, coded=True, isolation="synced")
    assert reading.decode_ticket(msgspec.json.encode(ticket)) == ticket
