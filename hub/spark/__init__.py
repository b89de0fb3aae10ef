"""Spark reads and writes logs: `spark.read.format("kvspool")`, `df.write.format("kvspool")`. Needs the extra `spark`.

    import hub.spark

    spark = hub.spark.session()
    columns = hub.spark.columns("topic", "value")        # a query names its columns: Spark reads all seven otherwise
    spark.read.format("kvspool").schema(columns).load("root").groupBy("topic").count().show()

Other sessions know the format too, if the package `pyspark_kvspool` is installed next to this one.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvspool.errors import MissingExtra
from kvspool.importing import other_pythons

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def session(
    name: str = "kvspool",
    *,
    master: str | None = None,
    cores: int | None = None,
    local_checkpoints: bool = True,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start a Spark session with fast settings for kvspool, on any suitable Java. Not needed if you build the session yourself.

    name: the application's name in Spark. master: where it runs; None: the argument of `spark-submit`, or else all cores of this machine.
    cores, local_checkpoints: see `session_settings`. settings: more of Spark's settings, which take precedence over ours.

    Changes the environment as `hub.spark.java.use_java` does. For a local master also sets PYSPARK_PYTHON to the running Python and
    SPARK_HOME to one whose Python starts fast, see `hub.spark.home`, if they aren't set. A running session is returned unchanged. Raises
    MissingExtra without PySpark, JavaNotFound without Java. Warns if the authors of PySpark don't name this version of Python.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingExtra.of("spark", "Spark needs the package pyspark", error) from error
    from hub.spark import home
    from hub.spark.java import use_java

    _warn_of_python()
    spark = SparkSession.getActiveSession()
    if spark is None:
        builder = SparkSession.builder.appName(name)
        chosen = session_settings(cores=cores, local_checkpoints=local_checkpoints)
        if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has started Java, and knows the master
            use_java()
            master = master or "local[*]"
        if master is not None:
            builder = builder.master(master)
        if (master or "").startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            folder = home.use_home()
            chosen |= {} if folder is None else home.settings(folder)
        for key, value in {**chosen, **(settings or {})}.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
    if find_spec("pyspark_kvspool") is None:  # otherwise Spark finds the format automatically
        register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Register `format("kvspool")` in a session that doesn't find the package `pyspark_kvspool`.

    Other sessions warn that the registration is replaced.
    """
    from hub.spark.source import KvspoolDataSource

    spark.dataSource.register(KvspoolDataSource)


def _warn_of_python() -> None:
    """Warn if the authors of the installed PySpark don't name this version of Python."""
    others = other_pythons("pyspark")
    if others:
        text = f"the installed PySpark names Python {others}, and this is {sys.version.split()[0]}: use one of them, or a newer PySpark"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def columns(*names: str) -> str:
    """Return the schema with these columns of `format("kvspool")`, for `.schema(...)`. All of them without names.

    Spark doesn't tell a source in Python which columns a query uses. With a schema, the other columns are neither read nor converted.
    Raises ValueError for an unknown column.
    """
    from hub.spark.reading import COLUMNS

    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise ValueError(f"there is no column {unknown[0]}; format kvspool has {', '.join(COLUMNS)}")
    return ", ".join(f"{name} {COLUMNS[name].simpleString()}" for name in names or COLUMNS)


def session_settings(*, cores: int | None = None, local_checkpoints: bool = True) -> dict[str, str]:
    """Return settings that make a session with Python workers fast; give them to the builder before the session starts.

    cores: the session's cores; this machine's by default. local_checkpoints: whether streaming checkpoints are on a local file system; pass
    False for an object store, where a rename is not atomic.

    - Workers talk to the JVM over Unix sockets: a third to a half more rows a second, and 45 ms less for each task, than over TCP.
    - Record batches of 65,536 rows reach a writer, not 10,000.
    - A shuffle has as many partitions as there are cores, not 200.
    - A micro-batch commits to a local checkpoint in a quarter of the time.
    - A repeated micro-batch has the same partitions, as exactly-once in a sink requires: Spark doesn't choose them by size.
    - Executors read columns without repeated checks; see `hub.spark.java`. With a local master the driver reads them, and needs the
      variables in its environment: `session` and `hub.spark.java.use_java` set them.
    """
    from hub.spark.java import ARROW

    settings = {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        "spark.sql.shuffle.partitions": str(cores or os.cpu_count() or 1),
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        **{f"spark.executorEnv.{name}": value for name, value in ARROW.items()},
    }
    if local_checkpoints:
        settings["spark.sql.streaming.checkpointFileManagerClass"] = (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        )
    return settings


def read_table(
    spark: SparkSession, path: str | os.PathLike[str], *, version: int | None = None, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return the rows of a Delta table: those of the newest version, or of an older one. Needs the extra `tables`, and no jars.

    Spark reads the files of one version, which `vacuum` keeps for a day unless the table says otherwise. For a URL of an object store,
    its Python workers read them. options: of the object store, without secrets. Raises TableError, MissingExtra.
    """
    from hub.spark.tables import read

    return read(spark, path, version, options)


__all__ = ["columns", "read_table", "register", "session", "session_settings"]
