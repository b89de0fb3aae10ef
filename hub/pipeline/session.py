"""The session of Spark that a pipeline runs in."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hub.pipeline.job import Job
from kvspool.errors import MissingExtra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUNTIME = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}  # what compaction writes, too


def start(job: Job, log: Path) -> SparkSession:
    """Start a session whose JVM writes what it has to say to a file. Raises MissingExtra, and what Spark raises."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # or the workers would be of whatever python3 is on the PATH
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise MissingExtra(f"a pipeline needs a package that isn't installed ({error}); pip install 'kvspool[spark]'") from error
    from hub.spark import register

    builder = SparkSession.builder.master(job.spark.master).appName(f"kvspool pipeline {job.name}")
    for name, value in settings(job).items():
        builder = builder.config(name, value)
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _errors_to(log), _interrupts_later():
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def settings(job: Job) -> dict[str, str]:
    """Return the settings of a job's session; those that the job names come last."""
    from hub.spark import session_settings

    is_local = "://" not in str(job.checkpoint)
    return {
        **session_settings(local_checkpoints=is_local),
        "spark.driver.memory": job.spark.memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        **RUNTIME,
        **({"spark.driver.host": "127.0.0.1"} if job.spark.master.startswith("local[") else {}),
        **job.spark.conf,
    }


@contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Let processes that start meanwhile inherit a file as their standard error."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold back an interrupt to the end of the block: a JVM that is left alone while it starts would never end."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for one in came:
        signal.raise_signal(one)
