"""Signals for one thread of another process. The kernel may choose any thread that doesn't block a signal for one that `kill` sends."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

TGKILL = {"x86_64": 234, "aarch64": 131}  # Linux: the call that signals one thread of another process


def signal_thread(pid: int, number: int, *, is_main: bool) -> None:
    """Send a signal to the main thread of a process, or to another one that takes signals. Raises StopIteration without one."""
    call = TGKILL.get(os.uname().machine)
    if call is None:
        pytest.skip("the number of tgkill isn't known for this machine")
    thread = pid if is_main else next(one for one in takers_of_signals(pid) if one != pid)
    assert ctypes.CDLL(None, use_errno=True).syscall(call, pid, thread, int(number)) == 0


def takers_of_signals(pid: int) -> list[int]:
    """Return the threads of a process that block no signal; those of libraries block all."""
    return [one for one in map(int, os.listdir(f"/proc/{pid}/task")) if _blocks_none(pid, one)]


def _blocks_none(pid: int, thread: int) -> bool:
    blocked = Path(f"/proc/{pid}/task/{thread}/status").read_text().partition("SigBlk:")[2].split()[0]
    return not int(blocked, 16)
