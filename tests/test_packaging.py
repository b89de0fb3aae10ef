"""Distributions are complete: an sdist from the tree, a wheel from it built where there is no C compiler; what `tools/release` checks."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import markdown
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


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return tools/release as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    loader = SourceFileLoader("tools_release", str(ROOT / "tools" / "release"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


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
    assert {f"hub/web/static/{path.name}" for path in (ROOT / "hub/web/static").iterdir()} <= names
    assert "hub/spark/jre/bin/java" in names
    assert [name for name in names if name.endswith((".c", ".h", ".pxd", ".so")) or name.startswith(("tests/", "tools/", "build/"))] == []


def test_a_wheel_without_a_compiled_twin_is_for_every_platform_and_its_description_has_no_broken_link(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        shown = archive.read(name).decode()
    assert "# kvspool" in shown and re.findall(r"\]\((?!https?:)", shown) == []


def test_links_of_the_description_lead_to_pages_of_the_published_site(sdist: Path, tmp_path: Path) -> None:
    """With an address in setup.cfg's project_urls; the site has each page with the name that its Markdown file has."""
    tree = tmp_path / "tree"
    shutil.copytree(sdist.parent / "tree", tree)
    settings = (tree / "setup.cfg").read_text(encoding="utf-8")
    urls = "project_urls =\n    Documentation = https://log.example/docs/\n"
    (tree / "setup.cfg").write_text(settings.replace("[options]\n", f"{urls}\n[options]\n", 1), encoding="utf-8")
    program = "import sys; from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make(sys.argv[1])"
    run([sys.executable, "-c", program, str(tmp_path)], cwd=tree)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    shown = metadata.read_text(encoding="utf-8")
    assert "Project-URL: Documentation, https://log.example/docs" in shown
    found = re.findall(r'href="([^"]+)"', markdown.markdown(shown.partition("\n\n")[2], extensions=["fenced_code", "tables"]))
    pages = {link.removeprefix("https://log.example/docs/").partition("#")[0] for link in found}
    sources = [name.replace(".html", ".md") for name in pages - {"index.html"}]
    added = re.search(r"^ADDED = (.+?)  #", (ROOT / "tools" / "site_pages.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert added is not None
    assert {"index.html", "spark.html", "HACKING.html"} <= pages
    assert [name for name in sources if not (ROOT / "docs" / name).is_file() and name not in ast.literal_eval(added[1])] == []


def test_a_twin_that_is_required_and_does_not_compile_is_an_error(sdist: Path) -> None:
    variables = {**os.environ, "CC": "/bin/false", "KVSPOOL_REQUIRE_EXTENSIONS": "1"}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    done = subprocess.run(command, cwd=sdist.parent / "tree", env=variables, capture_output=True, encoding="utf-8")
    assert done.returncode == 1
    assert "KVSPOOL_REQUIRE_EXTENSIONS=1, but the C compiler does not work" in done.stderr


@pytest.mark.parametrize(
    ("tag", "left_out", "added", "problem"),
    [
        ("cp311-cp311-manylinux_2_17_x86_64", [], [], None),
        ("cp314-cp314t-manylinux_2_17_x86_64", [], [], None),
        ("cp314-cp313-manylinux_2_17_x86_64", [], [], "is not tagged for one Python and manylinux"),
        ("py3-none-any", [], [], "is not tagged for one Python and manylinux"),
        ("cp311-cp311-manylinux_2_17_x86_64", ["kvspool/log.py"], [], "has no kvspool/log.py"),
        ("cp311-cp311-manylinux_2_17_x86_64", ["hub/web/static/hub.js"], [], "has no hub/web/static/hub.js"),
        ("cp311-cp311-manylinux_2_17_x86_64", ["kvspool/kernel/frames_c.cpython-311.so"], [], "has no compiled kvspool.kernel.frames_c"),
        ("cp311-cp311-manylinux_2_17_x86_64", [], ["tests/test_a.py"], "must not have tests/test_a.py"),
        ("cp311-cp311-manylinux_2_17_x86_64", [], ["kvspool/kernel/frames_c.pxd"], "must not have kvspool/kernel/frames_c.pxd"),
        ("cp311-cp311-manylinux_2_17_x86_64", [], ["kvspool/removed.py"], "has an unknown file kvspool/removed.py"),
    ],
)
def test_a_release_has_no_wheel_with_other_contents(
    release: ModuleType, tmp_path: Path, tag: str, left_out: list[str], added: list[str], problem: str | None
) -> None:
    sources = [str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    twins = ["kvspool/kernel/frames_c.cpython-311.so"]
    path = tmp_path / f"kvspool-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in {*sources, *twins, *added, *release.DATA, *(f"{package}/py.typed" for package in PACKAGES)} - {*left_out}:
            archive.writestr(name, "")
        archive.writestr("kvspool-1.0.dist-info/METADATA", "")
        archive.writestr("kvspool/", "")  # as auditwheel does
    if problem is None:
        release.check_wheel(path, ROOT, ["kvspool.kernel.frames_c"])
    else:
        with pytest.raises(release.ReleaseError, match=re.escape(problem)):
            release.check_wheel(path, ROOT, ["kvspool.kernel.frames_c"])


def test_only_changed_inputs_are_compiled_again(release: ModuleType, tmp_path: Path) -> None:
    """The tree of a release keeps the extensions, but no module that the new sdist lacks."""
    release.WORK = tmp_path
    for name in ("build/lib.x/kvspool/kernel/a.so", "build/lib.x/kvspool/removed.py", "kvspool/removed.py"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    source = tmp_path / "kvspool-1.0"
    source.mkdir()
    (source / "new.py").touch()
    with tarfile.open(tmp_path / "kvspool-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "kvspool-1.0")
    tree = release.unpack(tmp_path / "kvspool-1.0.tar.gz")
    kept = sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file())
    assert kept == ["build/lib.x/kvspool/kernel/a.so", "new.py"]


def test_of_each_version_of_python_the_newest_release_is_found(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Programs that answer as Pythons do: two releases of 3.12, both builds of 3.14, one too old, and a shim that fails."""
    answers = {"a/python3.12": "3 12 1 0", "b/python3.12": "3 12 9 0", "a/python3.14": "3 14 2 0", "a/python3.14t": "3 14 2 1"}
    for name, answer in {**answers, "a/python3.9": "3 9 20 0", "b/python3.13": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{f'echo {answer}' if answer else 'exit 127'}\n", encoding="utf-8")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    monkeypatch.setattr(release.interpreters, "PLACES", ())
    found = {str(version): path for version, path in release.interpreters.find().items()}
    expected = {"3.12": "b/python3.12", "3.14": "a/python3.14", "3.14t": "a/python3.14t"}
    assert found == {version: str(tmp_path / path) for version, path in expected.items()}
    assert [str(version) for version in release.interpreters.choose(["3.14t", "3.12"])] == ["3.14t", "3.12"]
    with pytest.raises(release.environment.SetupError, match="no Python 3.13, 3.9 here, only 3.12, 3.14, 3.14t"):
        release.interpreters.choose(["3.9", "3.12", "3.13"])


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
        "print(sorted(it.metadata.get_all('Provides-Extra')), it.metadata['License-Expression'], it.metadata['Requires-Python'])\n"
    )
    said = run([sys.executable, "-c", program], cwd=tmp_path, PYTHONPATH=str(installed))
    commands, extras = said.splitlines()
    assert commands.startswith("['hub', 'pipeline', 'shard', 'table'] ")
    assert extras == (
        "['all', 'archive', 'arrow', 'demo', 'dev', 'docs', 'hub', 'iceberg', 'jre', 'otel', 'peers', 'release', 'spark', 'tables', "
        "'test'] MIT >=3.11"
    )
