"""`kvspool producers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parts import leave_part

import kvspool
from kvspool.cli import main
from kvspool.queue import ChunkQueue

pytestmark = pytest.mark.usefixtures("no_plugins")


def test_producers_are_shown_and_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.producer("märz/1").append_many(["x"] * 1500, batch=7)
        leave_part(log, "b", ["x"] * 3, 4, 2)
        log.append("settles")
    assert main(["producers", str(tmp_path / "log")]) == 0
    other, ours = (line for line in capsys.readouterr().out.splitlines() if line.startswith(("märz/1 ", "b ")))
    assert all(word in ours for word in ("märz/1", "7", "1,500", "UTC"))
    assert all(word in other for word in ("4", "2", "3", "-"))
    assert main(["producers", str(tmp_path / "log"), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    fields = [(one["name"], one["batch"], one["rows"], one["stored"], one["last"]) for one in found]
    assert fields == [("b", 4, 3, 2, None), ("märz/1", 7, 1500, 1500, 7)]
    assert main(["producers", str(tmp_path / "log"), "--forget", "b", "--forget", "c"]) == 0
    assert "forgot 1 of 2 producers" in capsys.readouterr().out
    with kvspool.open(tmp_path / "log") as log:
        assert [one.name for one in log.producers()] == ["märz/1"]


def test_what_has_none_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvspool.create(tmp_path / "log", format="sej").close()
    assert main(["producers", str(tmp_path / "log"), "--json"]) == 0
    assert capsys.readouterr().out == ""
    ChunkQueue.create(tmp_path / "queue").close()
    assert main(["producers", str(tmp_path / "queue")]) == 2
    assert "producers belong to one spool or journal" in capsys.readouterr().err
