"""The calls, threads and memory that clients can take from a hub are bounded, and end with their connections."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults import CountingPort
from processes_of_a_hub import ServeCommand
from pyarrow import flight
from raw_http2 import RawClient, ticket
from serving import HubServer
from shipping import LOG, PATIENCE

import hub
import kvspool
from hub.client.connection import Security
from hub.client.remote import RemoteHub
from hub.errors import HubFull, QuotaExceeded, Unreachable
from hub.protocol import ingest, reading
from hub.protocol.ingest import Opening, ShippedLog
from hub.root import columns
from hub.server import calls, read_service, reads, threads
from hub.server.calls import Calls
from hub.server.reads import Reads
from kvspool import system

SERVER = b"\x0a\x06server"  # the action that asks what a hub is
FEW = 40  # threads besides those of calls

pytestmark = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="the twins have nothing to do with calls")


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    """Give the interpreter its interval back, whatever floods have done to it."""
    usual = sys.getswitchinterval()
    yield
    sys.setswitchinterval(usual)


def until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def threads_of(pid: int) -> int:
    """Return how many threads a process has."""
    return int(Path(f"/proc/{pid}/status").read_text(encoding="ascii").split("Threads:")[1].split()[0])


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """An access file with two principals, and their tokens."""
    from kvspool.cli import main

    found = {}
    for name in ("attacker", "reader"):
        path = tmp_path / f"{name}.token"
        words = ["hub", "token", "add", tmp_path / "access.toml", "--name", name, "--read", "*", "--output", path]
        assert main([str(word) for word in words]) == 0
        found[name] = path.read_text().strip()
    return found


def serve(tmp_path: Path, *words: object, before: Any = ()) -> ServeCommand:
    return ServeCommand(tmp_path / "root", "--access", tmp_path / "access.toml", "--least-free", "1MiB", *words, before=before)


def serves(hub: ServeCommand, tokens: dict[str, str]) -> bool:
    """Return whether the reader gets an answer on a new connection."""
    with RemoteHub(hub.location, security=Security(token=tokens["reader"])) as remote:
        return remote.clients() == []


def is_served(remote: RemoteHub) -> bool:
    """Return whether a client gets its answer; where no thread is left it has to try again."""
    try:
        return remote.clients() == []
    except Unreachable:
        return False


# Calls without a message.


def test_calls_without_a_message_keep_a_bounded_number_of_threads_and_end_with_their_connection(
    tmp_path: Path, tokens: dict[str, str]
) -> None:
    with serve(tmp_path) as hub:
        assert serves(hub, tokens)
        pid = hub.process.pid
        with RawClient(hub.location, tokens["attacker"]) as attacker:
            attacker.ask("DoAction", SERVER)
            attacker.begin("DoExchange", calls.MOST_OPENING + calls.FLOOD - 100)
            attacker.ask("DoAction", SERVER)
            until(lambda: threads_of(pid) <= calls.MOST_OPENING + FEW)
            assert threads_of(pid) >= calls.MOST_OPENING
            assert serves(hub, tokens)
        until(lambda: threads_of(pid) <= FEW)
        assert serves(hub, tokens)
        assert "calls without a message" in hub.kill()


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_a_flood_of_calls_cuts_the_connections_of_its_principal_and_no_others(
    tmp_path: Path, tokens: dict[str, str], is_known: bool
) -> None:
    with serve(tmp_path) as hub, RemoteHub(hub.location, security=Security(token=tokens["reader"])) as remote:
        assert remote.clients() == []
        with RawClient(hub.location, tokens["attacker"]) as attacker, pytest.raises(OSError):
            if is_known:  # otherwise the gate has not heard yet who it is
                attacker.ask("DoAction", SERVER)
            for _ in range(1000):
                attacker.begin("DoExchange", 500)
                until(lambda: is_served(remote))
        until(lambda: threads_of(hub.process.pid) <= FEW)
        assert remote.clients() == []
        assert "a flood of calls" in hub.kill()


def as_another_user(root: Path) -> list[str]:
    """Return a command that runs another one as a user who is not root, since the kernel bounds no threads of root."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, or a user who is not root")
    root.mkdir(mode=0o700)
    os.chown(root, 61_234, 61_234)
    rights = "+dac_read_search,+dac_override"  # of root: to read this program wherever it is
    return ["setpriv", "--reuid", "61234", "--regid", "61234", "--clear-groups", "--inh-caps", rights, "--ambient-caps", rights]


