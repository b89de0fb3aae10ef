"""A driver of its own, which is killed between the second batch and its commit: `killed_driver.py FOLDER ROOT CHECKPOINT`.

Spark asks another process to commit, which is a child of the driver's JVM, which is a child of the driver: so it is that one which kills.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from processes_of_spark import JAVA


def main(folder: str, root: str, checkpoint: str) -> None:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

    from hub.spark import session_settings
    from hub.spark.sink import ShardSink
    from hub.spark.target import SinkTarget

    driver = os.getpid()

    class Killing(ShardSink):
        def commit(self, messages: Any, batchId: int) -> None:
            if batchId == 1:
                java = os.getppid()
                os.kill(driver, signal.SIGKILL)
                os.kill(java, signal.SIGKILL)
            super().commit(messages, batchId)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "killing"

        def streamWriter(self, schema: Any, overwrite: bool) -> Killing:
            return Killing(SinkTarget.parse(self.options, schema))

    builder = SparkSession.builder.master("local[1]").config("spark.driver.memory", "512m").config("spark.driver.extraJavaOptions", JAVA)
    for name, value in {**session_settings(cores=1), "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(Source)
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(folder)
    frame = lines.selectExpr("concat('key-', cast(value AS int) % 20) AS key", "value")
    frame.writeStream.format("killing").option("checkpointLocation", checkpoint).trigger(availableNow=True).start(root).awaitTermination()


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main(*sys.argv[1:])
