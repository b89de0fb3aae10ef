"""A standalone cluster, as docs/spark.md starts one: a master and two workers, each a process of its own, and a job by spark-submit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import shard
from hub.spark.home import use_home

ROOT = Path(__file__).resolve().parents[2]
RECORDS = 4000
PATIENCE = 60  # seconds, against a hang
JAVA = "-XX:TieredStopAtLevel=1"  # half the work for the compiler

JOB = """
import json, os, sys
import hub.spark

source, target = sys.argv[1:]
spark = hub.spark.session("job", cores=2)

def places(batches):
    import pyarrow
    for batch in batches:
        yield pyarrow.RecordBatch.from_pydict({"place": [os.getcwd()], "rows": [batch.num_rows]})

frame = spark.read.format("kvspool").option("minPartitions", "4").load(source)  # few records would share a task
said = {"read": [[row.place, row.rows] for row in frame.mapInArrow(places, "place string, rows bigint").collect()]}

def noted(batches):
    for batch in batches:
        open("streamed", "a").close()  # in the executor's own folder
        yield batch

rows = spark.readStream.format("kvspool").options(minPartitions="4", startingOffsets="earliest", maxOffsetsPerTrigger="3000").load(source)
rows = rows.selectExpr("key", "value")
writer = rows.mapInArrow(noted, rows.schema).writeStream.format("kvspool").option("checkpointLocation", target + ".checkpoint")
query = writer.options(topic="copy", bits="1", capacity="1MiB").trigger(availableNow=True).start(target)
assert query.awaitTermination(120)
said["streamed"] = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
print(json.dumps(said))
spark.stop()
"""


class Cluster:
    """A master and workers of one core, whose words go to files in a folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        home = use_home({}, folder=folder / "home")
        assert home is not None
        self.home = home
        self.folder = folder
        self._stack = stack
        self.environment = {
            **os.environ,
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }
        self._start("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        self.location = self._said("master", r"spark://127\.0\.0\.1:\d+")

    def add_worker(self, name: str) -> None:
        """Start a worker, whose executors have folders under one of its name."""
        words = ["--host", "127.0.0.1", "-c", "1", "-m", "512m", "--webui-port", "0", self.location]
        self._start(name, "org.apache.spark.deploy.worker.Worker", *words, SPARK_WORKER_DIR=str(self.folder / name))

    def wait_for(self, name: str) -> None:
        """Wait until the master has a worker."""
        self._said(name, "Successfully registered with master")

    def submit(self, job: Path, *arguments: object) -> str:
        """Run a job to its end, and return the last line that it printed; warnings of PySpark may be among the others."""
        settings = {
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.executor.extraJavaOptions": JAVA,
            "spark.driver.extraJavaOptions": JAVA,
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
        }
        given = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command = [self.home / "bin" / "spark-submit", "--master", self.location, *given, job, *arguments]
        done = subprocess.run(list(map(str, command)), env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr[-5000:]
        return done.stdout.splitlines()[-1]

    def _start(self, name: str, what: str, *words: str, **variables: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(self.home / "bin" / "spark-class"), what, *words]
            process = subprocess.Popen(command, env={**self.environment, **variables}, cwd=self.folder, stdout=log, stderr=log)
        self._stack.callback(process.wait, PATIENCE)
        self._stack.callback(process.terminate)

    def _said(self, name: str, pattern: str) -> str:
        """Wait for words in the log of a process, and return them."""
        found: list[str] = []

        def has_said() -> bool:
            found[:] = re.findall(pattern, (self.folder / f"{name}.log").read_text())
            return bool(found)

        until(has_said, f"{name} says nothing like {pattern}")
        return found[0]


def until(condition: Callable[[], bool], words: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, words
        time.sleep(0.02)


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    """A cluster with two workers; its processes are gone behind the `with` block."""
    with ExitStack() as stack:
        cluster = Cluster(folder, stack)
        workers = ("work1", "work2")
        for name in workers:
            cluster.add_worker(name)
        for name in workers:
            cluster.wait_for(name)
        yield cluster


@pytest.mark.spark
@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="needs PySpark")
def test_a_job_that_is_submitted_reads_and_streams_on_both_workers_and_each_record_is_there_once(tmp_path: Path) -> None:
    values = [b"value-%05d" % at for at in range(RECORDS)]
    with shard.create(tmp_path / "source", prefix="s", bits=2, capacity="1MiB") as shards:
        shards.append_many(values, keys=[value[-5:] for value in values])
    (tmp_path / "job.py").write_text(JOB)

    with cluster_in(tmp_path) as cluster:
        said = json.loads(cluster.submit(tmp_path / "job.py", tmp_path / "source", tmp_path / "target"))

    assert sum(rows for _, rows in said["read"]) == RECORDS
    assert {Path(place).relative_to(tmp_path).parts[0] for place, _ in said["read"]} == {"work1", "work2"}
    assert len(said["streamed"]) == 2 and sum(said["streamed"]) == RECORDS
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.glob("work*/*/*/streamed")} == {"work1", "work2"}
    with shard.open(tmp_path / "target", prefix="copy") as shards:
        assert Counter(record.value for record in shards) == dict.fromkeys(values, 1)
