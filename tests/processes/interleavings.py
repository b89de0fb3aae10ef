"""Two handles of one log in one process, as two processes would be: one is stopped before an opcode, the other does all its work.

Only the interpreted twin has opcodes to stop at. Their locks are of different open file descriptions, so they exclude each other; who
waits for a lock that is held by the one that was stopped would wait for ever, so the handles have a timeout of 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvspool import Gap, Spool

SOURCES = ("/kvspool/",)


def run(first: Callable[[], Any], second: Callable[[], Any], stops: tuple[int, ...]) -> tuple[Any, list[Any], int]:
    """Run `first`, and before each opcode in `stops` of it all of `second`; return both results and how many opcodes there were.

    Counted are opcodes of the package alone.
    """
    seen = 0
    results: list[Any] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if not any(source in frame.f_code.co_filename for source in SOURCES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen in stops:
                sys.settrace(None)
                results.append(second())
                sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        result = first()
    finally:
        sys.settrace(None)
    return result, results, seen


def account(log: Spool, start: int = 0) -> dict[int, bytes]:
    """Return the values of all records that are there by their sequences, having checked that every sequence is one or lies in a Gap."""
    found: dict[int, bytes] = {}
    expected = start
    for item in log.read(start, on_gap="yield"):
        first, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
        assert first == expected, f"{first} came where {expected} was due"
        expected = last + 1
        if isinstance(item, Gap):
            assert item.reason == "overrun", item
        else:
            found[item.sequence] = item.value
    assert expected == log.stats().next_sequence
    return found
