"""`kvspool sync`, and the options that say what is on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import Run

import kvspool
from kvspool.cli import append

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.append_many(["one", "two"], durable=True)
        log.append("three")
    return tmp_path / "log"


def test_sync_puts_everything_on_disk_and_says_how_far(path: Path, run: Run) -> None:
    assert run("sync", path).out == f"{path}: all records below sequence 3 are on disk\n"
    assert run("sync", path, "--json").object == {"path": str(path), "synced_sequence": 3}
    with kvspool.open(path) as log:
        assert log.stats().unsynced_records == 0


def test_sync_of_a_poisoned_log_is_5(path: Path, run: Run) -> None:
    with kvspool.open(path) as log:
        log._live().control.cast("Q")[50] = 5
    assert "an earlier flush to disk failed" in run("sync", path, code=5).err


def test_read_and_tail_of_what_is_synced(path: Path, run: Run) -> None:
    for command in (["read"], ["tail"], ["tail", "-n", "2"], ["tail", "-n", "5", "--follow", "--timeout", "0"]):
        assert run(*command, path, "--synced", "--values").out == "one\ntwo\n", command
    assert run("tail", path, "-n", "1", "--values").out == "three\n"


def test_following_what_is_synced_begins_after_what_was_on_disk(path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    follow = kvspool.Spool.follow

    def sync_and_follow(log: kvspool.Spool, start: int, **options: object) -> object:
        asked.append(start)
        log.sync()
        return follow(log, start, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kvspool.Spool, "follow", sync_and_follow)
    assert (asked, run("tail", path, "-n", "0", "--follow", "--timeout", "0", "--synced", "--values").out) == ([2], "three\n")


def test_durable_appends_are_on_disk() -> None:
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
def test_append_says_that_all_is_on_disk(path: Path, option: str, run: Run) -> None:
    assert run("append", path, option, given=b"four\nfive\n").err == "appended 2 records: sequences 3 to 4, on disk\n"
    with kvspool.open(path) as log:
        assert log.stats().unsynced_records == 0


def test_create_with_a_durability(tmp_path: Path, run: Run) -> None:
    assert run("create", tmp_path / "a", "--durability", "disk", "--capacity", "4096", "--json").object["durability"] == "disk"
    run("create", tmp_path / "b", "--durability", "os", "--sync-interval", "0.5", "--capacity", "4096")
    said = run("stats", tmp_path / "b", "--json").object
    assert (said["durability"], said["sync_interval"], said["unsynced_records"], said["unsynced_bytes"]) == ("os", 0.5, 0, 0)
