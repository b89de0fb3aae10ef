"""`tools/test` runs failed tests once more, alone, tells unstable tests from failed ones, and ends jobs that hang."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert 0, 'for ever'\n"
# Counts its runs in a file, as the state of a test is gone after each.
COUNTS = """
import os
from pathlib import Path

import pytest

def runs(name):
    path = Path(__file__).with_name(name)
    path.write_text((path.read_text() if path.exists() else "") + "x")
    return len(path.read_text())
"""
UNSTABLE = COUNTS + "def test_is_unstable(): assert runs('unstable') > 1, 'too late'\n"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return tools/test as a module."""
    monkeypatch.syspath_prepend(str(TOOLS))
    loader = SourceFileLoader("tools_test", str(TOOLS / "test"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


@pytest.fixture
def run(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[str]]]:
    """Run a job of tests with these sources; return the exit code and the lines of the output."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they are slow to import
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")

    def run_job(*sources: str, others: tuple[Any, ...] = (), **options: Any) -> tuple[int, list[str]]:
        for number, source in enumerate(sources):
            (tmp_path / f"test_{number}.py").write_text(source, encoding="utf-8")
        tally = tool.Tally()
        tally.work([tool.Tests("a folder", sys.executable, [str(tmp_path)], **options), *others])
        return tally.conclude(), capsys.readouterr().out.splitlines()

    return run_job


def test_a_test_that_fails_once_is_unstable_and_one_that_fails_twice_has_failed(run: Callable[..., Any], tmp_path: Path) -> None:
    code, lines = run(PASSES + FAILS, UNSTABLE + "def test_others_run_once(): assert runs('others') == 1\n")
    assert code == 1
    assert lines[-1] == "2 passed, 1 failed, 1 unstable"
    start = lines.index("unstable: failed once, passed alone:")
    assert lines[start + 1 : -2] == ["  test_1.py::test_is_unstable (a folder)"]
    assert any("AssertionError: too late" in line for line in lines[:start])  # the first failure's text
    assert sum("AssertionError: for ever" in line for line in lines if line.startswith("E ")) == 2
    assert (tmp_path / "others").read_text() == "x"


@pytest.mark.parametrize(("source", "summary", "code"), [
    pytest.param(PASSES, "1 passed, 0 failed, 0 unstable", 0, id="all pass"),
    pytest.param(UNSTABLE, "0 passed, 0 failed, 1 unstable", 0, id="one is unstable"),
    pytest.param(
        COUNTS + "@pytest.mark.parametrize('x', range(5))\ndef test_x(x): assert runs(f'{x}') > 1\n", "0 passed, 0 failed, 5 unstable", 0,
        id="five are unstable",
    ),
    pytest.param(
        COUNTS + "@pytest.mark.parametrize('x', range(6))\ndef test_x(x): assert runs(f'{x}') > 1\n", "0 passed, 1 failed, 6 unstable", 1,
        id="six are too many",
    ),
    pytest.param(
        COUNTS + "@pytest.fixture\ndef f():\n    yield\n    assert 0\ndef test_x(f): assert 0\n", "0 passed, 1 failed, 0 unstable", 1,
        id="the call and the teardown fail",
    ),
    pytest.param(
        COUNTS + "def test_x():\n    if runs('x') > 1: pytest.skip()\n    assert 0\n", "0 passed, 1 failed, 0 unstable", 1,
        id="skipped the second time",
    ),
    pytest.param(
        COUNTS + PASSES + "def test_x():\n    if runs('x') > 1: os._exit(0)\n    assert 0\n", "1 passed, 1 failed, 0 unstable", 1,
        id="the second run crashes",
    ),
    pytest.param(
        COUNTS + "if runs('x') == 1: raise OSError\n" + PASSES, "1 passed, 0 failed, 1 unstable", 0,
        id="a file can't be imported once",
    ),
    pytest.param(
        COUNTS + PASSES + "def test_x():\n    if runs('x') == 1: os._exit(1)\n", "2 passed, 0 failed, 1 unstable", 0,
        id="a crash: the whole job runs again",
    ),
    pytest.param(
        COUNTS + "def test_x():\n    if runs('x') == 1: os._exit(0)\n" + FAILS, "1 passed, 1 failed, 1 unstable", 1,
        id="a crash, and a failure in the second run",
    ),
    pytest.param(
        COUNTS + PASSES + "def test_x():\n    assert runs('x') < 3\n    os._exit(0)\n", "0 passed, 1 failed, 0 unstable", 1,
        id="a job that crashes twice runs twice",
    ),
    pytest.param("", "0 passed, 1 failed, 0 unstable", 1, id="no tests"),
])  # fmt: skip
def test_outcomes_are_counted_once(source: str, summary: str, code: int, run: Callable[..., Any]) -> None:
    exit_code, lines = run(source)
    assert (exit_code, lines[-1]) == (code, summary)


def test_tests_that_the_caller_names_and_linters_run_once(run: Callable[..., Any], tool: ModuleType, tmp_path: Path) -> None:
    linter = tool.Job("linter", sys.executable, "-c", f"open({str(tmp_path / 'linted')!r}, 'a').write('x'); raise SystemExit(1)")
    code, lines = run(UNSTABLE, may_repeat=False, others=(linter,))
    assert (code, lines[-1]) == (1, "0 passed, 2 failed, 0 unstable")
    assert (tmp_path / "unstable").read_text() == (tmp_path / "linted").read_text() == "x"
    assert all(not job.may_repeat for job in tool._tests(sys.executable, ["-k", "spool"], ["compiled"], is_fast=False))
    assert all(job.may_repeat for job in tool._tests(sys.executable, [], ["compiled", "interpreted"], is_fast=False))


@pytest.mark.parametrize("ignores", ["", "faulthandler.disable(); signal.signal(signal.SIGABRT, signal.SIG_IGN); "])
def test_a_job_that_hangs_is_ended_and_runs_again(
    ignores: str, run: Callable[..., Any], tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output has the stacks, unless it ignores SIGABRT."""
    wait, hangs = tool._wait, tmp_path / "hangs"
    pids: list[int] = []

    def wait_until_it_hangs(pid: int, seconds: float) -> bool:
        pids.append(pid)
        while len(pids) == 1 and not (hangs.exists() and hangs.read_text()):
            time.sleep(0.01)
        return bool(wait(pid, 0 if len(pids) == 1 else seconds))

    monkeypatch.setattr(tool, "_wait", wait_until_it_hangs)
    monkeypatch.setattr(tool, "LAST_WORDS", 0.5 if ignores else 60)
    hang = f"{ignores}runs('hangs') > 1 or time.sleep(1000)"
    code, lines = run(f"{COUNTS}import faulthandler, signal, time\ndef test_hangs(): {hang}\n")
    assert (code, lines[-1]) == (0, "1 passed, 0 failed, 1 unstable")
    assert "a folder was killed: it took longer than 2400 s" in lines
    assert any("in test_hangs" in line for line in lines) != bool(ignores)


def test_a_test_that_no_signal_interrupts_ends_pytest_with_its_stack(tmp_path: Path) -> None:
    """With the settings of this project, except for the times."""
    source = "import signal\ndef test_hangs():\n    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    signal.pause()\n"
    (tmp_path / "test_hangs.py").write_text(source, encoding="utf-8")
    settings = ["-c", str(TOOLS.parent / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", "timeout=1", "-o", "faulthandler_timeout=3"]
    done = subprocess.run([sys.executable, "-m", "pytest", *settings, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in test_hangs" in done.stderr
    assert "1 failed" not in done.stdout  # it was not ended by the first time
