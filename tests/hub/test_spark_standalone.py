"""A standalone cluster, as docs/spark-cluster.md starts one: a master and two workers, each a process, and a job by spark-submit.

The executors find this package by PYTHONPATH, as on hosts where it is unpacked and not installed. All tests look at one run of the job.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes_of_spark import Servers, confs

import shard

RECORDS = 8000
VALUES = [b"value-%05d" % at for at in range(RECORDS)]
WORKERS = ("work1", "work2")

JOB = """
import json, os, signal, sys
import hub.spark

source, target, flags = sys.argv[1:]
KILL_AFTER = 1000  # rows that a task has had when its Python worker is killed
spark = hub.spark.session("job", cores=2)
spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")

def places(batches):
    import pyarrow
    for batch in batches:
        yield pyarrow.RecordBatch.from_pydict({"place": [os.getcwd()], "rows": [batch.num_rows]})

def killed_once(name):
    def work(batches):
        rows = 0
        for batch in batches:
            open(name, "a").close()  # in the executor's own folder
            rows += batch.num_rows
            if rows > KILL_AFTER:
                try:
                    os.close(os.open(os.path.join(flags, name), os.O_CREAT | os.O_EXCL))
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
            yield batch
    return work

frame = spark.read.format("kvspool").option("minPartitions", "4").load(source)  # few records would share a task
said = {"read": [[row.place, row.rows] for row in frame.mapInArrow(places, "place string, rows bigint").collect()]}

options = {"bits": "1", "capacity": "4MiB"}
rows = frame.selectExpr("key", "value")
rows = rows.mapInArrow(killed_once("batch"), rows.schema)
rows.write.format("kvspool").mode("append").options(topic="batch", **options).save(target)

rows = spark.readStream.format("kvspool").options(minPartitions="4", startingOffsets="earliest", maxOffsetsPerTrigger="6000").load(source)
rows = rows.selectExpr("key", "value")
writer = rows.mapInArrow(killed_once("stream"), rows.schema).writeStream.format("kvspool").options(topic="stream", **options)
query = writer.option("checkpointLocation", target + ".checkpoint").trigger(availableNow=True).start(target)
assert query.awaitTermination(120)
said["streamed"] = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
print(json.dumps(said))
spark.stop()
"""


SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "100s",
}
HERE = ("--host", "127.0.0.1", "--webui-port", "0")
pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="needs PySpark"),
]


@contextmanager
def cluster_in(folder: Path) -> Iterator[tuple[Servers, str]]:
    """A master with two workers of one core, and its location; executors have folders under one of their worker's name."""
    with Servers(folder) as servers:
        servers.start("master", "bin/spark-class", "org.apache.spark.deploy.master.Master", *HERE, "--port", "0")
        location = servers.said("master", r"spark://127\.0\.0\.1:\d+")
        for name in WORKERS:
            words = ("org.apache.spark.deploy.worker.Worker", *HERE, "-c", "1", "-m", "512m", location)
            servers.start(name, "bin/spark-class", *words, SPARK_WORKER_DIR=str(folder / name))
        for name in WORKERS:
            servers.said(name, "Successfully registered with master")
        yield servers, location


class Done(NamedTuple):
    """A job that has run, in a folder. said: its output."""

    folder: Path
    said: Any

    def streamed_on(self) -> set[str]:
        """Return the workers whose executors had tasks of the stream."""
        return {path.relative_to(self.folder).parts[0] for path in self.folder.glob("work*/*/*/stream")}

    def count(self, topic: str) -> Counter[bytes]:
        """Return how often each value is in a topic of the target."""
        with shard.open(self.folder / "target", prefix=topic) as shards:
            return Counter(record.value for record in shards)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Run the job once."""
    folder = tmp_path_factory.mktemp("cluster")
    with shard.create(folder / "source", prefix="s", bits=2, capacity="1MiB") as shards:
        shards.append_many(VALUES, keys=[value[-5:] for value in VALUES])
    (folder / "flags").mkdir()
    (folder / "job.py").write_text(JOB)
    with cluster_in(folder) as (servers, location):
        job = (folder / "job.py", folder / "source", folder / "target", folder / "flags")
        settings = confs({**SETTINGS, "spark.sql.warehouse.dir": str(folder / "warehouse")})
        return Done(folder, json.loads(servers.run(servers.home / "bin" / "spark-submit", "--master", location, *settings, *job)))


def test_a_job_that_is_submitted_reads_and_streams_on_both_workers_and_each_record_is_there_once(done: Done) -> None:
    assert sum(rows for _, rows in done.said["read"]) == RECORDS
    assert {Path(place).relative_to(done.folder).parts[0] for place, _ in done.said["read"]} == set(WORKERS)
    assert len(done.said["streamed"]) == 2 and sum(done.said["streamed"]) == RECORDS
    assert done.streamed_on() == set(WORKERS)
    assert done.count("stream") == dict.fromkeys(VALUES, 1)


@pytest.mark.parametrize("topic", ["batch", "stream"])
def test_executors_write_the_same_shards_once_though_a_python_worker_is_killed(done: Done, topic: str) -> None:
    assert topic in os.listdir(done.folder / "flags"), "a worker was killed"
    assert done.count(topic) == dict.fromkeys(VALUES, 1)
