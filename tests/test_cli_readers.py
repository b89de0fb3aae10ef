"""`kvspool readers`, and the policy options of `kvspool create`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvspool
from kvspool.cli import main
from kvspool.spool import format

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.append_many([b"x"] * 1500)
        log.reader("billing", start=500).close()
        log.reader("märz", start="latest").close()
    return tmp_path / "log"


def test_the_readers_of_a_log(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvspool.open(path) as log, log.reader("märz"):
        assert main(["readers", str(path)]) == 0
    billing, other = (line for line in capsys.readouterr().out.splitlines() if "billing" in line or "märz" in line)
    assert all(word in billing for word in ("500", "1,000", "39.1 KiB", "UTC", "closed"))
    assert "1,500" in other and "open" in other


def test_the_readers_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["readers", str(path), "--json"]) == 0
    billing, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert billing["name"] == "billing" and billing["sequence"] == 500 and billing["lag"]["records"] == 1000
    assert other["name"] == "märz" and other["lag"] == {"records": 0, "bytes": 0, "seconds": 0.0}
    assert not billing["open"] and not billing["expired"] and not billing["damaged"]


def test_deleting(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["readers", str(path), "--delete", "billing"]) == 0
    assert "billing" in capsys.readouterr().out
    assert main(["readers", str(path), "--delete", "billing"]) == 2
    assert main(["readers", str(path), "--delete", ""]) == 2
    with kvspool.open(path) as log, log.reader("märz"):
        capsys.readouterr()
        assert main(["readers", str(path), "--delete", "märz"]) == 6
        assert "is open in process" in capsys.readouterr().err
    assert main(["readers", str(path), "--delete-slot", "1"]) == 0
    with kvspool.open(path) as log:
        assert log.readers() == []


def test_a_damaged_name_does_no_harm(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(path / format.CONTROL_FILE, "r+b") as file:
        file.seek(format.SLOTS_AT + 64)
        file.write(b"\x1b]0;owned\x07\xff")
    assert main(["readers", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "damaged" in shown and "\x1b" not in shown and "\x07" not in shown
    assert main(["readers", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["lag"] is None


@pytest.mark.parametrize("policy", ["block", "raise"])
def test_create_with_a_policy(tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["create", str(tmp_path / "log"), "--policy", policy, "--reader-expiry", "60", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert (stats["policy"], stats["reader_expiry"]) == (policy, 60.0)


@pytest.mark.parametrize("arguments", [["--policy", "drop"], ["--reader-expiry", "5"], ["--policy", "raise", "--reader-expiry", "0"]])
def test_create_refuses(tmp_path: Path, arguments: list[str]) -> None:
    assert main(["create", str(tmp_path / "log"), *arguments]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_log_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy="raise") as log:
        log.reader("r").close()
        log.append_many([bytes(800)] * 4)
    (tmp_path / "input").write_bytes(bytes(800))
    with open(tmp_path / "input", encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", file)
        assert main(["append", str(tmp_path / "log")]) == 8
    assert "'r' has 4 pending records" in capsys.readouterr().err
