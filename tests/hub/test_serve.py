"""`kvspool hub serve` and signals."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes_of_a_hub import ServeCommand
from thread_signals import signal_thread

from hub import RemoteHub


@pytest.mark.parametrize("is_main", [True, False], ids=["main thread", "another thread"])
def test_the_hub_ends_orderly_whichever_thread_receives_its_signal(tmp_path: Path, is_main: bool) -> None:
    with ServeCommand(tmp_path / "root", "--anonymous") as hub:
        with RemoteHub(hub.location) as remote:
            remote.clients()
        signal_thread(hub.process.pid, signal.SIGTERM, is_main=is_main)
        assert hub.process.wait(30) == 0
