"""The process that ends the commands of a `kvspool work` that was killed: otherwise they would run next to those of the next worker.

It reads "+PID" for each command that has begun, and "-PID" for each one that has ended, a line each. At the end of its input, which the
kernel closes with `kvspool work`, it kills the process groups of the commands that still run. A command whose start was not noted yet is
not killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from kvspool.system.handles import Handle

# A program without imports of kvspool, so that it starts quickly. A descriptor identifies each command: its id may be reused.
PROGRAM = """
import os, select, signal, sys
found = {}
for line in sys.stdin:
    pid = int(line[1:])
    try:
        if line[0] == "+":
            found[pid] = os.pidfd_open(pid)
        else:
            os.close(found.pop(pid))
    except (OSError, KeyError):
        pass
for pid, fd in found.items():
    if not select.select([fd], [], [], 0)[0]:
        os.killpg(pid, signal.SIGKILL)
"""


class CommandKeeper(Handle):
    """The process, as seen from `kvspool work`. Threads may share it. If it is killed itself, commands may outlive `kvspool work`."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", PROGRAM]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C must not end it

    def began(self, pid: int) -> None:
        """Note a command that leads a process group."""
        self._note(b"+%d\n" % pid)

    def ended(self, pid: int) -> None:
        """Note the end of a command."""
        self._note(b"-%d\n" % pid)

    def _note(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            os.write(self._process.stdin.fileno(), line)  # a short write to a pipe is one step

    def close(self) -> None:
        """End the process, after the commands."""
        self._process.communicate()
