"""Creators that are killed or stopped: the next one removes what a dead one left, and nothing of a living one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from endings import Ending

import kvspool
from kvspool import system
from kvspool.engine import making
from kvspool.errors import LogExists


def creating(path: Path, nth: int, number: int) -> int:
    """Fork a child that creates a log and gets a signal before its n-th call; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            with system.replaced(Ending(nth, number)):
                kvspool.create(path, capacity=4096, allow_unsafe_fs=True)
        finally:
            os._exit(0)
    return child


def hidden(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".log.")]


def test_what_a_killed_creator_left_is_removed_by_the_next_one_at_every_step(tmp_path: Path) -> None:
    left = 0
    for nth in range(1, 200):
        root = tmp_path / f"{nth}"
        root.mkdir()
        status = os.waitpid(creating(root / "log", nth, signal.SIGKILL), 0)[1]
        if not os.WIFSIGNALED(status):
            break
        left += bool(hidden(root))
        is_there = (root / "log").exists()
        if is_there:
            with pytest.raises(LogExists):
                kvspool.create(root / "log", capacity=4096)
        else:
            kvspool.create(root / "log", capacity=4096).close()
        assert os.listdir(root) == ["log"], nth
        with kvspool.open(root / "log") as log:
            assert log.append(b"first") == 0
    else:
        raise AssertionError("the creator never came to its end")
    assert left > 10


def test_the_directory_of_a_creator_that_is_stopped_survives_and_becomes_its_log(tmp_path: Path) -> None:
    seen = 0
    for nth in range(1, 200):
        root = tmp_path / f"{nth}"
        root.mkdir()
        child = creating(root / "log", nth, signal.SIGSTOP)
        status = os.waitpid(child, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            break
        try:
            before = hidden(root)
            held = [one for one in making.unfinished(root) if one.is_locked]
            making.remove_dead(root / "log", pytest.fail if held else Path.rmdir)  # type: ignore[arg-type]
            assert hidden(root) == before or not held
            seen += bool(held)
        finally:
            os.kill(child, signal.SIGCONT)
            assert os.waitpid(child, 0)[1] == 0
        assert os.listdir(root) == ["log"]
        kvspool.open(root / "log").close()
    else:
        raise AssertionError("the creator never came to its end")
    assert seen > 10


def test_a_look_at_a_directory_between_its_creation_and_its_lock_costs_the_creator_nothing(tmp_path: Path) -> None:
    class Watched(system.Port):
        looks = 0

        def try_lock_file(self, fd: int, *, shared: bool) -> bool:
            if self.looks == 0:
                self.looks += 1
                with system.replaced(system.Port()):
                    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
                    assert system.port.try_lock_file(other, shared=False)
                    try:
                        return super().try_lock_file(fd, shared=shared)
                    finally:
                        os.close(other)
            return super().try_lock_file(fd, shared=shared)

    with system.replaced(Watched()):
        kvspool.create(tmp_path / "log", capacity=4096).close()
    assert os.listdir(tmp_path) == ["log"]


def test_files_of_others_and_logs_of_other_names_stay(tmp_path: Path) -> None:
    id = "0f" * 16
    for name in (f".log.{id}.resize", f".other.{id}.new", f".log.{id}x.new", ".log.new"):
        (tmp_path / name).mkdir()
    (tmp_path / f".log.{id}.new").mkdir()
    (tmp_path / f".log.{id}.new" / "of somebody").touch()
    before = set(os.listdir(tmp_path))
    kvspool.create(tmp_path / "log", capacity=4096).close()
    assert set(os.listdir(tmp_path)) == before | {"log"}


def test_doctor_names_what_dead_creators_and_resizes_left(tmp_path: Path, run: Run) -> None:
    id = "0f" * 16
    for name in (f".log.{id}.resize", f".log.{id}.new", f".busy.{id}.new"):
        (tmp_path / name).mkdir()
    kvspool.create(tmp_path / "other", capacity=4096).close()
    fd = os.open(tmp_path / f".busy.{id}.new", os.O_RDONLY)
    try:
        assert system.port.try_lock_file(fd, shared=False)
        for path in (tmp_path, tmp_path / "log"):
            said = run("doctor", path, "--json").out
            assert f".log.{id}.new" in said and f".log.{id}.resize" in said and f".busy.{id}.new" not in said
        assert f".log.{id}" not in run("doctor", tmp_path / "other", "--json").out
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", [f".log.{'0123' * 8}.new", f".log.{'0123' * 8}.resize", ".log.kvspool"])
@pytest.mark.parametrize("kind", ["spool", "kvj", "fflg"])
def test_no_log_gets_a_name_of_files_next_to_another_log(tmp_path: Path, name: str, kind: Any) -> None:
    with pytest.raises(ValueError, match="choose another name"):
        kvspool.create(tmp_path / name, format=kind)
    assert list(tmp_path.iterdir()) == []
