"""The home of Spark that is made of links. That a session starts from it, and that it goes with its process, test_java.py shows."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hub.spark import home
from hub.spark.home import use_home

PROGRAM = """
import os, sys
from pathlib import Path
from hub.spark import home
home._package = lambda: Path(sys.argv[1])
print(home.use_home({}), flush=True)
if os.fork() == 0:
    sys.exit()  # with all that a Python does at its end
os.wait()
print(os.path.exists(home.use_home(os.environ)), flush=True)
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of PySpark, as far as a home is made of it."""
    package = tmp_path / "site-packages" / "pyspark"
    for name in ("python/lib/pyspark.zip", "python/lib/py4j-0.1-src.zip", "python/pyspark/shell.py", "jars/spark.jar", "bin/spark-class"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(home, "_package", lambda: package)
    return package


def test_a_home_has_the_package_in_the_place_of_the_zip_and_links_to_all_else(tmp_path: Path, package: Path) -> None:
    environment: dict[str, str] = {}
    folder = use_home(environment, folder=tmp_path / "home")
    assert folder == tmp_path / "home" and environment == {"SPARK_HOME": str(folder)}
    assert (folder / "python" / "lib" / "pyspark.zip" / "pyspark" / "__init__.py").read_text() == ""
    assert sorted(os.listdir(folder / "python" / "lib")) == ["py4j-0.1-src.zip", "pyspark.zip"]
    assert (folder / "jars" / "spark.jar").read_text() == "jars/spark.jar"
    assert (folder / "bin").resolve() == package / "bin"


def test_a_home_that_is_there_is_taken_as_it_is(tmp_path: Path, package: Path) -> None:
    folder = use_home({}, folder=tmp_path / "home")
    environment: dict[str, str] = {}
    assert use_home(environment, folder=tmp_path / "home") == folder
    assert environment == {"SPARK_HOME": str(folder)}


def test_a_home_that_the_user_has_set_stays(package: Path) -> None:
    environment = {"SPARK_HOME": "/opt/spark"}
    assert use_home(environment) is None
    assert environment == {"SPARK_HOME": "/opt/spark"}


@pytest.mark.parametrize("missing", ["python/lib/pyspark.zip", "jars/spark.jar"])
def test_without_a_spark_in_the_package_nothing_is_done(package: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.undo()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    assert home._package() == package
    (package / missing).unlink()
    (package / missing).parent.rmdir() if missing.startswith("jars") else None
    environment: dict[str, str] = {}
    assert use_home(environment) is None
    assert environment == {}


@pytest.mark.parametrize(("signum", "stays"), [(0, False), (signal.SIGKILL, True)])
def test_a_temporary_home_goes_with_the_process_that_made_it_unless_it_is_killed(
    tmp_path: Path, package: Path, signum: int, stays: bool
) -> None:
    (tmp_path / "tmp").mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"} | {"TMPDIR": str(tmp_path / "tmp")}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PROGRAM, str(package), str(int(signum))]
    done = subprocess.run(command, env=variables, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signum, done.stderr
    first, after_a_fork = done.stdout.split()
    assert Path(first).parent == tmp_path / "tmp" and after_a_fork == "True"
    assert Path(first).exists() is stays
    if stays:
        assert stat.S_IMODE(Path(first).stat().st_mode) == 0o700
        (Path(first) / "files").mkdir()  # as Spark leaves them
        (Path(first) / "files" / "spark-1").write_text("staged")


def test_homes_of_killed_processes_are_removed_and_no_others(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = use_home({})
    assert ours is not None and home.settings(ours)["spark.local.dir"] == str(ours / "files")
    abandoned, being_made, foreign, link = (tmp_path / f"{home.PREFIX}{name}" for name in ("a", "b", "c", "d"))
    for folder in (abandoned, being_made, foreign):
        folder.mkdir()
    for folder in (abandoned, foreign):
        (folder / home.LOCK).touch()
    (abandoned / "jars").symlink_to(package / "jars")
    (being_made / f".{home.LOCK}").touch()
    os.chown(foreign, 1, 1) if os.geteuid() == 0 else shutil.rmtree(foreign)
    link.symlink_to(package)
    (package / home.LOCK).touch()
    home.remove_abandoned()
    assert not abandoned.exists() and ours.exists() and being_made.exists() and link.exists()
    assert (package / "jars" / "spark.jar").exists()
    assert foreign.exists() or os.geteuid() != 0
    home._locks.pop().close()  # as a kill does
    home.remove_abandoned()
    assert not ours.exists()


def test_spark_keeps_its_files_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/data")
    assert home.settings(tmp_path) == {}
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    deep = tmp_path / ("d" * 100)
    assert home.settings(deep) == {"spark.local.dir": str(deep / "files")}, "the path of a socket there would be too long"
