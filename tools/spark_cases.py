"""Spark with our logs, compared with the same rows in its own formats: the cases of `tools/bench spark`.

One local session of two cores with `session_settings`, everything in the page cache. Compared work runs alternately, several rounds, after
one that doesn't count. A record has a key of 8 and a value of 92 bytes, hexadecimal digits of random bits, so that Parquet can't compress
them away; they are in four shards. Parquet has all seven columns, JSON lines only key and value.

A streaming query is compared with Spark's own rate source, with the same checkpoint manager: the floor of a micro-batch. It is the source
with rows for each micro-batch; the one with rows per second has them once a second, and its code stays cold.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import hub_cases

CORES = 2
BITS = 2  # 4 shards
VALUE = 92  # bytes
PIECE = 100_000  # records created at once
RATE = 10_000  # records per second for the latency
LOW_RATE = 200  # and for the overhead of a micro-batch
ROWS = 10  # in each micro-batch of the rate source
LOOK = 0.1  # seconds between two checks of processor times
SCHEMA = "value binary"
SUM = "sum(length(value))"
OTHERS = "bit_xor(xxhash64(key, topic, partition, offset, timestamp, type))"  # uses all other columns
spawn = multiprocessing.get_context("spawn")


class Size(NamedTuple):
    """The size of a measurement.

    records: of a batch query; seconds: of a streaming query; shards: their numbers for the overhead; warm_ups: rounds that don't count.
    """

    records: int = 4_000_000
    seconds: float = 15.0
    shards: tuple[int, ...] = (1, 4, 64)
    warm_ups: int = 1


SHORT = Size(20_000, 0.3, (4,), 0)


def cases(folder: Path, rounds: int, wanted: Callable[[str], bool], size: Size, spark: Any = None) -> Iterator[dict[str, object]]:
    """Yield the results of the selected cases, in a new session unless one is given."""
    with ExitStack() as stack:
        logs = Logs(folder / "spark", size.records)
        stack.callback(logs.remove)
        session = stack.enter_context(started(folder)) if spark is None else spark
        every = (
            ("read", read), ("hub", through_a_hub), ("sink", sink), ("table", table), ("catch-up", catch_up), ("overhead", overhead),
            ("latency", latency), ("idle", idle), ("failover", failover),
        )  # fmt: skip
        for name, case in every:
            if wanted(f"spark {name}"):
                yield from case(session, logs, rounds, size)


@contextmanager
def started(folder: Path) -> Iterator[Any]:
    """Run a session of two cores."""
    import hub.spark
    from hub.pipeline.session import errors_to

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    with errors_to(folder / "spark.log"):
        spark = hub.spark.session("tools/bench", master=f"local[{CORES}]", cores=CORES, settings=settings)
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()


class Logs:
    """The same records as a set of spools, as the journals of a hub, as JSON lines and as Parquet; each is created on first use."""

    def __init__(self, folder: Path, records: int) -> None:
        self.folder, self.records = folder, records
        folder.mkdir()
        self._numbers = count()

    def spools(self) -> Path:
        """Return a root with a shard set."""
        import shard

        root = self.folder / "spools"
        if not root.exists():
            capacity = (self.records * (VALUE + 64) >> BITS) * 5 // 4 + (4 << 20)
            with shard.create(root, prefix="bench", bits=BITS, capacity=capacity) as shards:
                for table in self._tables():
                    shards.append_arrow(table)
        return root

    def journals(self) -> Path:
        """Return a hub root."""
        import hub

        root = self.folder / "journals"
        if not root.exists():
            with hub.create(root) as made, made.create_client("bench", bits=BITS, format="kvj") as shards:
                for table in self._tables():
                    shards.append_arrow(table)
        return root

    def exported(self, spark: Any, kind: str) -> Path:
        """Return a folder of JSON lines, or of Parquet."""
        path = self.folder / kind
        if not path.exists():
            columns = ("*",) if kind == "parquet" else ("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
            frame(spark, self.spools()).selectExpr(*columns).write.format(kind).save(str(path))
        return path

    def new(self) -> Path:
        """Return an unused path."""
        return self.folder / f"{next(self._numbers)}"

    def remove(self) -> None:
        """Free the space."""
        shutil.rmtree(self.folder)

    def _tables(self) -> Iterator[Any]:
        import pyarrow

        for first in range(0, self.records, PIECE):
            rows = min(PIECE, self.records - first)
            digits = os.urandom(rows * VALUE // 2).hex().encode()
            offsets = pyarrow.array(range(0, (rows + 1) * VALUE, VALUE), pyarrow.int32())
            values = pyarrow.BinaryArray.from_buffers(pyarrow.binary(), rows, [None, offsets.buffers()[1], pyarrow.py_buffer(digits)])
            yield pyarrow.table({"key": [b"%08d" % at for at in range(first, first + rows)], "value": values})


def frame(spark: Any, path: Path | None, schema: str | None = None, **options: str) -> Any:
    """Return the frame of a batch query of a log, or of a hub."""
    reader = spark.read.format("kvspool").options(**options)
    reader = reader if schema is None else reader.schema(schema)
    return reader.load() if path is None else reader.load(str(path))


def summed(frame: Any, records: int, *others: str) -> float:
    """Return the records per second of a query that adds up their lengths, and computes other expressions."""
    start = time.perf_counter()
    total = frame.selectExpr(SUM, *others).first()[0]
    seconds = time.perf_counter() - start
    if total != records * VALUE:
        raise SystemExit(f"the query found {total} bytes of values, not {records * VALUE}")
    return records / seconds


def in_turn(rounds: int, size: Size, **works: Callable[[], float]) -> dict[str, list[float]]:
    """Return the results of each work in each round, without the warm-up rounds."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(size.warm_ups + rounds):
        for name, work in works.items():
            found[name].append(work())
    return {name: rates[size.warm_ups :] for name, rates in found.items()}


