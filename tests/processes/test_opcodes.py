"""A writer killed at every bytecode of an append: what it acknowledged is there, and the next writer goes on."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvspool
from kvspool import Gap, Spool
from kvspool.spool import format

STORED = struct.Struct("<QQ")
CRASHES = 300  # of each kind, evenly over all opcodes
SINGLY = mmap.mmap(-1, 1)  # shared with the children: how many records of a burst were acknowledged


def run_to_opcode(operation: Callable[[], range], last: int, pipe: int) -> None:
    """In a child: run the operation, report what it returned, and die before opcode `last` of it (-1: count them and report).

    Counted are the opcodes of the package, not those of the libraries that it calls.
    """
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

    sys.settrace(trace)
    try:
        got = operation()
    finally:
        sys.settrace(None)
    os.write(pipe, STORED.pack(got.start, got.stop))
    os.write(pipe, STORED.pack(seen, 0))


def crash(operation: Callable[[], range], last: int) -> tuple[bool, range | None, int]:
    """Run the operation in a child up to opcode `last`: whether it was killed, what it acknowledged, how many opcodes it ran."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            run_to_opcode(operation, last, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        said = pipe.read()
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    acknowledged = range(*STORED.unpack_from(said)) if said else None
    return killed, acknowledged, STORED.unpack_from(said, STORED.size)[0] if len(said) > STORED.size else 0


def append_one(log: Spool) -> range:
    sequence = log.append(b"one" * 40, key=b"key")
    return range(sequence, sequence + 1)


def append_batch(log: Spool) -> range:
    # A third of the ring: it is published in pieces, makes room, and runs over the end of the ring.
    return log.append_many([b"%d" % at + bytes(120) for at in range(9)])


def append_burst(log: Spool) -> range:
    with log.writer() as w:
        for at in range(9):
            sequence = w.append(b"%d" % at + bytes(120))
            SINGLY[0] = at + 1
    return range(sequence - 8, sequence + 1)


class Files:
    """The bytes of a log's files as they were, to be put back in place under every mapping."""

    def __init__(self, path: Path) -> None:
        self.files = {path / name: (path / name).read_bytes() for name in (format.CONTROL_FILE, format.DATA_FILE)}

    def put_back(self) -> None:
        for path, content in self.files.items():
            with open(path, "r+b") as file:
                file.write(content)


@pytest.mark.parametrize(("operation", "batch"), [(append_one, 1), (append_batch, 9), (append_burst, 9)])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_writer_killed_at_any_opcode_loses_nothing_acknowledged_and_stops_nobody(
    interpreted: None, tmp_path: Path, operation: Callable[[Spool], range], batch: int, is_open: bool
) -> None:
    path = tmp_path / "log"
    kvspool.create(path, capacity=4096).close()
    with kvspool.open(path) as log, kvspool.open(path) as used:
        used.append_many([b"before %d" % at + bytes(60) for at in range(50)])
        expected = log.stats().next_sequence
        files = Files(path)

        def run() -> range:
            if is_open:
                return operation(used)
            with kvspool.open(path) as fresh:
                return operation(fresh)

        killed, acknowledged, opcodes = crash(run, -1)
        assert (killed, acknowledged) == (False, range(expected, expected + batch))
        assert log.stats().first_sequence > 10, "the operation makes room"
        kills = recovered_without_answer = 0
        step = max(1, opcodes // CRASHES)
        # Up to the end, wherever it is this time: a new second or the collector of garbage adds opcodes.
        for last in count(1, step):
            files.put_back()
            SINGLY[0] = 0
            killed, acknowledged, _ = crash(run, last)
            if not killed:
                assert acknowledged == range(expected, expected + batch)
                break
            assert acknowledged is None
            kills += 1

            with kvspool.open(path, timeout=0) as after:
                end = after.stats().next_sequence
                assert expected + SINGLY[0] <= end <= expected + batch
                recovered_without_answer += end > expected
                assert after.append(b"after") == end
                items = list(after.read(0, on_gap="yield"))
            account = 0
            for item in items:
                first, until = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
                assert first == account
                account = until + 1
                if isinstance(item, Gap):
                    assert item.reason == "overrun"
                elif item.sequence < expected:
                    assert item.value == b"before %d" % item.sequence + bytes(60)
                elif item.sequence < end:
                    assert item.value == (b"one" * 40 if batch == 1 else b"%d" % (item.sequence - expected) + bytes(120))
            assert account == end + 1
            assert items[-1].value == b"after"  # type: ignore[union-attr]
            assert list(log) == items[1:], "a handle from before the crash sees the same"
    assert kills >= CRASHES
    assert recovered_without_answer > 0, "no kill hit the time between the publication and the answer"