def test_the_kernel_bounds_the_threads_of_a_flood_of_calls(tmp_path: Path) -> None:
    before = as_another_user(tmp_path / "root")
    with ServeCommand(tmp_path / "root", "--anonymous", "--least-free", "1MiB", before=before) as hub:
        pid, is_over, most = hub.process.pid, threading.Event(), [0]

        def watch() -> None:
            while not is_over.wait(0.002):
                most[0] = max(most[0], threads_of(pid))

        with RemoteHub(hub.location) as remote:
            assert remote.clients() == []
            watching = threading.Thread(target=watch)
            watching.start()
            try:
                with RawClient(hub.location) as attacker:
                    attacker.ask("DoAction", SERVER)
                    for _ in range(4):
                        attacker.begin("DoExchange", 2000)
                    attacker.ask("DoAction", SERVER)
                    until(lambda: threads_of(pid) <= calls.MOST_OPENING + FEW)
                    assert remote.clients() == []
                until(lambda: threads_of(pid) <= FEW)
                assert remote.clients() == []
            finally:
                is_over.set()
                watching.join()
        full = (calls.MOST_OPENING // threads.STEP + 1) * threads.STEP
        assert calls.MOST_OPENING < most[0] <= threads.OWN + threads.SPARE + full


def test_a_call_of_a_shipper_that_waits_for_messages_ends_with_its_connection(root: Path) -> None:
    with HubServer(root) as server:
        client = flight.FlightClient(server.location)
        opening = ingest.encode(Opening(ingest.VERSION, "jfk", 0, [ShippedLog(0, LOG, 1)]))
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(opening))
        writer.write_metadata(b"")
        until(lambda: server.calls.opening == 0 and len(server.calls) == 1)
        reader.cancel()
        with pytest.raises(flight.FlightError):
            writer.close()
        client.close()
        until(lambda: len(server.calls) == 0)


def test_a_call_that_waits_for_changes_ends_with_its_connection(root: Path) -> None:
    with HubServer(root) as server, RawClient(server.location) as client:
        body = b'{"wait": 30}'
        client.call("DoAction", b"\x0a\x07changes\x12" + bytes([len(body)]) + body, 20)
        until(lambda: len(server.calls) == 20)
        client.close()
        until(lambda: len(server.calls) == 0, 20)


def test_calls_are_bounded_for_the_hub_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST", 3)
    counts: list[int] = []
    counted = Calls(counts.append)
    first, *others = [counted.begin("DO_GET", name) for name in ("jfk", "lga", "ewr")]
    with pytest.raises(HubFull, match="3 concurrent calls"):
        counted.begin("DO_GET", "sfo")
    first.end()
    first.end()
    others.append(counted.begin("DO_EXCHANGE", "sfo"))
    for call in others:
        call.end()
    assert counts == [1, 2, 3, 2, 3, 2, 1, 0]
    assert (len(counted), counted.opening) == (0, 0)


def test_a_flood_is_reported_once_for_each_thousand_refused_calls_of_a_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_OPENING", 0)
    monkeypatch.setattr(calls, "WINDOW", 3600)
    floods: list[str] = []
    counted = Calls(flooded=floods.append)
    for name in ["jfk", "lga"] * (calls.FLOOD - 1) + ["jfk"] * (calls.FLOOD + 1):
        with pytest.raises(QuotaExceeded):
            counted.begin("DO_EXCHANGE", name)
    assert floods == ["jfk", "jfk"]