def compared(name: str, unit: str, ours: list[float], floor_name: str, floors: list[float], **bar: float) -> dict[str, object]:
    """Return the results of two works measured alternately. bar: fields of `cases.case.Bar`."""
    return {"case": name, "unit": unit, "floor": floor_name, "pairs": list(zip(ours, floors, strict=True)), "bar": bar}


# Batch queries.


def read(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """Add up the lengths of all values: with only the required column, with all columns, and with a query that uses all of them.

    Parquet reads only the columns that a query uses. Spark doesn't tell a source in Python which ones these are.
    """
    parquet, lines = logs.exported(spark, "parquet"), logs.exported(spark, "json")
    kinds = {"spool": logs.spools(), "journal": logs.journals()}
    works = {
        **{name: lambda path=path: summed(frame(spark, path), size.records) for name, path in kinds.items()},
        **{f"{name}, value only": lambda path=path: summed(frame(spark, path, SCHEMA), size.records) for name, path in kinds.items()},
        **{f"{name}, all used": lambda path=path: summed(frame(spark, path), size.records, OTHERS) for name, path in kinds.items()},
        "JSON lines": lambda: summed(spark.read.schema("key string, value string").json(str(lines)), size.records),
        "Parquet": lambda: summed(spark.read.parquet(str(parquet)), size.records),
        "Parquet, all used": lambda: summed(spark.read.parquet(str(parquet)), size.records, OTHERS),
    }
    found = in_turn(rounds, size, **works)
    for suffix, words, floor, bar in (
        (", value only", ", value only", "JSON lines", 3.0),
        (", value only", ", value only", "Parquet", 0.77),
        (", all used", ", all columns used", "Parquet, all used", 0.8),
        ("", ", all columns read, value used", "Parquet", 0.8),
    ):
        for name in kinds:
            yield compared(f"spark read: {name}{words}", "M/s", found[name + suffix], floor, found[floor], ratio=bar)


def through_a_hub(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """The same from a hub server on loopback, plain and over TLS, compared with the same journals read as files."""
    root, pki = logs.journals(), _authority(logs)
    for name, keys in (("plain", None), ("TLS", pki)):
        with hub_cases.serving(root, logs.folder, keys) as server:
            options = {"hub": server.location} | ({} if keys is None else {"caFile": str(keys / "ca.pem")})
            found = in_turn(
                rounds, size,
                local=lambda: summed(frame(spark, root), size.records),
                hub=lambda options=options: summed(frame(spark, None, **options), size.records),  # type: ignore[misc]
            )
        yield compared(f"spark hub: {name}", "M/s", found["hub"], "the same files, local", found["local"], ratio=0.625)


def _authority(logs: Logs) -> Path:
    """Return a directory with a new authority, and a hub's certificate."""
    pki = logs.new()
    names = ["--name", "localhost", "--name", "127.0.0.1"]
    subprocess.run([str(hub_cases.KVSPOOL), "hub", "certificate", "init", str(pki), *names], check=True, stdout=subprocess.DEVNULL)
    return pki


def sink(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """Append rows from Spark's memory to shards, compared with writing them as Parquet."""
    import shard

    records = size.records // 2  # more don't fit into memory
    rows = frame(spark, logs.spools(), "key binary, value binary").limit(records).repartition(CORES).cache()
    rows.count()
    target = logs.new()
    shard.create(target, prefix="bench", bits=BITS, capacity=(records * (VALUE + 64) >> BITS) * 5 // 4 + (4 << 20)).close()

    def written(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return records / (time.perf_counter() - start)

    found = in_turn(
        rounds, size,
        ours=lambda: written(lambda: rows.write.format("kvspool").mode("append").save(str(target))),
        parquet=lambda: written(lambda: rows.write.parquet(str(logs.new()))),
    )
    rows.unpersist()
    with shard.open(target) as shards:
        if sum(one.next_sequence for one in shards.stats()) != records * (rounds + size.warm_ups):
            raise SystemExit("not every row was written once")
    yield compared("spark sink: batch", "M/s", found["ours"], "Parquet", found["parquet"], ratio=0.9)


def table(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """Commit rows from Spark's memory to a Delta table as a batch of a pipeline does, compared with writing them as Parquet."""
    from hub.pipeline.sinks import table_schema, write_files
    from hub.tables.delta import Change, Table
    from hub.tables.place import TablePlace

    records = size.records // 4
    columns = ["crc32(value) AS row", "substr(string(key), 1, 2) AS carrier", "string(value) AS text", "length(value) AS size", "key"]
    rows = frame(spark, logs.spools(), "key binary, value binary").limit(records).repartition(CORES).selectExpr(*columns).cache()
    rows.count()
    place = TablePlace.of(logs.new())
    target, numbers = Table.make(place, table_schema(rows)), count()

    def committed() -> float:
        start = time.perf_counter()
        batch = next(numbers)
        files = write_files(rows, place, table_schema(rows), (), f"part-{batch:010}")
        target.commit(files, {"query": Change(batch - 1 if batch else None, batch)})
        return records / (time.perf_counter() - start)

    def written() -> float:
        start = time.perf_counter()
        rows.write.parquet(str(logs.new()))
        return records / (time.perf_counter() - start)

    found = in_turn(rounds, size, ours=committed, parquet=written)
    rows.unpersist()
    if target.info().rows != records * (rounds + size.warm_ups):
        raise SystemExit("not every row was written once")
    yield compared("spark table: a batch into Delta", "M/s", found["ours"], "Parquet", found["parquet"], ratio=0.87)


# Queries that stream.


@contextmanager
def streaming(logs: Logs, rows: Any, to: str = "noop", **options: str) -> Iterator[Any]:
    """Run a query at full speed, with a new checkpoint."""
    query = rows.writeStream.format(to).options(**options).option("checkpointLocation", str(logs.new())).start()
    try:
        yield query
    finally:
        query.stop()
    if query.exception() is not None:
        raise SystemExit(f"the query failed: {query.exception()}")


def stream(spark: Any, path: Path, **options: str) -> Any:
    """Return a streaming frame of a log."""
    return spark.readStream.format("kvspool").options(**options).load(str(path))


def rate_source(spark: Any, **options: int) -> Any:
    """Return Spark's own source of rows, generated in the JVM: a number of rows per second, or per micro-batch."""
    kind = "rate-micro-batch" if "rowsPerBatch" in options else "rate"
    return spark.readStream.format(kind).options(**options).load()


def catch_up(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """Stream the available records with `Trigger.AvailableNow`, half of them in each micro-batch, compared with one batch query."""
    path, limit = logs.spools(), max(size.records // 2, 1)

    def streamed() -> float:
        rows = stream(spark, path, startingOffsets="earliest", maxOffsetsPerTrigger=str(limit))
        start = time.perf_counter()
        query = rows.writeStream.format("noop").option("checkpointLocation", str(logs.new())).trigger(availableNow=True).start()
        query.awaitTermination(600)
        seconds = time.perf_counter() - start
        batches = [one.numInputRows for one in query.recentProgress if one.numInputRows]
        if sum(batches) != size.records or max(batches) > limit + (1 << BITS):
            raise SystemExit(f"{size.records} records were read in micro-batches of {batches}")
        return size.records / seconds

    def batch() -> float:
        start = time.perf_counter()
        frame(spark, path).write.format("noop").mode("overwrite").save()
        return size.records / (time.perf_counter() - start)

    found = in_turn(rounds, size, ours=streamed, batch=batch)
    yield compared("spark catch-up: AvailableNow", "M/s", found["ours"], "one batch query", found["batch"], ratio=0.57, figure=2)


def overhead(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """The time of a micro-batch of few records, with 1, 4 and 64 shards, compared with one of the rate source."""
    found = in_turn(
        rounds, size._replace(warm_ups=2 * size.warm_ups),
        rate=lambda: floor_of_batches(spark, logs, size),
        **{str(shards): lambda shards=shards: batch_time_of(spark, logs, shards, size) for shards in size.shards},  # type: ignore[misc]
    )  # fmt: skip
    for shards in size.shards:
        name = f"spark overhead: {shards} shard{'s' if shards > 1 else ''}"
        yield compared(name, "ms", found[str(shards)], "a micro-batch of the rate source", found["rate"])


def floor_of_batches(spark: Any, logs: Logs, size: Size) -> float:
    """Return the milliseconds of a micro-batch of the rate source with few rows."""
    return batch_time(spark, logs, rate_source(spark, rowsPerBatch=ROWS), None, size.seconds)


def batch_time_of(spark: Any, logs: Logs, shards: int, size: Size) -> float:
    """Return the milliseconds of a micro-batch of a new set of shards with few new records."""
    import shard

    root = logs.new()
    with shard.create(root, prefix="bench", bits=shards.bit_length() - 1, capacity=1 << 20) as log:
        return batch_time(spark, logs, stream(spark, root, startingOffsets="latest"), log, size.seconds)


def batch_time(spark: Any, logs: Logs, rows: Any, log: Any, seconds: float) -> float:
    """Return the milliseconds of the median micro-batch with records; those of the first second don't count."""
    with ExitStack() as stack:
        query = stack.enter_context(streaming(logs, rows))
        if log is not None:
            stack.enter_context(appending(log))
        taken = []
        start, last = time.monotonic(), -1
        while time.monotonic() < start + seconds or len(taken) < 3:
            if time.monotonic() > start + seconds + 60 or not query.isActive:
                raise SystemExit(f"there was no micro-batch: {query.exception()}")
            for one in query.recentProgress:
                if one.batchId > last and one.numInputRows:
                    last = one.batchId
                    if time.monotonic() > start + 1:
                        taken.append(one.durationMs["triggerExecution"])
            time.sleep(0.05)
    return statistics.median(taken)


@contextmanager
def appending(log: Any) -> Iterator[None]:
    """Append a few records a second from a thread."""
    is_over = threading.Event()

    def work() -> None:
        for at in count():
            log.append(b"x" * VALUE, key=b"%08d" % at)
            if is_over.wait(1 / LOW_RATE):
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _append_clocks(path: str, seconds: float) -> None:
    """Append the time, ten records a millisecond."""
    import kvspool

    with kvspool.open(path) as log:
        start = time.monotonic()
        done = 0
        while (passed := time.monotonic() - start) < seconds:
            for _ in range(int(passed * RATE) - done):
                log.append(b"%d" % time.time_ns())
                done += 1
            time.sleep(0.0005)


def latency(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """The time from an append to the append of the same record by a task of our sink, at 10,000 records a second."""
    import kvspool

    floor = [floor_of_batches(spark, logs, size) for _ in range(rounds)]
    found = []
    for _ in range(rounds):
        source, target = logs.new(), logs.new()
        capacity = int((size.seconds + 30) * RATE * 100)
        with kvspool.create(source, capacity=capacity), kvspool.create(target, capacity=capacity) as log:
            rows = stream(spark, source, startingOffsets="latest").select("value")
            with streaming(logs, rows, "kvspool", path=str(target)) as query:
                query.processAllAvailable()
                writer = spawn.Process(target=_append_clocks, args=(str(source), size.seconds))
                writer.start()
                writer.join()
                query.processAllAvailable()
            taken = sorted(record.timestamp - int(record.value) for record in log.read(start_of(log)))
        found.append(taken)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        ours = [taken[int(len(taken) * share)] / 1e6 for taken in found]
        bar = {"figure": 100.0} if name == "p50" else {}
        yield compared(f"spark latency: append to sink's task, {name}", "ms", ours, "a micro-batch of the rate source", floor, **bar)


def start_of(log: Any) -> int:
    """Return a sequence after the first fifth of a log, in which Spark warmed up."""
    return int(log.stats().next_sequence) // 5


def idle(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """The processor time of a query that waits for records, compared with one that gets a row of the rate source each second."""
    rows = stream(spark, logs.spools(), startingOffsets="latest")
    found = in_turn(
        rounds, size,
        ours=lambda: processor(spark, logs, rows, size.seconds),
        rate=lambda: processor(spark, logs, rate_source(spark, rowsPerSecond=1), size.seconds),
    )
    yield compared("spark idle: 4 shards", "cores", found["ours"], "rate source, 1 row a second", found["rate"])


def failover(spark: Any, logs: Logs, rounds: int, size: Size) -> Iterator[dict[str, object]]:
    """One of two hubs is killed, or stopped as if its host were lost: the time until the next record is in a micro-batch."""
    pki = _authority(logs)
    for what, loss in hub_cases.LOSSES.items():
        times = []
        for _ in range(rounds):
            with hub_cases.two_copies(logs.new(), pki) as (log, _, servers):
                options = {"hub": servers.location.replace(",", "|"), "caFile": str(pki / "ca.pem"), "startingOffsets": "earliest"}
                rows = spark.readStream.format("kvspool").options(**options).load()
                with streaming(logs, rows) as query:
                    query.processAllAvailable()
                    os.kill(servers.pids[0], loss)
                    start = time.perf_counter()
                    log.append(b"1")
                    hub_cases.until(lambda: sum(one.numInputRows for one in query.recentProgress) == 2)
                    times.append((time.perf_counter() - start) * 1000)
        yield hub_cases.alone(f"spark failover: a hub is {what}", "ms", times, hub_cases.FAILOVER)


def processor(spark: Any, logs: Logs, rows: Any, seconds: float) -> float:
    """Return the processor seconds of the JVM and all its Python processes per second of a query.

    They are sampled many times: the time of an ended process still counts, and reduces no other's.
    """
    pid = spark._jvm.java.lang.ProcessHandle.current().pid()
    with streaming(logs, rows):
        time.sleep(min(3.0, seconds))
        before, start = used(pid), time.monotonic()
        last = dict(before)
        while (passed := time.monotonic() - start) < seconds:
            time.sleep(LOOK)
            last |= used(pid)
        return sum(taken - before.get(process, 0.0) for process, taken in last.items()) / passed


def used(pid: int) -> dict[tuple[int, int], float]:
    """Return the processor seconds of a process and its living descendants, without their ended children, by their ids and starts."""
    stats: dict[int, list[str]] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        stats[int(path.parent.name)] = fields
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, left = {}, [pid]
    while left:
        one = left.pop()
        left += children.get(one, [])
        user, system, start = (int(stats[one][at]) for at in (11, 12, 19))
        found[one, start] = (user + system) / os.sysconf("SC_CLK_TCK")
    return found
