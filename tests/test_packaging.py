"""Distributions are complete: an sdist from the tree, a wheel from that sdist, built where there is no C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvspool", "shard", "hub", "pyspark_kvspool")
LEFT_OUT = (".*", "*.egg-info", "*.so", "__pycache__", "build", "dist", "output", "spark-warehouse", "metastore_db")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the tree as a clone would have it, without what was built in it."""
    place = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, place / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    program = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    run([sys.executable, "-c", program, str(place)], cwd=place / "tree")
    (archive,) = place.glob("kvspool-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from the sdist with a C compiler that always fails."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", "."]
    run([*command, str(sdist)], cwd=place, CC="/bin/false")
    (archive,) = place.glob("kvspool-*.whl")
    return archive


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was unpacked into, which is all that its installation does."""
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """Run a command and return what it printed; fail with all it said if it failed."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def test_the_sdist_has_all_that_builds_tests_and_explains_the_project(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kinds = ["kvspool/**/*.py", "*/kernel/*.pxd", "kvspool/kernel/*.h", "*/py.typed", "tests/*", "docs/*", "tools/*", "*.md", "LICENSE"]
    kinds += ["hub/spark/*.py", "hub/web/static/*", "hub/spark/jre/bin/java", "pyspark_kvspool/*.py"]
    expected = {str(path.relative_to(ROOT)) for kind in kinds for path in ROOT.glob(kind) if path.is_file()}
    assert {"setup.py", "setup.cfg", "pyproject.toml", *expected} <= names
    assert [name for name in names if name.startswith("build") or name.endswith((".so", ".pyc"))] == []


def test_the_wheel_has_every_package_with_its_types_and_no_generated_c(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = {str(path.parent.relative_to(ROOT)) for top in PACKAGES for path in ROOT.glob(f"{top}/**/__init__.py")}
    assert {f"{package}/__init__.py" for package in packages} <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    declarations = [path for package in ("kvspool", "shard") for kind in ("*.pxd", "*.h") for path in ROOT.glob(f"{package}/kernel/{kind}")]
    assert declarations and {str(path.relative_to(ROOT)) for path in declarations} <= names
    assert {"hub/web/static/hub.html", "hub/web/static/hub.css", "hub/web/static/hub.js"} <= names
    assert "hub/spark/jre/bin/java" in names
    assert [name for name in names if name.endswith((".c", ".so")) or name.startswith(("tests/", "tools/", "build/"))] == []


def test_without_a_c_compiler_it_installs_and_runs_on_the_interpreted_twin(installed: Path, tmp_path: Path) -> None:
    program = (
        "import kvspool, shard, hub\n"
        "from kvspool.kernel.frames import TWIN\n"
        "with kvspool.create('log', capacity='64KiB') as log:\n"
        "    log.append(b'value', key=b'key')\n"
        "    print(kvspool.__file__, TWIN, [record.value for record in log.read()])\n"
    )
    said = run([sys.executable, "-c", program], cwd=tmp_path, PYTHONPATH=str(installed))
    assert said == f"{installed / 'kvspool' / '__init__.py'} interpreted [b'value']"


def test_the_java_of_the_extra_jre_is_started_by_a_program_that_an_installation_can_run(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo("hub/spark/jre/bin/java").external_attr >> 16
    assert mode & 0o777 == 0o755  # installers keep what the archive says


def test_the_installed_project_knows_its_commands_and_its_extras(installed: Path, tmp_path: Path) -> None:
    program = (
        "from importlib.metadata import distribution\n"
        "it = distribution('kvspool')\n"
        "print(sorted(entry.name for entry in it.entry_points if entry.group == 'kvspool.commands'), it.version)\n"
        "print(sorted(it.metadata.get_all('Provides-Extra')), it.metadata['License-Expression'])\n"
    )
    said = run([sys.executable, "-c", program], cwd=tmp_path, PYTHONPATH=str(installed))
    commands, extras = said.splitlines()
    assert commands.startswith("['hub', 'pipeline', 'shard', 'table'] ")
    assert extras == "['all', 'archive', 'arrow', 'demo', 'dev', 'hub', 'iceberg', 'jre', 'spark', 'tables'] MIT"
