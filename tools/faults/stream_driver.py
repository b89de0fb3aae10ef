"""The driver of `tools/faults/stream`: runs its queries until one ends or this process is killed.

    python stream_driver.py PLAN

PLAN is JSON: by the name of each query its `source` and `sink`, which are options, and its `checkpoint`. It may have the number of
partitions of a `shuffle`, or `table`, the path of a Delta table, instead of a `sink`. The error that ends a query is printed as one line
of JSON; then the exit code is 1. A query is restarted only if Spark abandoned it because a busy machine took 10 s to start its Python; the
number of restarts is reported too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

FAILURES = 4  # of a task, before its batch fails: Spark's own number on a cluster
TOO_SLOW = "Python worker failed to connect back"  # says Spark, whose patience with a Python that it starts is fixed
LOOKS = 0.2  # seconds between two looks at the queries


def main(path: Path) -> int:
    """Run the queries of a plan."""
    import hub.spark
    from hub.spark.home import use_home

    folder = path.parent
    use_home(folder=folder / "spark-home")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "spark"),
    }
    spark = hub.spark.session("campaign", master=f"local[2,{FAILURES}]", cores=1, settings=settings)
    spark.sparkContext.setLogLevel("ERROR")
    plan = json.loads(path.read_text())
    queries = {name: begun(spark, **query) for name, query in plan.items()}
    slow = 0
    while True:
        for name, query in queries.items():
            if query.isActive:
                continue
            error = str(query.exception())
            if TOO_SLOW not in error:
                print(json.dumps({"query": name, "error": error}), flush=True)
                return 1
            slow += 1
            print(json.dumps({"slow": slow}), flush=True)
            queries[name] = begun(spark, **plan[name])
        time.sleep(LOOKS)


def begun(spark: SparkSession, **query: Any) -> StreamingQuery:
    """Start a query, and return it when it has its own Python. One after the other: Spark waits but 10 s for one that it starts."""
    started = start(spark, **query)
    while started.isActive and "nitializing" in started.status["message"]:
        time.sleep(LOOKS)
    return started


def start(
    spark: SparkSession, source: dict[str, str], checkpoint: str, shuffle: int, sink: dict[str, str] | None = None, table: str = ""
) -> StreamingQuery:
    """Start a query, or continue it."""
    frame: Any = spark.readStream.format("kvspool").options(**source).load()
    if sink is None:
        return start_table(frame, source, checkpoint, table)
    if shuffle:
        frame = frame.repartition(shuffle, "key")
    writer = frame.select("key", "value").writeStream.format("kvspool").options(checkpointLocation=checkpoint, **sink)
    return writer.trigger(processingTime="100 milliseconds").start()


def start_table(frame: Any, source: dict[str, str], checkpoint: str, table: str) -> StreamingQuery:
    """Start a query that writes to a Delta table, as a pipeline does; it combines small files all the time."""
    from hub.pipeline.job import parse
    from hub.pipeline.sinks import DeltaSink

    document = {
        "source": {"path": source["path"]},
        "decode": {"codec": "raw"},
        "sink": {"path": table, "checkpoint": checkpoint, "keep": "1 hour", "partition_by": ["odd"]},
        "compact": {"files": 4, "target": "1MiB"},
    }
    sink, started, query = DeltaSink(parse(document, Path(table).with_suffix(".toml"))), threading.Event(), list[Any]()

    def query_id() -> str:
        started.wait()
        return str(query[0].id)

    rows = frame.selectExpr("CAST(CAST(value AS STRING) AS BIGINT) AS number", "CAST(CAST(key AS STRING) AS INT) % 2 AS odd")
    writer = sink.attach(rows, query_id, lambda batch: None).option("checkpointLocation", checkpoint)
    query.append(writer.trigger(processingTime="100 milliseconds").start())
    started.set()
    return query[0]  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