def test_the_interpreter_is_left_alone_while_many_calls_are_refused_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = sys.getswitchinterval()
    counted = Calls()
    monkeypatch.setattr(calls, "WINDOW", 3600)
    for _ in range(calls.MANY):
        assert sys.getswitchinterval() == usual
        counted.refuse("jfk")
    for _ in range(2):
        assert sys.getswitchinterval() == pytest.approx(calls.CALM)
        counted.restore_switch_interval()
    monkeypatch.setattr(counted, "_window_ends", 0)
    counted.restore_switch_interval()
    assert sys.getswitchinterval() == usual
    for _ in range(calls.MANY):
        counted.refuse("lga")
    counted.restore_switch_interval(at_once=True)
    assert sys.getswitchinterval() == usual


def test_calls_without_a_message_are_bounded_for_each_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_OPENING", 2)
    counted = Calls()
    begun = [counted.begin("DO_EXCHANGE", "jfk"), counted.begin("DO_PUT", "jfk")]
    with pytest.raises(QuotaExceeded, match="2 calls without a message"):
        counted.begin("HANDSHAKE", "jfk")
    begun += [counted.begin("DO_EXCHANGE", "lga"), counted.begin("DO_GET", "jfk")]
    begun[0].open()
    begun[0].open()
    begun.append(counted.begin("DO_EXCHANGE", "jfk"))
    assert (len(counted), counted.opening) == (5, 3)
    for call in begun:
        call.end()
    assert (len(counted), counted.opening) == (0, 0)


class NoThreads(system.Port):
    """A user who is not root, and the bounds that were set for him."""

    def __init__(self, others: int, before: int = sys.maxsize) -> None:
        self.others = others
        self.before = before
        self.bounds: list[int] = []

    def user_id(self) -> int:
        return 1000

    def count_threads(self) -> tuple[int, int]:
        return 20, 20 + self.others

    def thread_limit(self) -> int:
        return self.before

    def limit_threads(self, most: int) -> None:
        self.bounds.append(most)


def test_the_bound_on_threads_follows_the_calls_and_the_user_s_other_processes() -> None:
    least = threads.OWN + threads.SPARE + threads.STEP
    with system.replaced(NoThreads(7)) as port:
        assert isinstance(port, NoThreads)
        bound = threads.Threads()
        assert bound.start()
        bound.follow(threads.STEP - 1)
        bound.follow(threads.STEP)
        port.others = 9
        bound.look()
        bound.follow(0)
        bound.close()
        bound.follow(1000)
    assert port.bounds == [least + 7, least + 7 + threads.STEP, least + 9 + threads.STEP, least + 9, sys.maxsize]


def test_the_bound_on_threads_is_never_above_the_one_before_which_holds_again_in_the_end() -> None:
    least = threads.OWN + threads.SPARE + threads.STEP
    with system.replaced(NoThreads(0, least + 10)) as port:
        assert isinstance(port, NoThreads)
        bound = threads.Threads()
        assert bound.start()
        bound.follow(1000)
        bound.close()
    assert port.bounds == [least, least + 10, least + 10]


def test_the_system_s_bound_on_threads_comes_back_as_it_was() -> None:
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    was = system.port.thread_limit()
    try:
        system.port.limit_threads(100_000 if before[1] == resource.RLIM_INFINITY else before[1] - 1)
        assert resource.getrlimit(resource.RLIMIT_NPROC) != before
    finally:
        system.port.limit_threads(was)
    assert resource.getrlimit(resource.RLIMIT_NPROC) == before


def test_calls_that_flush_have_two_threads_each() -> None:
    with system.replaced(NoThreads(0)) as port:
        assert isinstance(port, NoThreads)
        bound = threads.Threads(of_call=2)
        bound.follow(1000)
    assert port.bounds == [threads.OWN + threads.SPARE + 2 * 1024]


def test_the_bound_on_threads_is_abandoned_if_unseen_threads_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with system.replaced(NoThreads(0)) as port:
        assert isinstance(port, NoThreads)
        bound = threads.Threads()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert not bound.start()
        bound.follow(1000)
    assert port.bounds == [threads.OWN + threads.SPARE + threads.STEP, sys.maxsize]


# Streams that no client reads.

