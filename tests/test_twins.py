"""Which twin of a module is chosen, and when; and that both run the same functions for the same call."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import twin_names

from kvspool.kernel.twins import choose

ROOT = Path(__file__).resolve().parents[1]

names = (f"chosen_{number}" for number in itertools.count())


@pytest.fixture
def chooser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the globals of a chooser whose interpreted twin has `one` and `two`, and the other one only `one`."""
    monkeypatch.delenv("KVSPOOL_NO_EXTENSIONS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    stem = next(names)
    (tmp_path / f"{stem}_py.py").write_text("one = two = 'interpreted'\n", encoding="utf-8")
    (tmp_path / f"{stem}_c.py").write_text("one = 'compiled'\n", encoding="utf-8")
    return {"__name__": stem}


def test_the_compiled_twin_is_chosen_where_there_is_one(chooser: dict[str, Any]) -> None:
    assert choose(chooser, ["one"]) == chooser["one"] == "compiled"


def test_an_old_build_without_a_name_is_not_mixed_with_the_interpreted_twin(chooser: dict[str, Any]) -> None:
    assert choose(chooser, ["one", "two"]) == chooser["one"] == chooser["two"] == "interpreted"


def test_where_nothing_was_built_it_is_the_interpreted_one(chooser: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / f"{chooser['__name__']}_c.py").unlink()
    assert choose(chooser, ["one"]) == chooser["one"] == "interpreted"


def test_the_environment_or_another_chooser_forces_the_interpreted_one(
    chooser: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(chooser, ["one"], "interpreted") == chooser["one"] == "interpreted"
    monkeypatch.setenv("KVSPOOL_NO_EXTENSIONS", "1")
    assert choose(chooser, ["one"]) == chooser["one"] == "interpreted"


# The same functions. The kill tests stop the interpreted twin at every opcode: so these must be the functions that users run.

# Functions of the kernels that ask which twin they are, and so may take another way in one of them.
ASKING = {
    "batch_py.Batch.next_of",  # interpreted, undoes a step that a signal handler interrupts
    "chunks_py.Ends.__init__",  # interpreted, a queue does all in several steps: a handler between the steps could cost an entry
    "lock_py.AppendLock.is_gate_open",  # the lock itself: no compare-and-swap in Python
    "lock_py.AppendLock.leave",
    "lock_py.AppendLock.take_soon",
    "tail_py.Tail.append",  # interpreted, these exclude the other threads of the handle
    "tail_py.Tail.append_alone",
    "writer_py.FrameWriter.append",
    "writer_py.FrameWriter.append_alone",
    "writer_py.FrameWriter.append_many",
    "writer_py.FrameWriter.locked",
    "tail_py.Tail.is_in_place",  # interpreted, it always looks
}


def routes(twin: str, directory: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Return the functions that each call enters on a twin; see `routes.py`."""
    directory.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVSPOOL_NO_EXTENSIONS": "1" if twin == "interpreted" else ""}
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "routes.py"), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["twin"] == twin
    return found["routes"]  # type: ignore[no-any-return]


def asking() -> Iterator[str]:
    """Yield the functions of the kernels that ask which twin they are."""
    for path in (*ROOT.glob("kvspool/kernel/*_py.py"), *ROOT.glob("shard/kernel/*_py.py")):
        for cls in ast.parse(path.read_bytes()).body:
            for function in cls.body if isinstance(cls, ast.ClassDef) else [cls]:
                if any(isinstance(node, ast.Attribute) and node.attr == "is_one_step" for node in ast.walk(function)):
                    yield f"{path.stem}.{getattr(cls, 'name', '')}.{getattr(function, 'name', '')}"


# A queue that is not flushed puts or takes one entry in one step on the compiled twin, and in several on the other one; see `Ends`.
IN_SEVERAL_STEPS = ("queue, memory: put", "queue, memory: get")


@pytest.mark.skipif(len(twin_names()) < 2, reason="needs the compiled twin")
def test_both_twins_run_the_same_functions_for_the_same_call(tmp_path: Path) -> None:
    compiled, interpreted = (routes(twin, tmp_path / twin) for twin in ("compiled", "interpreted"))
    in_one_step = [compiled.pop(name)[0] for name in IN_SEVERAL_STEPS]
    assert in_one_step == [["queue.ChunkQueue.put"], ["queue.ChunkQueue.get"]]
    for name in IN_SEVERAL_STEPS:  # the way of a queue that is flushed, which both twins take, without the flush
        above, below = interpreted.pop(name)
        flushed_above, flushed_below = interpreted[name.replace("memory", "disk")]
        assert above == flushed_above[: len(above)] and below == flushed_below
    assert {name: found[0] for name, found in compiled.items()} == {name: found[0] for name, found in interpreted.items()}
    assert not any(found[1] for found in compiled.values())
    assert all(found[1] for found in interpreted.values())
    for kind, step in (("spool", "writer.FrameWriter.append_locked"), ("kvj", "tail.Tail.append_locked")):
        assert step in interpreted[f"{kind}: append"][1] and step in interpreted[f"{kind}: append, durable"][1]
    assert "writer.FrameWriter.append_bulk" in interpreted["spool: append_many"][1]
    assert "reader.FrameReader.step" in interpreted["spool: read_values"][1]
    assert "wakeups.FileSleeper.fetch" in interpreted["kvj: follow, waiting"][1]


def test_the_loops_ask_for_their_twin_only_where_it_is_listed() -> None:
    assert set(asking()) == ASKING
