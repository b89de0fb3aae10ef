"""A member that is killed at any system call or opcode, while shards are handed over: each record is handled, in order, and again only
after its commit was cut off.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaigns import campaign
from children import Died, start
from endings import Ending
from faults import FailingPort
from schedules import some
from subjects import Subject

import kvspool
from kvspool import system

Fuse = campaign("tasks").Fuse
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
RECORDS = 24
NOTE = struct.Struct("<cBQ")  # "h": handled, "c": committed up to; shard; sequence


def number_of(key: Any) -> int:
    return key[1] if isinstance(key, tuple) else key


def live(member: Any, subject: Subject, note: Callable[[bytes, int, int], None], *, limit: int) -> None:
    """Handle up to `limit` records and commit each; note both."""
    for record in member.follow(timeout=0.05, limit=limit):
        note(b"h", number_of(subject.shard_of(record)), record.sequence)
        for key, at in member.commit().items():
            note(b"c", number_of(key), at)


def check(notes: list[tuple[bytes, int, int]], after: list[tuple[bytes, int, int]], subject: Subject) -> None:
    """Compare the notes of a killed member with those of the others, made before and after its end."""
    with subject.open() as log:
        extent = log.extent()
    ends = {number_of(key): end for key, (_, end) in extent.items()} if isinstance(extent, dict) else {0: extent[1]}
    for shard, end in ends.items():
        theirs = [sequence for name, number, sequence in notes if (name, number) == (b"h", shard)]
        ours = [sequence for name, number, sequence in after if (name, number) == (b"h", shard)]
        committed = max((sequence for name, number, sequence in notes if (name, number) == (b"c", shard)), default=0)
        assert theirs == sorted(set(theirs))
        assert ours == sorted(set(ours))
        assert set(theirs) | set(ours) == set(range(end)), f"shard {shard}: {theirs} and {ours} of {end} records"
        again = set(theirs) & set(ours)
        assert all(sequence >= committed for sequence in again), f"shard {shard}: {again} again, committed up to {committed}"
        assert len(again) <= 1


def killed_at(subject: Subject, arm: Callable[[], Any]) -> bool:
    """Let a member join next to ours, and be killed by `arm`; return whether it was. Ours handles the rest."""
    reads, writes = os.pipe()

    def work() -> None:
        with arm(), subject.open() as log, log.group("g") as member:
            live(member, subject, lambda name, shard, at: os.write(writes, NOTE.pack(name, shard, at)) and None, limit=8)

    ours: list[tuple[bytes, int, int]] = []
    with subject.open() as log, log.group("g") as member:
        member.attend()
        wait = start(work)
        os.close(writes)
        is_killed = None
        for _ in range(200):
            live(member, subject, lambda *words: ours.append(words), limit=4)
            member.commit()
            if is_killed is None and _has_ended(wait.pid):
                try:
                    wait()
                    is_killed = False
                except Died as death:
                    assert death.signal == signal.SIGKILL
                    is_killed = True
            elif is_killed is not None and member.lag().records == 0 and len(member.assigned) == subject.shards:
                break
        else:
            raise AssertionError("the other member does not end")
    with open(reads, "rb") as pipe:
        check(list(NOTE.iter_unpack(pipe.read())), ours, subject)
    assert is_killed is not None
    return is_killed


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.parametrize("kind", ["kvj", "set", "hub"])
@pytest.mark.parametrize("place", ["call", "opcode"])
def test_a_member_that_is_killed_at_any_place_loses_no_record_and_no_order(tmp_path: Path, kind: str, place: str) -> None:
    kills = 0
    for nth in some(range(1, 4000), 37) if place == "call" else some(range(1, 200_000), 3989):
        subject = Subject(tmp_path / f"log{nth}", kind)
        subject.append(RECORDS)
        arm = (lambda nth=nth: system.replaced(Ending(nth, signal.SIGKILL))) if place == "call" else (lambda nth=nth: Fuse(nth))
        if not killed_at(subject, arm):
            break
        kills += 1
    assert kills > 3


@pytest.mark.parametrize("kind", ["spool", "hub"])
def test_a_full_disk_at_any_system_call_loses_no_record_and_no_order(tmp_path: Path, kind: str) -> None:
    """From some call on the disk is full. The member ends with a typed error or the system's, and another one handles the rest."""
    for nth in some(range(1, 2000), 31):
        subject = Subject(tmp_path / f"log{nth}", kind)
        subject.append(RECORDS)
        theirs: list[tuple[bytes, int, int]] = []
        ours: list[tuple[bytes, int, int]] = []
        only = ("write", "allocate", "flush_data", "flush", "make_directory", "rename", "rename_new", "open")
        with system.replaced(FailingPort(nth, errno.ENOSPC, only, every=True)) as port:
            try:
                with subject.open() as log, log.group("g") as member:
                    live(member, subject, lambda *words: theirs.append(words), limit=8)  # noqa: B023
            except (OSError, kvspool.KvspoolError):
                pass
        with subject.open() as log, log.group("g") as member:
            live(member, subject, lambda *words: ours.append(words), limit=1000)  # noqa: B023
        check(theirs, ours, subject)
        if not port.failed:
            return
    pytest.fail("it has too many calls")
