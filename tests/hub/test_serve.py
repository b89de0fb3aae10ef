"""`kvspool hub serve` and signals."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest
from processes_of_a_hub import ServeCommand

from hub import RemoteHub

TGKILL = {"x86_64": 234, "aarch64": 131}  # Linux: the call that signals one thread of another process


def takes_signals(thread: int) -> bool:
    """Return whether a thread blocks no signal; those of libraries block all."""
    blocked = Path(f"/proc/{thread}/status").read_text().partition("SigBlk:")[2].split()[0]
    return not int(blocked, 16)


@pytest.mark.parametrize("is_first", [True, False], ids=["main thread", "another thread"])
def test_the_hub_ends_orderly_whichever_thread_receives_its_signal(tmp_path: Path, is_first: bool) -> None:
    call = TGKILL.get(os.uname().machine)
    if call is None:
        pytest.skip("the number of tgkill isn't known for this machine")
    with ServeCommand(tmp_path / "root", "--anonymous") as hub:
        with RemoteHub(hub.location) as remote:
            remote.clients()
        pid = hub.process.pid
        thread = pid if is_first else next(one for one in map(int, os.listdir(f"/proc/{pid}/task")) if one != pid and takes_signals(one))
        assert ctypes.CDLL(None, use_errno=True).syscall(call, pid, thread, int(signal.SIGTERM)) == 0
        assert hub.process.wait(30) == 0
