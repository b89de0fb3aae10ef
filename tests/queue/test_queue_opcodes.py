"""A process killed at every opcode of an operation (a sample of them, evenly): it is done, or not, or a part of it in order is."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from schedules import ALL

from kvspool import errors
from kvspool.queue import ChunkQueue

CRASHES = 1000 if ALL else 20  # of each kind
BEFORE = [b"%020d" % at for at in range(5)]  # three chunks of 64 bytes, the last one half full
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def suffixes(entries: list[bytes]) -> list[list[bytes]]:
    return [entries[at:] for at in range(len(entries) + 1)]


def put(one: ChunkQueue) -> None:
    one.put(b"new")


def put_in_a_new_chunk(one: ChunkQueue) -> None:
    one.put(b"n" * 50)


def put_batch(one: ChunkQueue) -> None:
    one.put_many([b"%025d" % at for at in range(5)])


def get(one: ChunkQueue) -> None:
    one.get()


def get_batch(one: ChunkQueue) -> None:
    one.get_many(4)


def get_if(one: ChunkQueue) -> None:
    one.get_if(lambda entry: True)


def clear(one: ChunkQueue) -> None:
    one.clear()


def empty_and_close(one: ChunkQueue) -> None:
    one.get_many(5)
    one.close()


OPERATIONS: list[tuple[Callable[[ChunkQueue], None], list[list[bytes]]]] = [
    (put, [BEFORE, [*BEFORE, b"new"]]),
    (put_in_a_new_chunk, [BEFORE, [*BEFORE, b"n" * 50]]),
    (put_batch, [BEFORE + [b"%025d" % at for at in range(until)] for until in range(6)]),
    (get, suffixes(BEFORE)[:2]),
    (get_batch, suffixes(BEFORE)[:5]),
    (get_if, suffixes(BEFORE)[:2]),
    (clear, suffixes(BEFORE)),
    (empty_and_close, suffixes(BEFORE)),
]


def crash(path: Path, operation: Callable[[ChunkQueue], None], last: int, durability: str) -> tuple[bool, int]:
    """Run the operation in a child, up to opcode `last` of the package (-1: all): whether it was killed, how many opcodes it ran."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            one = ChunkQueue.open(path, durability=durability)  # type: ignore[arg-type]
            seen = 0

            def trace(frame: FrameType, event: str, arg: object) -> Any:
                nonlocal seen
                if "/kvspool/" not in frame.f_code.co_filename:
                    return None
                frame.f_trace_opcodes = True
                if event == "opcode":
                    seen += 1
                    if seen == last:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace

            sys._getframe().f_trace_opcodes = True  # of any frame: otherwise Python 3.12 doesn't look for those that ask later
            sys.settrace(trace)
            operation(one)
            sys.settrace(None)
            os.write(write_end, struct.pack("<Q", seen))
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        said = pipe.read()
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    assert killed or said, "it raised"
    return killed, struct.unpack("<Q", said)[0] if said else 0


CASES = [
    *((operation, allowed, "memory") for operation, allowed in OPERATIONS),
    # The level adds flushes, and these two have all of them.
    *((operation, allowed, "disk") for operation, allowed in OPERATIONS if operation in (put_in_a_new_chunk, get_batch)),
]


@pytest.mark.parametrize(
    ("operation", "allowed", "durability"), CASES, ids=[f"{operation.__name__} {durability}" for operation, _, durability in CASES]
)
def test_killed_at_any_opcode_it_loses_nothing_and_stops_no_other_process(
    interpreted: None, tmp_path: Path, operation: Callable[[ChunkQueue], None], allowed: list[list[bytes]], durability: str
) -> None:
    template = tmp_path / "template"
    template.mkdir()
    with ChunkQueue.create(template / "queue", chunk_bytes=64) as one:
        one.put_many(BEFORE)
    found: list[list[bytes]] = []
    kills = step = 0
    for last in count():
        place = tmp_path / "place"
        shutil.copytree(template, place)
        killed, opcodes = crash(place / "queue", operation, -1 if last == 0 else 1 + (last - 1) * step, durability)
        if last == 0:
            assert not killed
            step = max(1, opcodes // CRASHES)
        kills += killed
        try:
            one = ChunkQueue.open(place / "queue", timeout=0)
        except errors.LogNotFound:
            assert operation is empty_and_close
            assert os.listdir(place) == []
            found.append([])
        else:
            found.append(list(one))
            assert found[-1] in allowed
            one.put(b"x" * 50)
            assert list(one) == [*found[-1], b"x" * 50]
            assert [one.get() for _ in range(one.qsize())] == [*found[-1], b"x" * 50]
            one.close()
        left = [name for name in os.listdir(place) if not killed or name == "queue"]
        assert left == [], "an emptied queue removes its files, but for set-aside ones"
        shutil.rmtree(place)
        if last and not killed:
            break
    assert kills >= 15
    assert allowed[0] in found
    assert allowed[-1] in found
