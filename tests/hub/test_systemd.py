"""The units of systemd in docs/systemd: what they run is what the commands take, and systemd understands them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from commands import Run

UNITS = Path(__file__).parents[2] / "docs" / "systemd"
NAMES = sorted(path.name for path in UNITS.glob("*.service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("name", NAMES)
def test_systemd_understands_the_unit(name: str) -> None:
    done = subprocess.run(["systemd-analyze", "verify", str(UNITS / name)], capture_output=True, text=True, timeout=60)
    words = [line for line in done.stderr.splitlines() if name.partition(".")[0].rstrip("@") in line]
    assert (done.returncode, words) == (0, [])


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_runs_a_command_that_there_is(name: str, run: Run) -> None:

    text = (UNITS / name).read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    words = line.partition("kvspool ")[2].split()
    command = words[:2] if words[0] in ("hub", "pipeline") else words[:1]
    out = run(*command, "--help").out
    assert all(word in out for word in words if word.startswith("--"))


def test_there_are_units_of_all_services() -> None:
    assert NAMES == ["kvspool-hub.service", "kvspool-mirror@.service", "kvspool-pipeline@.service", "kvspool-ship@.service"]


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_bounds_its_tasks_and_has_the_same_sandbox_as_the_others(name: str) -> None:
    lines = (UNITS / name).read_text().splitlines()
    assert any(line.startswith("TasksMax=") for line in lines)
    sandbox = lines[lines.index("NoNewPrivileges=yes") :]
    first = (UNITS / NAMES[0]).read_text().splitlines()
    assert sandbox == first[first.index("NoNewPrivileges=yes") :]
