"""A hub and its shippers compared with Flight alone, the disk alone and a hub of the old kind: the cases of `tools/bench hub`.

The hub is `kvspool hub serve`, each client a process with a Shipper, on loopback. The floor is a Flight server that reads the batches of a
`DoPut` and stores nothing, and clients that send the same batches from memory. A second floor writes the buffers of each batch to a file.
Timing starts after all processes have started and imported their modules; connecting is timed, on both sides.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

KVSPOOL = Path(sys.executable).with_name("kvspool")
LARGE = 2000  # bytes of the records that the old kind of hub was measured with
OLD_BATCHES = {32: 5.0, 512: None}  # records per request to it, and the ratio to reach
BATCH = 1 << 20  # bytes
FAILOVER = 5000.0  # ms
ENDING = 60.0  # seconds for a hub to end
LOSSES = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}  # of a hub; one that is stopped is silent, as if its host were lost
spawn = multiprocessing.get_context("spawn")


class Size(NamedTuple):
    """The size of a measurement.

    records: of each client; resumed: records available when an outage ends; large: records of 2000 bytes; latencies: of single records;
    warm_ups: rounds that don't count; listed: clients with 8 shards each that are listed; long: bytes of the first record of some of them.
    """

    clients: int = 4
    records: int = 1_000_000
    resumed: int = 10_000_000
    large: int = 200_000
    latencies: int = 3000
    warm_ups: int = 1
    listed: int = 2000
    long: int = 16 << 20


SHORT = Size(1, 10_000, 10_000, 10_000, 20, 0, 3, 1 << 20)
SHARDS, LONG_ONES = 8, 40  # shards of each listed client, and clients whose shard 0 begins with a long record


class Run(NamedTuple):
    """The result of some clients. seconds: until the last one had ended; client, server: processor seconds, all clients together."""

    rate: float
    seconds: float
    client: float
    server: float


class Server(NamedTuple):
    """A server in another process, or several; their locations are separated by commas."""

    location: str
    pids: tuple[int, ...]


# Servers.


@contextmanager
def hub_server(folder: Path, pki: Path | None, level: str = "process") -> Iterator[Server]:
    """Serve a hub with an empty root."""
    root = folder / "hub"
    shutil.rmtree(root, ignore_errors=True)
    with serving(root, folder, pki, level) as server:
        yield server


@contextmanager
def hub_servers(folder: Path, pki: Path | None, level: str, count: int) -> Iterator[Server]:
    """Serve hubs with empty roots."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            own = folder / f"hub{number}"
            own.mkdir(exist_ok=True)
            found.append(stack.enter_context(hub_server(own, pki, level)))
        yield Server(",".join(one.location for one in found), tuple(pid for one in found for pid in one.pids))


