"""A standalone cluster, as docs/spark.md starts one: a master and two workers, each a process of its own, and a job by spark-submit."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes_of_spark import JAVA, Servers, confs

import shard

RECORDS = 4000
WORKERS = ("work1", "work2")

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


SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "100s",
    "spark.executor.extraJavaOptions": JAVA,
    "spark.driver.extraJavaOptions": JAVA,
}
HERE = ("--host", "127.0.0.1", "--webui-port", "0")


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


@pytest.mark.spark
@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="needs PySpark")
def test_a_job_that_is_submitted_reads_and_streams_on_both_workers_and_each_record_is_there_once(tmp_path: Path) -> None:
    values = [b"value-%05d" % at for at in range(RECORDS)]
    with shard.create(tmp_path / "source", prefix="s", bits=2, capacity="1MiB") as shards:
        shards.append_many(values, keys=[value[-5:] for value in values])
    (tmp_path / "job.py").write_text(JOB)

    with cluster_in(tmp_path) as (servers, location):
        job = (tmp_path / "job.py", tmp_path / "source", tmp_path / "target")
        settings = confs({**SETTINGS, "spark.sql.warehouse.dir": str(tmp_path / "warehouse")})
        said = json.loads(servers.run(servers.home / "bin" / "spark-submit", "--master", location, *settings, *job))

    assert sum(rows for _, rows in said["read"]) == RECORDS
    assert {Path(place).relative_to(tmp_path).parts[0] for place, _ in said["read"]} == set(WORKERS)
    assert len(said["streamed"]) == 2 and sum(said["streamed"]) == RECORDS
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.glob("work*/*/*/streamed")} == set(WORKERS)
    with shard.open(tmp_path / "target", prefix="copy") as shards:
        assert Counter(record.value for record in shards) == dict.fromkeys(values, 1)
