"""Something else with a file's name: a FIFO, a socket, a device, a directory. It is an error that names it, never a wait."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import every_log
import pytest

import kvspool
from kvspool import queue
from kvspool.errors import Corruption, KvspoolError, NotAFile, NotALog
from kvspool.journal import index
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor


def make_socket(path: Path) -> None:
    """Bind a socket by a path relative to its directory: the whole one may be too long for it."""
    before = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(before)
        os.close(before)


def make_device(path: Path) -> None:
    """Make a node of the device that gives endless zeros."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        pytest.skip("this user can't make device nodes here")


THINGS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a device": make_device,
    "a directory": os.mkdir,
}

BRIEF = ("stats", "read", "reader", "producers", "append", "rewind", "verify", "repair")


@pytest.fixture(params=THINGS)
def thing(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def files_under(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def replaced(root: Path, kind: str, thing: str) -> Iterator[Path]:
    """Yield each file of a log, in a log of its own, after something else took its place."""
    root.mkdir()
    every_log.make(kind, root / "log")
    for number in range(len(files_under(root))):
        place = root.with_name(f"{number}")
        place.mkdir()
        every_log.make(kind, place / "log")
        file = files_under(place)[number]
        file.unlink()
        THINGS[thing](file)
        yield file


@pytest.mark.parametrize("kind", every_log.KINDS)
def test_nothing_in_the_place_of_any_file_keeps_anybody_waiting(tmp_path: Path, kind: str, thing: str) -> None:
    for number, file in enumerate(replaced(tmp_path / "whole", kind, thing)):
        before = set(os.listdir("/proc/self/fd"))
        errors = {}
        for name, deed in every_log.deeds(tmp_path / f"{number}" / "log"):
            if thing == "a FIFO" or name in BRIEF:
                errors[name] = every_log.said(deed)
        assert set(os.listdir("/proc/self/fd")) == before, file
        if file.name != "log":
            assert any(f"{file} is not a regular file, but {thing}" in words for words in errors.values()), (file, errors)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC])
def test_an_open_refuses_what_is_no_file_whatever_it_is_opened_for(tmp_path: Path, thing: str, flags: int) -> None:
    THINGS[thing](tmp_path / "it")
    before = set(os.listdir("/proc/self/fd"))
    with every_log.in_time(), pytest.raises(NotAFile, match=f"it is not a regular file, but {thing}: move it away"):
        Descriptor(tmp_path / "it", flags)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_directory_is_opened_by_callers_that_ask_for_one(tmp_path: Path) -> None:
    disk.flush_directory(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with every_log.in_time(), pytest.raises(NotADirectoryError):
        disk.flush_directory(tmp_path / "fifo")


def test_a_temporary_name_that_is_taken_by_something_else_is_named(tmp_path: Path, thing: str) -> None:
    THINGS[thing](tmp_path / "small.tmp")
    with every_log.in_time(), pytest.raises(NotAFile, match=rf"small\.tmp is not a regular file, but {thing}"):
        disk.replace(tmp_path / "small", b"1", 0o600)


def test_a_path_that_is_no_file_is_no_log(tmp_path: Path, thing: str) -> None:
    path = tmp_path / "log"
    THINGS[thing](path)
    for call in (kvspool.open, kvspool.verify, kvspool.repair, queue.open, queue.verify, queue.repair):
        with every_log.in_time(), pytest.raises(NotALog, match="log"):
            call(path)


def test_a_queue_with_something_else_for_a_chunk_is_reported_and_repaired(tmp_path: Path, thing: str) -> None:
    path = tmp_path / "log"
    every_log.make("queue", path)
    chunk = tmp_path / "log.2"
    chunk.unlink()
    THINGS[thing](chunk)
    with every_log.in_time():
        assert any(f"{chunk} is not a regular file" in words for words in queue.verify(path).problems)
        report = queue.repair(path)
        assert str(tmp_path / "log.2.lost") in report.set_aside
        assert queue.verify(path).is_sound


def test_an_index_that_is_no_file_is_a_hint_that_is_not_there(tmp_path: Path, thing: str) -> None:
    THINGS[thing](tmp_path / "0.idx")
    with every_log.in_time():
        assert index.load(tmp_path / "0.idx", 0) == []


def test_a_salvage_names_what_is_no_file(tmp_path: Path, thing: str) -> None:
    every_log.make("spool", tmp_path / "log")
    control, data = tmp_path / "log" / "spool.ctl", tmp_path / "log" / "spool.dat"
    control.unlink()
    THINGS[thing](control)
    with every_log.in_time():
        report = kvspool.salvage(tmp_path / "log", tmp_path / "saved")
    assert any(f"but {thing}" in words for words in report.damage)
    data.unlink()
    THINGS[thing](data)
    with every_log.in_time(), pytest.raises(Corruption, match=rf"spool\.dat is not a regular file, but {thing}"):
        kvspool.salvage(tmp_path / "log", tmp_path / "again")


def test_an_error_of_it_is_one_of_the_system_too() -> None:
    """Code that treats a file as a hint catches OSError."""
    assert issubclass(NotAFile, OSError) and issubclass(NotAFile, KvspoolError)
