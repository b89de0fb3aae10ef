"""`kvspool readers`, and the policy options of `kvspool create`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run

import kvspool
from kvspool.spool import format

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.append_many([b"x"] * 1500)
        log.reader("billing", start=500).close()
        log.reader("märz", start="latest").close()
    return tmp_path / "log"


def test_the_readers_of_a_log(path: Path, run: Run) -> None:
    with kvspool.open(path) as log, log.reader("märz"):
        shown = run("readers", path).out
    billing, other = (line for line in shown.splitlines() if "billing" in line or "märz" in line)
    assert all(word in billing for word in ("500", "1,000", "39.1 KiB", "UTC", "closed"))
    assert "1,500" in other and "open" in other


def test_the_readers_as_json(path: Path, run: Run) -> None:
    billing, other = run("readers", path, "--json").objects
    assert billing["name"] == "billing" and billing["sequence"] == 500 and billing["lag"]["records"] == 1000
    assert other["name"] == "märz" and other["lag"] == {"records": 0, "bytes": 0, "seconds": 0.0}
    assert not billing["open"] and not billing["expired"] and not billing["damaged"]


def test_deleting(path: Path, run: Run) -> None:
    assert "billing" in run("readers", path, "--delete", "billing").out
    run("readers", path, "--delete", "billing", code=2)
    with kvspool.open(path) as log, log.reader("märz"):
        assert "is open in process" in run("readers", path, "--delete", "märz", code=6).err
    run("readers", path, "--delete-slot", "1")
    with kvspool.open(path) as log:
        assert log.readers() == []


def test_a_damaged_name_does_no_harm(path: Path, run: Run) -> None:
    with open(path / format.CONTROL_FILE, "r+b") as file:
        file.seek(format.SLOTS_AT + 64)
        file.write(b"\x1b]0;owned\x07\xff")
    shown = run("readers", path).out
    assert "damaged" in shown and "\x1b" not in shown and "\x07" not in shown
    assert json.loads(run("readers", path, "--json").out.splitlines()[0])["lag"] is None


@pytest.mark.parametrize("policy", ["block", "raise"])
def test_create_with_a_policy(tmp_path: Path, policy: str, run: Run) -> None:
    stats = run("create", tmp_path / "log", "--policy", policy, "--reader-expiry", "60", "--json").object
    assert (stats["policy"], stats["reader_expiry"]) == (policy, 60.0)


def test_a_full_log_has_an_exit_code(tmp_path: Path, run: Run) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy="raise") as log:
        log.reader("r").close()
        log.append_many([bytes(800)] * 4)
    assert "'r' has 4 pending records" in run("append", tmp_path / "log", code=8, given=bytes(800)).err
