"""Two handles of one log in one process, as two processes would be: one is stopped before an opcode, the other does all its work.

Only the interpreted twin has opcodes to stop at. Their locks are of different open file descriptions, so they exclude each other. A handle
would wait forever for a lock of the stopped one, so the handles have a timeout of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from crash_states import traced

from kvspool import Gap, Spool
from kvspool.spool import format

SOURCES = ("/kvspool/",)


def run(first: Callable[[], Any], second: Callable[[], Any], stops: tuple[int, ...]) -> tuple[Any, list[Any], int]:
    """Run `first`, and before each opcode in `stops` of it all of `second`; return both results and how many opcodes there were.

    Counted are opcodes of the package alone.
    """
    seen = 0
    results: list[Any] = []

    def on_opcode(frame: FrameType) -> None:
        nonlocal seen
        seen += 1
        if seen in stops:
            results.append(second())  # untraced, as is all that happens here

    result = traced(first, on_opcode, SOURCES)
    return result, results, seen


class Files:
    """The bytes of a log's files as they were, to be put back in place under every mapping."""

    def __init__(self, path: Path) -> None:
        self.files = {path / name: (path / name).read_bytes() for name in (format.CONTROL_FILE, format.DATA_FILE)}

    def put_back(self) -> None:
        for path, content in self.files.items():
            with open(path, "r+b") as file:
                file.write(content)


def account(log: Spool, start: int = 0, field: str = "value") -> dict[int, Any]:
    """Return the values of all records that are there by their sequences, having checked that every sequence is one or is in a Gap."""
    found: dict[int, Any] = {}
    expected = start
    for item in log.read(start, on_gap="yield"):
        first, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
        assert first == expected, f"{first} came where {expected} was due"
        expected = last + 1
        if isinstance(item, Gap):
            assert item.reason == "overrun", item
        else:
            found[item.sequence] = getattr(item, field)
    assert expected == log.stats().next_sequence
    return found
