"""`kvspool demo` serves a page, ships all events of its clients, and says what to do next."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

COMMAND = [sys.executable, "-m", "kvspool.cli", "demo", "--no-browser"]


def test_the_demo_runs_until_ctrl_c_and_its_hub_has_all_events(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    with subprocess.Popen([*COMMAND, "--directory", place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        page = demo.stdout.readline().split("page ")[1].strip()
        while demo.stdout.readline() != "Ctrl-C ends the demo\n":
            pass
        assert httpx.get(f"{page.rstrip('/')}/healthz", timeout=60).status_code == 200
        while len(httpx.get(f"{page.rstrip('/')}/api/status", timeout=60).json()["status"]["clients"]) < 3:
            time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        said = demo.stdout.read()
        assert (demo.wait(60), demo.stderr.read()) == (0, "")
    counts = re.findall(r"^(\w+): ([\d,]+) appended, ([\d,]+) at the hub$", said, re.MULTILINE)
    assert [name for name, _, _ in counts] == ["shop", "stock", "website"]
    assert all(appended == stored for _, appended, stored in counts)
    assert "Next:\n  kvspool create events" in said and f"kvspool ls {place}" in said
    assert subprocess.run([*COMMAND, "--directory", place], capture_output=True).returncode == 1  # it exists


def test_the_demo_removes_its_files_by_default(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "--seconds", "0.2"], env={"TMPDIR": str(tmp_path), "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
