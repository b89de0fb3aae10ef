"""A cluster: a driver and two executors, each a process of its own with Python workers of its own, read and write the same shards.

The master is `local-cluster`: Spark's own way to start a master, workers and executors on one host, with the scheduler and the network of
a real one. Its executors find this package by PYTHONPATH, as on hosts where it is unpacked and not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import shard

ROOT = Path(__file__).resolve().parents[2]
RECORDS = 8000

PROGRAM = """
import json, os, signal, sys
import hub.spark
source, target, flags, path = sys.argv[1:]
KILL_AFTER = 1000  # rows that a task has had when its worker is killed
settings = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executorEnv.PYTHONPATH": path,
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "100s",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    "spark.sql.warehouse.dir": flags,
}
spark = hub.spark.session("cluster", master="local-cluster[2,1,512]", cores=2, settings=settings)
spark.sparkContext.setLogLevel("OFF")

def executors(batches):
    import pyarrow
    rows = sum(batch.num_rows for batch in batches)
    yield pyarrow.RecordBatch.from_pydict({"executor": [os.getppid()], "rows": [rows]})

def killed_once(name):
    def work(batches):
        rows = 0
        for batch in batches:
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
counted = frame.mapInArrow(executors, "executor bigint, rows bigint").collect()
said = {"read": [[row.executor, row.rows] for row in counted]}

target_options = {"bits": "1", "capacity": "4MiB"}
rows = frame.selectExpr("key", "value")
rows = rows.mapInArrow(killed_once("batch"), rows.schema)
rows.write.format("kvspool").mode("append").options(prefix="batch", **target_options).save(target)

rows = spark.readStream.format("kvspool").options(minPartitions="4", startingOffsets="earliest", maxOffsetsPerTrigger="6000").load(source)
rows = rows.selectExpr("key", "value")
rows = rows.mapInArrow(killed_once("stream"), rows.schema)
writer = rows.writeStream.format("kvspool").options(prefix="stream", checkpointLocation=target + ".checkpoint", **target_options)
query = writer.trigger(availableNow=True).start(target)
query.awaitTermination(120)
said["streamed"] = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
print(json.dumps(said))
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="needs PySpark")
def test_executors_in_processes_of_their_own_read_and_write_the_same_shards_once_though_workers_are_killed(tmp_path: Path) -> None:
    values = [b"value-%05d" % at for at in range(RECORDS)]
    with shard.create(tmp_path / "source", prefix="s", bits=2, capacity="1MiB") as shards:
        for value in values:
            shards.append(value, key=value[-5:])
    (tmp_path / "flags").mkdir()

    done = run_program(PROGRAM, tmp_path, tmp_path / "source", tmp_path / "target", tmp_path / "flags", ROOT)
    said = json.loads(done)

    assert sum(rows for _, rows in said["read"]) == RECORDS
    assert len({executor for executor, _ in said["read"]}) == 2
    assert len(said["streamed"]) == 2 and sum(said["streamed"]) == RECORDS
    assert sorted(os.listdir(tmp_path / "flags")) == ["batch", "stream"]  # a worker was killed in both
    for prefix in ("batch", "stream"):
        with shard.open(tmp_path / "target", prefix=prefix) as shards:
            assert Counter(record.value for record in shards) == dict.fromkeys(values, 1)


def run_program(program: str, folder: Path, *arguments: Any) -> str:
    """Run a driver in a process of its own, and return what it printed."""
    variables = {**os.environ, "SPARK_HOME": "", "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
