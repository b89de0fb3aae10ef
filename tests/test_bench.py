"""`tools/bench` selects, compares and judges what the cases measure, and builds the other revision of --against."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
needs_history = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="revisions need a git repository")


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def module(name: str) -> Any:
    return importlib.import_module(f"cases.{name}")


@pytest.fixture
def bench() -> Callable[..., int]:
    """Return the command; the other revision gets the twins of this tree."""

    def copy_twins(tree: Path) -> None:
        for built in ROOT.glob("*/kernel/*_c.*.so"):
            shutil.copy(built, tree / built.relative_to(ROOT))

    main = module("command").main
    return lambda *arguments, build=copy_twins: main([*arguments, "--short"], build)


def worktrees() -> str:
    return subprocess.run(["git", "worktree", "list"], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("bar", "unit", "measures", "is_met"),
    [
        ({"ratio": 0.8}, "M/s", {"ratio": 0.8}, True),
        ({"ratio": 0.8}, "M/s", {"ratio": 0.79}, False),
        ({"ratio": 1.3}, "us", {"ratio": 1.2}, True),
        ({"ratio": 1.3}, "us", {"ratio": 1.4}, False),
        ({"figure": 0.003}, "cores", {"figure": 0.004}, False),
        ({"figure": 25, "old": 1.7}, "ns", {"figure": 30, "old": 1.8}, True),
        ({"figure": 25, "old": 1.7}, "ns", {"figure": 30, "old": 1.6}, False),
        ({"figure": 25, "old": 1.7}, "ns", {"figure": 24}, True),
        ({"figure": 25, "old": 1.7}, "ns", {"figure": 30}, None),
        ({}, "ns", {"figure": 30}, None),
    ],
)
def test_a_bar_is_met_when_one_of_its_measures_reaches_it(
    bar: dict[str, float], unit: str, measures: dict[str, float], is_met: bool | None
) -> None:
    assert module("case").Bar(**bar).is_met(unit, **measures) is is_met


@pytest.mark.parametrize(
    ("new", "old", "unit", "verdict"),
    [
        ([1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4], "M/s", "slower"),
        ([1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4], "us", "faster"),
        ([2.0, 2.1, 2.2, 2.3, 2.4], [1.0, 1.1, 1.2, 1.3, 1.4], "M/s", "faster"),
        ([2.0, 2.1, 2.2, 2.3, 2.4], [1.0, 1.1, 1.2, 1.3, 1.4], "us", "slower"),
        ([1.0, 1.1, 1.2, 1.3, 2.3], [2.0, 2.1, 2.2, 2.3, 2.4], "M/s", "same"),  # one of the new is as fast
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1.2, 2.1, 2.2, 2.3, 2.4], "M/s", "same"),  # one of the old is as slow
        ([1.0] * 4, [2.0] * 4, "M/s", ""),
    ],
)
def test_slower_marks_only_what_lost_more_than_the_noise(new: list[float], old: list[float], unit: str, verdict: str) -> None:
    assert module("results").verdict(new, old, unit) == verdict


def test_a_name_selects_its_case_or_all_that_begin_with_it() -> None:
    catalogue = module("catalogue")
    assert [case.name for case in catalogue.selected(["root-1"])] == ["root-1"]
    assert [case.name for case in catalogue.selected(["durable", "hub ingest"])] == ["durable-spool", "durable-kvj", "hub-ingest"]
    assert not any(case.is_asked for case in catalogue.selected([]))


def test_bad_options_are_refused_with_a_sentence(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["nonsense"], "no case begins with 'nonsense'; the cases are append-one, "),
        (["--rounds", "0"], "'0' is no number of rounds: give 1 or more"),
        (["--directory", "/nowhere"], "/nowhere is no directory"),
    ):
        with pytest.raises(SystemExit) as stopped:
            bench(*options)
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err


def test_help_names_every_case_without_a_set_up() -> None:
    done = subprocess.run([sys.executable, TOOLS / "bench", "--help"], check=True, capture_output=True, text=True)
    assert all(f"  {name} " in done.stdout for name in module("catalogue").CASES)


@needs_history
def test_against_measures_the_same_case_of_another_revision_in_turn(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    before = worktrees()
    assert bench("--against", "HEAD", "--case", "append-one", "--rounds", "2", "--json") == 0
    [line] = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert (result["case"], result["row"], result["unit"]) == ("append-one", "append, one writer", "M/s")
    assert result["verdict"] == ""  # two rounds do not tell a difference from noise
    assert all(result[figure] > 0 for figure in ("new", "old", "ratio"))
    assert worktrees() == before


@needs_history
def test_a_revision_that_is_unknown_or_does_not_build_is_a_clear_error(
    bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(tree: Path) -> None:
        (tree / "setup.py").write_text("raise SystemExit('no compiler today')")
        module("trees").compile_twins(tree)

    before = worktrees()
    assert bench("--against", "no-such-revision", "append-one") == 1
    assert f"tools/bench: 'no-such-revision' is no revision of {ROOT}\n" == capsys.readouterr().err
    assert bench("--against", "HEAD", "append-one", build=fail) == 1
    said = capsys.readouterr().err
    assert said.startswith("tools/bench: HEAD (") and "does not build: setup.py build_ext failed" in said and "no compiler today" in said
    assert worktrees() == before


def test_a_twin_that_was_not_built_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kvspool").mkdir()
    (tmp_path / "kvspool" / "frames_c.pxd").touch()
    (tmp_path / "setup.py").write_text("print('warning: no compiler')")
    trees = module("trees")
    with pytest.raises(trees.TreeError, match="built no frames_c:\nwarning: no compiler"):
        trees.compile_twins(tmp_path)


def test_the_copies_of_a_build_need_no_twin(tmp_path: Path) -> None:
    (tmp_path / "build" / "kvspool").mkdir(parents=True)
    (tmp_path / "build" / "kvspool" / "frames_c.pxd").touch()
    (tmp_path / "setup.py").write_text("print('built')")
    module("trees").compile_twins(tmp_path)


@pytest.fixture
def without_verbs(tmp_path: Path) -> Any:
    """Return a tree whose logs have no verbs."""
    package = tmp_path / "without verbs" / "kvspool"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return module("trees").Tree("old", package.parent)


def test_a_case_that_the_old_revision_cannot_run_is_not_there(tmp_path: Path, without_verbs: Any) -> None:
    catalogue, results, runs = (module(name) for name in ("catalogue", "results", "runs"))
    runner = runs.Runner(tmp_path, 3, lambda _: None, is_short=True)
    ours, others = runner.compare(catalogue.CASES["append-one"], without_verbs)
    assert (len(ours.rows), ours.failure, others.rows) == (1, "", [])
    result = results.compared("append-one", ours.rows[0], None, others.failure.splitlines()[-1])
    assert result["verdict"] == "not there"
    assert "old: not there: AttributeError: module 'kvspool' has no attribute 'create'" in results.line(result)


def test_without_a_compiler_only_the_floor_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    runs = module("runs")
    run = runs.Runner(tmp_path, 1, lambda _: None, is_short=True).measure(module("catalogue").CASES["replay-values"])
    [[ours, floor]] = run.rows[0].pairs
    assert ours > 0 and floor is None and run.failure == ""
    assert run.left_out.startswith("the floor in C is not measured: no gcc or cc on the PATH.")
    assert module("results").measured("replay-values", run.rows[0])["ratio"] is None


def test_the_page_names_every_case() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name in module("catalogue").CASES:
        stem, _, last = name.rpartition("-")
        assert f"`{name}`" in page or f"`{stem.rpartition('-')[0]}-" in page and f"`-{last}`" in page, name


def test_a_failed_case_is_reported_and_the_next_one_runs(
    bench: Callable[..., int], without_verbs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module("runs"), "HERE", without_verbs)
    assert bench("append-one", "replay-values", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "append-one failed:\n" in captured.err and "replay-values failed:\n" in captured.err
    assert "AttributeError: module 'kvspool' has no attribute 'create'" in captured.err
