"""What importing costs, and which way imports go: kvspool <- shard <- hub, and Spark and Arrow only where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("pyspark", "pyarrow", "numpy", "pandas", "rich", "matplotlib", "cryptography", "starlette", "uvicorn", "prometheus_client")
OF_SERVING = ("authentication", "intake", "outlet")
OF_ARROW = ("columns", "remote", "server", "shipping/connection", "shipping/mirrored", *(f"serving/{name}" for name in OF_SERVING))
ARROW = {"kvspool/arrow.py", "hub/pipeline/decode.py", *(f"hub/{name}.py" for name in OF_ARROW)}
ABOVE = {
    "kvspool": {"shard", "hub", "pyspark_kvspool", "tools", "tests"},
    "shard": {"hub", "pyspark_kvspool", "tools", "tests"},
    "hub": {"pyspark_kvspool", "tools", "tests"},
    "pyspark_kvspool": {"tools", "tests"},
}


def imported(source: Path) -> Iterator[tuple[int, str, int]]:
    """Yield line, module and level of each import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(source.read_bytes(), source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", node.level


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ["kvspool", "shard", "hub"])
@pytest.mark.parametrize("interpreted", [False, True], ids=["default", "interpreted"])
def test_importing_a_package_imports_nothing_that_only_its_extras_need(package: str, interpreted: bool) -> None:
    code = f"import sys, {package}; print(*sys.modules)"
    environment = {"KVSPOOL_NO_EXTENSIONS": "1"} if interpreted else {}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    modules = done.stdout.split()
    assert package in modules
    assert {name.partition(".")[0] for name in modules}.isdisjoint(HEAVY)
    assert {name.partition(".")[0] for name in modules}.isdisjoint(ABOVE[package])


def test_the_settings_of_a_session_are_had_without_spark() -> None:
    code = "import sys, hub.spark; hub.spark.session_settings(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {name.partition(".")[0] for name in done.stdout.split()}.isdisjoint(HEAVY)


@pytest.mark.parametrize("package", list(ABOVE))
def test_imports_go_one_way(package: str) -> None:
    found = sources(package)
    assert found
    upward = [
        f"{source.relative_to(ROOT)}:{line}: {module}"
        for source in found
        for line, module, _ in imported(source)
        if module.partition(".")[0] in ABOVE[package]
    ]
    assert upward == []


@pytest.mark.parametrize("package", list(ABOVE))
def test_imports_are_absolute(package: str) -> None:
    assert [f"{source}:{line}" for source in sources(package) for line, _, level in imported(source) if level] == []


def test_only_the_spark_package_knows_spark_and_only_it_and_a_few_modules_need_arrow_to_be_imported() -> None:
    for package in ABOVE:
        for source in sources(package):
            name = str(source.relative_to(ROOT))
            tree = ast.parse(source.read_bytes(), source)
            top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
            top |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
            roots = {module.partition(".")[0] for module in top}
            if not name.startswith("hub/spark/"):
                assert "pyspark" not in roots, name
            if name not in ARROW:
                assert "pyarrow" not in roots, name


def test_the_commands_need_no_extra_before_they_use_one() -> None:
    code = "import sys, hub.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {name.partition(".")[0] for name in done.stdout.split()}.isdisjoint(HEAVY)
