from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clocks import StoppedClock

import kvspool
import shard
from kvspool import system

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that need a session last, so that all of them share one, and no other test runs alongside its JVM."""
    items.sort(key=lambda item: "spark" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session of two cores in which a task may fail once."""
    pytest.importorskip("pyspark")
    from pyspark.sql import SparkSession

    from hub.spark import register, session_settings
    from hub.spark.home import use_home
    from hub.spark.java import ARROW

    patch = pytest.MonkeyPatch()
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    patch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    patch.setenv("SPARK_HOME", "")
    for name, value in ARROW.items():
        patch.setenv(name, value)
    use_home(folder=tmp_path_factory.mktemp("spark") / "home")
    builder = SparkSession.builder.master("local[2,2]").appName("tests")
    settings = {
        **session_settings(cores=2),
        "spark.python.authenticate.socketTimeout": "120",  # a busy machine may take longer than 15 s to start a process
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    register(session)
    yield session
    gateway = session.sparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(30)
    _forget_gateway()
    patch.undo()


def _forget_gateway() -> None:
    """Release the objects that PySpark keeps in its classes, so that its sockets close here and not during another test."""
    from pyspark import SparkContext

    SparkContext._gateway = SparkContext._jvm = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def narrow_batches(spark: SparkSession) -> Iterator[None]:
    """Let a writer get its rows in batches of 100."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "100")
    yield
    spark.conf.set(name, before)


@pytest.fixture
def clock() -> Iterator[StoppedClock]:
    """A clock that moves only when the test moves it."""
    with system.replaced(StoppedClock()) as clock:
        assert isinstance(clock, StoppedClock)
        yield clock


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The bucket s3://lake of an S3 server on the loopback, with credentials in the environment; AWS_ENDPOINT_URL is its address."""
    pytest.importorskip("moto")
    command = [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "somebody"),
            ("AWS_SECRET_ACCESS_KEY", "hush-hush"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ALLOW_HTTP", "true"),
        ):
            monkeypatch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{address}/lake", method="PUT")).close()
        yield "s3://lake"
        server.stdin.close()
        server.wait()


@pytest.fixture(autouse=True)
def forget_logs() -> Iterator[None]:
    """Close the logs that a reader in this process keeps open for its next task."""
    yield
    local = sys.modules.get("hub.spark.local")
    if local is not None:
        local.close_logs()


@pytest.fixture
def odd_root(tmp_path: Path) -> Path:
    """Return a directory with a log, shard sets of which some are wrong, and a file."""
    kvspool.create(tmp_path / "log", capacity=4096).close()
    (tmp_path / "file").write_text("no log", encoding="utf-8")
    for name, prefix in (("good", "p"), ("hole", "p"), ("two", "p"), ("two", "q"), ("broken", "p")):
        shard.create(tmp_path / name, prefix=prefix, bits=2, capacity=4096).close()
    shutil.rmtree(tmp_path / "hole" / "p.2.001")
    shutil.rmtree(tmp_path / "two" / "q.2.000")
    (tmp_path / "broken" / "p.2.002" / "spool.dat").write_bytes(b"KVSPDAT2")
    kvspool.create(tmp_path / "two" / "p.1.000", capacity=4096).close()
    return tmp_path
