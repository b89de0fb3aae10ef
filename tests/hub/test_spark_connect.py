"""Spark Connect: a client that has no JVM asks a server to read logs and to write them, in batches and as a stream."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from processes_of_spark import Servers, confs

import shard
from hub.spark import session_settings

RECORDS = 3000
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"

CLIENT = """
import json, sys
from pyspark.sql import SparkSession
import hub.spark

server, source, target = sys.argv[1:]
spark = SparkSession.builder.remote(server).getOrCreate()
assert hub.spark.session() is spark
said = {"kind": type(spark).__module__}

frame = spark.read.format("kvspool").load(source)
said["read"] = [[row.partition, row["count"]] for row in frame.groupBy("partition").count().collect()]
options = {"bits": "1", "capacity": "1MiB"}
frame.select("key", "value").write.format("kvspool").options(topic="batch", **options).mode("append").save(target)

rows = spark.readStream.format("kvspool").options(startingOffsets="earliest", maxOffsetsPerTrigger="2000").load(source)
writer = rows.select("key", "value").writeStream.format("kvspool").options(topic="stream", **options)
query = writer.option("checkpointLocation", target + ".checkpoint").trigger(availableNow=True).start(target)
assert query.awaitTermination(60)
said["streamed"] = [progress["sources"][0]["numInputRows"] for progress in query.recentProgress]
try:
    spark.read.format("kvspool").option("nonsense", "1").load(source).count()
except Exception as error:
    said["error"] = str(error)
print(json.dumps(said))
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pyspark", "grpc", "grpc_status", "pandas", "zstandard")),
    reason="needs PySpark and what its client of Spark Connect needs",
)
def test_a_client_reads_and_writes_and_streams_by_a_server(tmp_path: Path) -> None:
    values = [b"value-%05d" % at for at in range(RECORDS)]
    with shard.create(tmp_path / "source", prefix="s", bits=1, capacity="1MiB") as shards:
        shards.append_many(values, keys=[value[-5:] for value in values])
    settings = {
        **session_settings(cores=2),
        "spark.driver.memory": "512m",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    with Servers(tmp_path) as servers:
        servers.start("server", "bin/spark-submit", "--class", SERVER, "--master", "local[2]", *confs(settings), SPARK_DAEMON_MEMORY="512m")
        port = servers.said("server", r"Spark Connect server started at: \S*:(\d+)")
        client = (sys.executable, "-c", CLIENT, f"sc://127.0.0.1:{port}")
        said = json.loads(servers.run(*client, tmp_path / "source", tmp_path / "target", JAVA_HOME="", PATH="/nonexistent"))

    assert said["kind"] == "pyspark.sql.connect.session"
    assert sorted(partition for partition, _ in said["read"]) == [0, 1] and sum(count for _, count in said["read"]) == RECORDS
    assert "unknown option 'nonsense'" in said["error"]
    assert len([count for count in said["streamed"] if count]) == 2 and sum(said["streamed"]) == RECORDS
    for prefix in ("batch", "stream"):
        with shard.open(tmp_path / "target", prefix=prefix) as shards:
            assert Counter(record.value for record in shards) == dict.fromkeys(values, 1)
