"""The holder of a lock: four words that it stores, so that waiters can report it.

A hint. The kernel decides who holds the lock; the words name its last owner. A process id alone would not suffice: it means another process
in another container, after a restart of the machine, or once it is reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvspool import system


def ours() -> tuple[int, int, int, int]:
    """Return the words of this process: id, start in clock ticks since boot, the boot, the pid namespace."""
    pid = system.port.process_id()
    boot = int.from_bytes(system.port.boot_id()[:8], "little")
    return pid, system.port.process_start(pid), boot, system.port.pid_namespace()


def is_gone(words: Sequence[int]) -> bool:
    """Return whether the holder is a process of this machine and container that has ended, as far as that can be known here."""
    pid, start, boot, namespace = words
    is_here = boot == int.from_bytes(system.port.boot_id()[:8], "little") and namespace == system.port.pid_namespace()
    return is_here and system.port.process_start(pid) != start


def describe(words: Sequence[int]) -> str:
    """Describe the holder in readable words, as far as it can be known here."""
    pid, start, boot, namespace = words
    if boot != int.from_bytes(system.port.boot_id()[:8], "little") or namespace != system.port.pid_namespace():
        return f"process {pid} of another container"
    if is_gone(words):
        return f"a process that is no longer process {pid}, which took it last"
    return f"process {pid} ({system.port.process_state(pid)})"


def having_open(paths: Iterable[Path]) -> list[int]:
    """Return the ids of the processes that have one of these files open, in order, as far as this user may see them."""
    found = (system.port.look_up(path) for path in paths)
    return system.port.processes_with({(there.st_dev, there.st_ino) for there in found if there is not None})


def described(pids: Sequence[int]) -> str:
    """Describe processes in readable words; nothing if there are none."""
    ours = system.port.process_id()
    words = ["this process" if pid == ours else f"process {pid} ({system.port.process_state(pid)})" for pid in pids]
    return ", ".join(words)