@contextmanager
def serving(root: Path, folder: Path, pki: Path | None, level: str = "process") -> Iterator[Server]:
    """Serve a root; the hub's output goes to a file in `folder`."""
    command = [str(KVSPOOL), "hub", "serve", "--root", str(root), "--listen", "127.0.0.1:0", "--anonymous", "--no-page", "--json"]
    command += ["--least-free", "1MiB", "--level", level]
    if pki is not None:
        command += ["--certificate", str(pki / "server.pem"), "--key", str(pki / "server.key")]
    with open(folder / "hub.log", "wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        said = process.stdout.readline()  # type: ignore[union-attr]
        if not said:
            raise SystemExit(f"the hub did not start:\n{(folder / 'hub.log').read_text()}")
        yield Server(json.loads(said)["location"], (process.pid,))
    finally:
        process.terminate()
        try:
            process.wait(ENDING)
        finally:
            process.kill()
            process.stdout.close()  # type: ignore[union-attr]


def _bare(argument: tuple[Path | None, Path | None], ports: Any) -> None:
    from pyarrow import flight

    pki, folder = argument

    class Bare(flight.FlightServerBase):  # type: ignore[misc]
        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            if folder is None:
                for _ in reader:
                    pass
            else:
                with open(folder / descriptor.command.decode(), "wb", buffering=0) as file:
                    for chunk in reader:
                        os.writev(file.fileno(), [part for column in chunk.data.columns for part in column.buffers() if part is not None])
            writer.write(b"all")

    secure = {} if pki is None else {"tls_certificates": [((pki / "server.pem").read_bytes(), (pki / "server.key").read_bytes())]}
    server = Bare(f"{'grpc' if pki is None else 'grpc+tls'}://127.0.0.1:0", **secure)
    ports.put(server.port)
    server.serve()


def _old(path: str, ports: Any) -> None:
    """Process a request like the old hub: look at each message, append all, flush, acknowledge."""
    listener = socket.create_server(("127.0.0.1", 0))
    ports.put(listener.getsockname()[1])
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    coming = connection.makefile("rb", BATCH)
    with open(path, "wb", buffering=0) as file:
        expected = 0
        while head := coming.read(4):
            data = coming.read(*struct.unpack(">I", head))
            at = 0
            while at < len(data):
                offset, size = struct.unpack_from(">QI", data, at)
                if offset != expected:
                    raise SystemExit(f"offset {offset}, not {expected}")
                expected += 1
                at += 12 + size
            file.write(data)
            os.fdatasync(file.fileno())
            connection.sendall(b"stored")


@contextmanager
def started(target: Callable[..., None], argument: object) -> Iterator[tuple[int, int]]:
    """Run a server of this module; yield its port and process."""
    ports = spawn.Queue()
    process = spawn.Process(target=target, args=(argument, ports), daemon=True)
    process.start()
    try:
        yield ports.get(timeout=60), process.pid or 0
    finally:
        process.kill()
        process.join()


@contextmanager
def bare_server(pki: Path | None, folder: Path | None) -> Iterator[Server]:
    """Serve a `DoPut` that stores nothing, or writes the batches to files in a folder."""
    with started(_bare, (pki, folder)) as (port, pid):
        yield Server(f"{'grpc' if pki is None else 'grpc+tls'}://127.0.0.1:{port}", (pid,))


# Clients.


def _ship(source: Path, location: str, authorities: bytes | None, gate: Any, spent: Any) -> None:
    from hub.client.connection import Security
    from hub.client.shipper import Shipper

    locations = location.split(",")
    with Shipper(source, locations, client=source.name, copies=len(locations), security=Security(authorities=authorities)) as shipper:
        gate.wait()
        before = time.process_time()
        shipper.run(until_empty=True)
        spent.put(time.process_time() - before)


def _put(source: Path, location: str, authorities: bytes | None, gate: Any, spent: Any) -> None:
    from pyarrow import flight

    from hub.root.columns import SCHEMA

    batches = list(_batches(source))
    message = b"a message"
    client = flight.FlightClient(location, **({} if authorities is None else {"tls_root_certs": authorities}))
    gate.wait()
    before = time.process_time()
    writer, answers = client.do_put(flight.FlightDescriptor.for_command(source.name.encode()), SCHEMA)
    for batch in batches:
        writer.write_with_metadata(batch, message)
    writer.done_writing()
    answers.read()
    writer.close()
    spent.put(time.process_time() - before)


def _batches(source: Path) -> Iterator[Any]:
    """Yield the batches that a shipper sends of a log."""
    import kvspool
    from hub.client.hub_shipper import MOST_ROWS
    from hub.client.log_sender import LogSender
    from hub.protocol.ingest import BATCH_BYTES, ResumePoint

    with kvspool.open(source) as log:
        sender = LogSender(0, log, "bench")
        sender.open(ResumePoint(0, 0, False), "appended")
        while (rows := sender.next_rows(MOST_ROWS, BATCH_BYTES)) is not None:
            yield rows.batch
        sender.close()


def together(targets: list[tuple[Callable[..., None], tuple[object, ...]]], records: int, server: Server) -> Run:
    """Run clients at once, after all are ready."""
    gate, spent = spawn.Barrier(len(targets) + 1), spawn.Queue()
    processes = [spawn.Process(target=target, args=(*arguments, gate, spent)) for target, arguments in targets]
    for process in processes:
        process.start()
    gate.wait(60)
    before, start = used(*server.pids), time.perf_counter()
    client = sum(spent.get(timeout=300) for _ in processes)
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return Run(records / seconds, seconds, client, used(*server.pids) - before)


def used(*pids: int) -> float:
    """Return the processor seconds of processes, together."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


class Sources:
    """Logs to ship. They are filled once; a new hub has none of their records, so they are shipped again from the beginning."""

    def __init__(self, folder: Path, clients: int, records: int, value: int = 100) -> None:
        import kvspool

        self.records, self.value = records, value
        self.paths = [folder / f"source{records}x{value}n{number}" for number in range(clients)]
        for path in self.paths:
            with kvspool.create(path, capacity=records * (value + 64) + (16 << 20)) as log:
                for _ in range(records // 10_000):
                    log.append_many([b"x" * value] * 10_000)

    def shipped(self, folder: Path, pki: Path | None, level: str = "process", copies: int = 1) -> Run:
        """Ship all to an empty hub, or to as many as there are to be copies."""
        self._forget()
        authorities = None if pki is None else (pki / "ca.pem").read_bytes()
        with hub_servers(folder, pki, level, copies) as server:
            targets = [(_ship, (path, server.location, authorities)) for path in self.paths]
            return together(targets, self.records * len(self.paths), server)  # type: ignore[arg-type]

    def put(self, pki: Path | None, folder: Path | None = None) -> Run:
        """Send the same batches to a server that stores nothing, or that writes them to files in a folder."""
        self._forget()
        authorities = None if pki is None else (pki / "ca.pem").read_bytes()
        with ExitStack() as stack:
            if folder is not None:
                folder.mkdir()
                stack.callback(shutil.rmtree, folder)
            server = stack.enter_context(bare_server(pki, folder))
            targets = [(_put, (path, server.location, authorities)) for path in self.paths]
            return together(targets, self.records * len(self.paths), server)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Free the space."""
        for path in self.paths:
            shutil.rmtree(path)

    def _forget(self) -> None:
        import kvspool

        for path in self.paths:
            with kvspool.open(path) as log:
                for reader in log.readers():
                    log.delete_reader(reader.name)


# Cases.


def cases(folder: Path, rounds: int, wanted: Callable[[str], bool], size: Size) -> Iterator[dict[str, object]]:
    """Yield the results of the selected cases."""
    pki = folder / "pki"
    names = ["--name", "localhost", "--name", "127.0.0.1"]
    subprocess.run([str(KVSPOOL), "hub", "certificate", "init", str(pki), *names], check=True, stdout=subprocess.DEVNULL)
    found = {"ingest": ingest, "copies": copies, "disk": disk, "latency": latency, "resume": resume, "list": listing, "failover": failover}
    for name, case in found.items():
        if wanted(f"hub {name}"):
            yield from case(folder, pki, rounds, size)


def ingest(folder: Path, pki: Path, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """Four clients with records of 100 bytes, over TLS."""
    sources = Sources(folder, size.clients, size.records)
    found = [(sources.shipped(folder, pki), sources.put(pki), sources.put(pki, folder / "kept")) for _ in range(rounds + size.warm_ups)]
    found = found[size.warm_ups :]
    sources.remove()
    for floor, name, bar in ((1, "Flight DoPut, kept nowhere", 0.65), (2, "Flight DoPut, buffers written to files", 0.9)):
        yield compared(f"hub ingest: {size.clients} clients, TLS", "M/s", name, [(one[0], one[floor]) for one in found], bar)


def copies(folder: Path, pki: Path, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """Four clients with records of 100 bytes, over TLS, each to two hubs; compared with one hub."""
    sources = Sources(folder, size.clients, size.records)
    pairs = [(sources.shipped(folder, pki, copies=2), sources.shipped(folder, pki)) for _ in range(rounds + size.warm_ups)]
    sources.remove()
    yield compared(f"hub copies: {size.clients} clients, TLS, two hubs", "M/s", "one hub", pairs[size.warm_ups :], 0.55)


def disk(folder: Path, pki: Path, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """One client with records of 2000 bytes, plain, each batch on disk before it is acknowledged."""
    sources = Sources(folder, 1, size.large, LARGE)
    for batch, bar in OLD_BATCHES.items():
        pairs = [(sources.shipped(folder, None, "disk"), asked(folder, batch, size.large)) for _ in range(rounds + size.warm_ups)]
        yield compared("hub disk: 2000 bytes, plain", "k/s", f"old kind of hub, {batch} a flush", pairs[size.warm_ups :], bar)
    sources.remove()


def asked(folder: Path, size: int, most: int) -> Run:
    """Send `most` records to a hub of the old kind, `size` per request; each request waits for the previous acknowledgement."""
    file = folder / "old.jnl"
    with started(_old, str(file)) as (port, pid), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        value = b"x" * LARGE
        count = min(most, size * 1000) // size * size
        start, before = time.perf_counter(), time.process_time()
        for first in range(0, count, size):
            data = b"".join(struct.pack(">QI", offset, LARGE) + value for offset in range(first, first + size))
            connection.sendall(struct.pack(">I", len(data)) + data)
            if connection.recv(6, socket.MSG_WAITALL) != b"stored":
                raise SystemExit("the old kind of hub failed; see above")
        seconds = time.perf_counter() - start
        run = Run(count / seconds, seconds, time.process_time() - before, used(pid))
    file.unlink()
    return run


def resume(folder: Path, pki: Path, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """One client after an outage, compared with TLS alone and the disk alone."""
    sources = Sources(folder, 1, size.resumed)
    found = [(sources.shipped(folder, pki), sources.put(pki), written(folder, size.resumed)) for _ in range(rounds + size.warm_ups)]
    shipped, bare, wrote = zip(*found[size.warm_ups :], strict=True)
    sources.remove()
    name = f"hub resume: {size.resumed / 1e6:g} M records, TLS"
    yield compared(name, "M/s", "Flight DoPut, kept nowhere", list(zip(shipped, bare, strict=True)), 0.7)
    yield compared(name, "M/s", "os.write of as many bytes", list(zip(shipped, wrote, strict=True)))


def written(folder: Path, records: int) -> Run:
    """Write as many bytes as a journal of so many records of 100 bytes has, in pieces of 1 MiB."""
    piece, file = bytes(BATCH), folder / "written"
    before, start = time.process_time(), time.perf_counter()
    with open(file, "wb", buffering=0) as out:
        for _ in range(records * 128 // BATCH):
            out.write(piece)
    seconds = time.perf_counter() - start
    file.unlink()
    return Run(records / seconds, seconds, time.process_time() - before, 0.0)


def _follow(path: Path, count: int, ready: Any, latencies: Any) -> None:
    import kvspool
    from kvspool.errors import LogNotFound, NotALog

    while True:
        try:
            log = kvspool.open(path)
            break
        except (LogNotFound, NotALog):  # its directory may exist already
            time.sleep(0.01)
    with log:
        following = log.follow("latest", limit=count)
        ready.set()
        latencies.put([-int(record.value) + time.monotonic_ns() for record in following])


def latency(folder: Path, pki: Path, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """The time from an append at the client to a reader of the hub's journal, at one record a millisecond, over TLS."""
    import kvspool

    found = []
    for number in range(rounds):
        source = folder / f"slow{number}"
        with ExitStack() as stack:
            log = stack.enter_context(kvspool.create(source, capacity="16MiB"))
            server = stack.enter_context(hub_server(folder, pki))
            command = [str(KVSPOOL), "ship", str(source), server.location, "--client", "slow", "--ca", str(pki / "ca.pem")]
            shipper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(lambda shipper=shipper: (shipper.terminate(), shipper.wait()))
            ready, latencies = spawn.Event(), spawn.Queue()
            reader = spawn.Process(target=_follow, args=(folder / "hub" / "slow", size.latencies, ready, latencies), daemon=True)
            reader.start()
            if not ready.wait(60):
                raise SystemExit("the hub received nothing")
            time.sleep(0.2)
            for _ in range(size.latencies):
                time.sleep(0.001)
                log.append(b"%d" % time.monotonic_ns())
            found.append(sorted(latencies.get(timeout=60)))
            reader.join()
    bars = {"p50": 2500.0}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        figures = [one[int(size.latencies * share)] / 1000 for one in found]
        yield alone(f"hub latency: append to store, {name}", "us", figures, bars.get(name))


def listing(folder: Path, pki: Path, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """ListFlights of many shards, some of which begin with a long record: by a hub that has just started, and again."""
    from pyarrow import flight

    import hub

    root = folder / "listed"
    with hub.create(root) as made:
        for number in range(size.listed):
            with made.create_client(f"client-{number:04}", bits=SHARDS.bit_length() - 1, format="kvj") as shards:
                for index, log in enumerate(shards.shards):
                    log.append(bytes(size.long if number < LONG_ONES and not index else 100))
    found: dict[str, list[float]] = {"after a start": [], "again": []}
    for _ in range(rounds):
        with serving(root, folder, None) as server, flight.FlightClient(server.location) as client:
            for times in found.values():
                start = time.perf_counter()
                count = sum(len(one.endpoints) for one in client.list_flights())
                times.append((time.perf_counter() - start) * 1000)
                if count != SHARDS * size.listed:
                    raise SystemExit(f"the hub lists {count} shards")
    shutil.rmtree(root)
    for name, times in found.items():
        yield alone(f"hub list: {size.listed} x {SHARDS} shards, {name}", "ms", times, None if name == "after a start" else 1000.0)


def failover(folder: Path, pki: Path, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """One of two hubs is killed, or stopped as if its host were lost: the time until the next record is acknowledged, and at a reader."""
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for what, loss in LOSSES.items():
            took = _failed_over(folder / f"{what}{number}", pki, loss)
            for who, milliseconds in zip(("shipper", "reader"), took, strict=True):
                found.setdefault(f"hub failover: {who}, a hub is {what}", []).append(milliseconds)
    for name, times in found.items():
        yield alone(name, "ms", times, FAILOVER)


@contextmanager
def two_copies(folder: Path, pki: Path) -> Iterator[tuple[Any, Any, Server]]:
    """Ship a log to two hubs, which have its first record. Yield it, its shipper and the hubs; the first one may be killed or stopped."""
    import kvspool
    from hub.client.connection import Security
    from hub.client.shipper import Shipper

    folder.mkdir()
    security = Security(authorities=(pki / "ca.pem").read_bytes())
    with ExitStack() as stack:
        log = stack.enter_context(kvspool.create(folder / "log", capacity="1MiB"))
        servers = stack.enter_context(hub_servers(folder, pki, "process", 2))
        stack.callback(os.kill, servers.pids[0], signal.SIGCONT)
        options: dict[str, Any] = {"copies": 2, "degraded": "continue", "security": security}
        shipper = stack.enter_context(Shipper(folder / "log", servers.location.split(","), client="log", **options))
        run = stack.enter_context(ThreadPoolExecutor(1)).submit(shipper.run)
        stack.callback(run.result)
        stack.callback(shipper.stop)
        log.append(b"0")
        until(lambda: all(one.lanes[0].acknowledged == 1 for one in shipper.status().copies))
        yield log, shipper, servers


def acknowledged(shipper: Any) -> int:
    """Return the sequence of a log below which its copies are acknowledged."""
    return int(shipper.status().lanes[0].acknowledged)


def until(is_done: Callable[[], bool]) -> None:
    """Wait for something."""
    while not is_done():
        time.sleep(0.002)


def _failed_over(folder: Path, pki: Path, loss: signal.Signals) -> tuple[float, float]:
    """Return the milliseconds from the loss of a hub until a record that is appended then is acknowledged, and until a reader has it."""
    from hub import RemoteHub
    from hub.client.connection import Security

    security = Security(authorities=(pki / "ca.pem").read_bytes())
    with two_copies(folder, pki) as (log, shipper, servers), ThreadPoolExecutor(1) as pool:
        with RemoteHub(servers.location, security=security) as remote:
            list(remote.read("log", 0, 0))  # from the first hub, which is preferred
            os.kill(servers.pids[0], loss)
            start = time.perf_counter()
            log.append(b"1")
            reader = pool.submit(_read_until, remote, 1, start)
            until(lambda: acknowledged(shipper) == 2)
            return (time.perf_counter() - start) * 1000, reader.result() * 1000


def _read_until(remote: Any, sequence: int, start: float) -> float:
    """Follow a client as a program does, until it has a record. Return the seconds since `start`."""
    token = ""
    while True:
        token = remote.changes(token, 1.0).token
        if any(record.sequence == sequence for record in remote.read("log", 0, 0)):
            return time.perf_counter() - start


def alone(name: str, unit: str, figures: list[float], bar: float | None) -> dict[str, object]:
    """Return figures that are compared with a bar alone."""
    return {"case": name, "unit": unit, "floor": "", "pairs": [(figure, None) for figure in figures], "bar": {"figure": bar}}


def compared(name: str, unit: str, floor_name: str, pairs: list[tuple[Run, Run]], bar: float | None = None) -> dict[str, object]:
    """Return the rates, with the processor microseconds per record of the clients and the hub. bar: the ratio to reach."""
    ours, floors = ([both[side] for both in pairs] for side in (0, 1))

    def microseconds(runs: list[Run], side: str) -> float:
        return statistics.median(1e6 * getattr(run, side) / (run.rate * run.seconds) for run in runs)

    return {
        "case": name,
        "unit": unit,
        "floor": floor_name,
        "pairs": [(one.rate, other.rate) for one, other in pairs],
        "bar": {"ratio": bar},
        "client_us": microseconds(ours, "client"),
        "server_us": microseconds(ours, "server"),
        "floor_client_us": microseconds(floors, "client"),
        "floor_server_us": microseconds(floors, "server"),
    }
