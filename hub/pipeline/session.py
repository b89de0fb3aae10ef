"""The Spark session of a pipeline."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hub.pipeline.job import Job
from kvspool.system.descriptor import Descriptor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUNTIME = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # which every reader of Parquet knows
    "spark.sql.streaming.numRecentProgressUpdates": "20",  # all of them are read four times a second
}


def start(job: Job, log: Path) -> SparkSession:
    """Start a session whose JVM writes its output to a file. Raises MissingExtra, JavaNotFound, and Spark's errors."""
    from hub import spark

    is_local = "://" not in job.checkpoint
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with errors_to(log), _interrupts_later():
        session = spark.session(
            f"kvspool pipeline {job.name}", master=job.spark.master, local_checkpoints=is_local, settings=settings(job)
        )
    session.sparkContext.setLogLevel("ERROR")
    return session


def settings(job: Job) -> dict[str, str]:
    """Return the settings of a job's session, in addition to those of every session with kvspool; the job's own settings are last."""
    return {
        "spark.driver.memory": job.spark.memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        **RUNTIME,
        **({"spark.driver.host": "127.0.0.1"} if job.spark.master.startswith("local[") else {}),
        **job.spark.conf,
    }


@contextmanager
def errors_to(log: Path) -> Iterator[None]:
    """Let processes that are started inside the block inherit a file as their standard error."""
    sys.stderr.flush()
    with Descriptor(os.path.realpath(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) as fd:
        saved = os.dup(2)
        os.dup2(fd, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay an interrupt to the end of the block: a JVM abandoned during its start would never end."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for one in came:
        signal.raise_signal(one)
