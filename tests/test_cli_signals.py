"""Commands that wait end at Ctrl-C, whichever of their threads receives the signal: Python calls its handlers in the main thread only."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from thread_signals import signal_thread, takers_of_signals

import kvspool

LOOKS = 20
# The arguments of a command that waits, and its exit code after the signal. "log" has one record.
WAITING: dict[str, tuple[list[str], int]] = {
    "a writer with a thread that flushes": (["append", "log"], 130),
    "a follower whose output is a pipe": (["tail", "log", "-f"], 130),
    "a taker of a queue whose output is a pipe": (["queue", "get", "queue", "--follow"], 130),
    "workers": (["work", "log", "list", "--", "true"], 130),
    "a shipper": (["ship", "log", "grpc://127.0.0.1:9", "--client", "me"], 0),
    "a pipeline without Spark": (["table", "append", "log", "table", "--codec", "raw"], 0),
    "the demo": (["demo", "--no-browser"], 0),
}


@pytest.mark.parametrize("is_main", [True, False], ids=["main thread", "another thread"])
@pytest.mark.parametrize("name", WAITING)
def test_a_waiting_command_ends_whichever_thread_receives_the_signal(tmp_path: Path, name: str, is_main: bool) -> None:
    words, code = WAITING[name]
    with kvspool.create(tmp_path / "log", capacity="1MiB", durability="os") as log:
        log.append(b"one")
    command = [sys.executable, "-m", "kvspool.cli", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(b"two\n")
            process.stdin.flush()
            wait_until(lambda: waits(process.pid, threads=1 if is_main else 2))
            signal_thread(process.pid, signal.SIGINT, is_main=is_main)
            _, error = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == code and b"Traceback" not in error, error.decode()


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def waits(pid: int, *, threads: int) -> bool:
    """Return whether the process catches SIGINT, has so many threads that take signals, and its main thread sleeps at each look."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    if not int(caught, 16) >> (signal.SIGINT - 1) & 1 or len(takers_of_signals(pid)) < threads:
        return False
    return all(_sleeps_next(pid) for _ in range(LOOKS))


def _sleeps_next(pid: int) -> bool:
    time.sleep(0.02)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
