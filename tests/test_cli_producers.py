"""`kvspool producers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Run
from parts import leave_part

import kvspool
from kvspool.queue import ChunkQueue

pytestmark = pytest.mark.usefixtures("no_plugins")


def test_producers_are_shown_and_forgotten(tmp_path: Path, run: Run) -> None:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.producer("märz/1").append_many(["x"] * 1500, batch=7)
        leave_part(log, "b", ["x"] * 3, 4, 2)
        log.append("settles")
    other, ours = (line for line in run("producers", tmp_path / "log").out.splitlines() if line.startswith(("märz/1 ", "b ")))
    assert all(word in ours for word in ("märz/1", "7", "1,500", "UTC"))
    assert all(word in other for word in ("4", "2", "3", "-"))
    found = run("producers", tmp_path / "log", "--json").objects
    fields = [(one["name"], one["batch"], one["rows"], one["stored"], one["last"]) for one in found]
    assert fields == [("b", 4, 3, 2, None), ("märz/1", 7, 1500, 1500, 7)]
    assert "forgot 1 of 2 producers" in run("producers", tmp_path / "log", "--forget", "b", "--forget", "c").out
    with kvspool.open(tmp_path / "log") as log:
        assert [one.name for one in log.producers()] == ["märz/1"]


def test_what_has_none_says_so(tmp_path: Path, run: Run) -> None:
    kvspool.create(tmp_path / "log", format="sej").close()
    assert run("producers", tmp_path / "log", "--json").out == ""
    ChunkQueue.create(tmp_path / "queue").close()
    assert "producers belong to one spool or journal" in run("producers", tmp_path / "queue", code=2).err