RECORD = 8 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root."""
    hub.create(tmp_path / "root").close()
    return tmp_path / "root"


@pytest.fixture
def large(root: Path) -> Iterator[Path]:
    """A hub root with a client of two large records."""
    with kvspool.create(root / "jfk", format="kvj") as log:
        for _ in range(2):
            log.append(b"x" * RECORD)
    yield root


def test_unread_streams_hold_bounded_memory_and_end_with_their_connections(large: Path) -> None:
    streams = 40
    with (
        system.replaced(CountingPort()) as port,
        HubServer(large, most_unread=2 * RECORD) as server,
        RawClient(server.location) as client,
    ):
        assert isinstance(port, CountingPort)
        client.call("DoGet", ticket(b'{"client": "jfk"}'), streams)
        until(lambda: len(server.calls) == streams)
        until(lambda: server.read_service.reads.unread >= 2 * RECORD)
        client.close()
        until(lambda: len(server.calls) == 0)
        assert server.read_service.reads.unread == 0
        assert port.count < (2 + reads.AT_ONCE + 1) * 2 * RECORD, "the others were never read"


def test_a_search_through_a_log_ends_with_its_connection(root: Path) -> None:
    with kvspool.create(root / "jfk", format="kvj") as log:
        log.append_many([b"x" * (1 << 20)] * 16, timestamp=1)
    asked: list[int] = []

    def is_over() -> bool:
        asked.append(1)
        return len(asked) > 3

    reader, stream = read_service.ReadService(root, "process"), Reads().stream(is_over)
    ticket_of = reading.decode_ticket(b'{"client": "jfk", "start_time": 2}')
    batches = reader._stream(root / "jfk", ticket_of, columns.schema_of(ticket_of), lambda client: True, lambda size: None, stream)
    with pytest.raises(flight.FlightUnavailableError, match="gone"):
        next(batches)
    assert len(asked) == 4, "a batch of 2 MiB for each"


def test_readers_continue_next_to_others_that_take_nothing(large: Path) -> None:
    with HubServer(large, most_unread=2 * RECORD) as server, ExitStack() as stack:
        server.read_service.reads = Reads(2 * RECORD, patience=0.5)
        clients = [stack.enter_context(RawClient(server.location)) for _ in range(8)]
        for client in clients:
            client.call("DoGet", ticket(b'{"client": "jfk"}'), 1)
        until(lambda: server.read_service.reads.unread >= 2 * RECORD)
        with RemoteHub(server.location) as remote:
            assert remote.read_arrow("jfk", 0).num_rows == 2
        assert server.status().cut


def test_memory_of_the_process_is_bounded_whatever_is_not_read(tmp_path: Path) -> None:
    def most() -> int:
        told = Path(f"/proc/{hub.process.pid}/status").read_text(encoding="ascii")
        return int(told.split("VmHWM:")[1].split()[0]) << 10

    with (
        ServeCommand(tmp_path / "root", "--anonymous", "--least-free", "1MiB", "--memory", "256MiB") as hub,
        kvspool.create(tmp_path / "root" / "jfk", format="kvj") as log,
        ExitStack() as stack,
    ):
        log.append(b"x" * RECORD)
        with RemoteHub(hub.location) as remote:
            assert remote.read_arrow("jfk", 0).num_rows == 1
        before, idle = most(), threads_of(hub.process.pid)
        clients = [stack.enter_context(RawClient(hub.location)) for _ in range(2)]
        for client in clients:
            client.call("DoGet", ticket(b'{"client": "jfk"}'), 60)
        until(lambda: threads_of(hub.process.pid) >= idle + 100)
        until(lambda: most() > before + (64 << 20) // 2)
        for client in clients:
            client.close()
        until(lambda: threads_of(hub.process.pid) <= FEW)
        assert most() < before + (64 << 20) + reads.AT_ONCE * 4 * RECORD


def test_a_stream_whose_reader_is_gone_reads_nothing(root: Path) -> None:
    stream_of = Reads()
    with stream_of.stream(lambda: True) as stream, pytest.raises(HubFull, match="gone"), stream.reading():
        raise AssertionError("it reads")
    assert stream_of.unread == 0
