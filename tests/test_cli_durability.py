"""`kvspool sync`, and the options that say what is on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvspool
from kvspool.cli import append, main

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.append_many(["one", "two"], durable=True)
        log.append("three")
    return tmp_path / "log"


def test_sync_puts_everything_on_disk_and_says_how_far(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: all records below sequence 3 are on disk\n"
    assert main(["sync", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(path), "synced_sequence": 3}
    with kvspool.open(path) as log:
        assert log.stats().unsynced_records == 0


def test_sync_of_a_poisoned_log_is_5_and_of_nothing_3(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvspool.open(path) as log:
        log._live().control.cast("Q")[50] = 5
    assert main(["sync", str(path)]) == 5
    assert "an earlier flush to disk failed" in capsys.readouterr().err
    assert main(["sync", str(tmp_path / "nothing")]) == 3


def test_read_and_tail_of_what_is_synced(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["read"], ["tail"], ["tail", "-n", "2"], ["tail", "-n", "5", "--follow", "--timeout", "0"]):
        assert main([*command, str(path), "--synced", "--values"]) == 0
        assert capsys.readouterr().out == "one\ntwo\n", command
    assert main(["tail", str(path), "-n", "1", "--values"]) == 0
    assert capsys.readouterr().out == "three\n"


def test_following_what_is_synced_begins_after_what_was_on_disk(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    follow = kvspool.Spool.follow

    def sync_and_follow(log: kvspool.Spool, start: int, **options: object) -> object:
        asked.append(start)
        log.sync()
        return follow(log, start, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kvspool.Spool, "follow", sync_and_follow)
    assert main(["tail", str(path), "-n", "0", "--follow", "--timeout", "0", "--synced", "--values"]) == 0
    assert (asked, capsys.readouterr().out) == ([2], "three\n")


def test_durable_appends_are_on_disk(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[bool] = []

    class Log:
        def append_many(self, values: list[str], *, keys: list[bytes | None], type: int, durable: bool) -> range:
            calls.append(durable)
            return range(len(values))

    batch = SimpleNamespace(lines=[b"a", b"b"], first=1)
    for durable in (True, False):
        arguments = SimpleNamespace(json_lines=False, key=None, key_field=None, type=0, durable=durable)
        append.append_batch(Log(), batch, arguments)  # type: ignore[arg-type]
    assert calls == [True, False]


@pytest.mark.parametrize("option", ["--durable", "--sync"])
def test_append_says_that_all_is_on_disk(
    path: Path, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_bytes(b"four\nfive\n")
    with open(tmp_path / "lines", encoding="utf-8") as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert main(["append", str(path), option]) == 0
    assert capsys.readouterr().err == "appended 2 records: sequences 3 to 4, on disk\n"
    with kvspool.open(path) as log:
        assert log.stats().unsynced_records == 0


def test_create_with_a_durability(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["create", str(tmp_path / "a"), "--durability", "disk", "--capacity", "4096", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["durability"] == "disk"
    assert main(["create", str(tmp_path / "b"), "--durability", "os", "--sync-interval", "0.5", "--capacity", "4096"]) == 0
    capsys.readouterr()
    assert main(["stats", str(tmp_path / "b"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["durability"], said["sync_interval"], said["unsynced_records"], said["unsynced_bytes"]) == ("os", 0.5, 0, 0)
    assert main(["create", str(tmp_path / "c"), "--sync-interval", "1"]) == 2
