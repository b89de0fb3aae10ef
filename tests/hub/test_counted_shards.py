"""Shards are counted by the names, sizes and pages of their files: the result is that of an open journal, and no segment is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvspool
from hub.protocol.reading import Generation
from hub.root import generations
from hub.root.stored_shard import CountedShard
from kvspool import system
from kvspool.journal import Journal

SEGMENT = 1000  # bytes


def empty(log: Journal) -> None:
    """Append nothing."""


def few(log: Journal) -> None:
    log.append_many([b"x" * 50] * 3, timestamp=5)


def several_segments(log: Journal) -> None:
    log.append_many([b"x" * 50] * 60)


def gap(log: Journal) -> None:
    few(log)
    log.append_batch(log.prepare([b"y"] * 2), at=100)


def trimmed(log: Journal) -> None:
    several_segments(log)
    log.trim(before=40)


def archived(log: Journal) -> None:
    pytest.importorskip("zstandard")
    several_segments(log)
    log.archive()


def synced(log: Journal) -> None:
    several_segments(log)
    log.sync()


def shipped(log: Journal) -> None:
    few(log)
    generations.store(log.path, [Generation("00" * 16, 0), Generation("11" * 16, 2)])


FILLS = [empty, few, several_segments, gap, trimmed, archived, synced, shipped]


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("fill", FILLS)
def test_a_count_without_opening_is_that_of_the_open_shard(tmp_path: Path, fill: Callable[[Any], None], is_open: bool) -> None:
    path = tmp_path / "client.1.001"
    with kvspool.create(path, format="kvj", segment_bytes=SEGMENT) as log:
        fill(log)
        if is_open:
            assert CountedShard.at(path) == CountedShard.of(path, log)
    with kvspool.open(path) as log:
        expected = CountedShard.of(path, log)
    assert CountedShard.at(path) == expected
    assert expected.sizes.bits == 1


class Watching(system.Port):
    """Notes opened files, and may pretend to be another run of the machine."""

    def __init__(self, boot: bytes = b"") -> None:
        self.opened: list[str] = []
        self._boot = boot

    def open(self, path: Any, flags: int, mode: int) -> int:
        self.opened.append(os.fspath(path))
        return os.open(path, flags, mode)

    def boot_id(self) -> bytes:
        return self._boot or super().boot_id()


def test_no_segment_is_opened_to_count_a_shard(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "c", format="kvj", segment_bytes=SEGMENT) as log:
        several_segments(log)
    with system.replaced(Watching()) as port:
        assert isinstance(port, Watching)
        assert CountedShard.at(tmp_path / "c") is not None
        assert port.opened
        assert not [path for path in port.opened if path.endswith(".kvj")]


def torn(path: Path) -> None:
    with next((path / "kvj").iterdir()).open("ab") as file:
        file.write(b"a part of a frame")


def without_page(path: Path) -> None:
    (path / "lock").write_bytes(b"")
    (path / "lock.tail").unlink()


@pytest.mark.parametrize("change", [torn, without_page])
def test_a_shard_whose_frames_have_to_be_read_is_not_counted_without_opening(tmp_path: Path, change: Callable[[Path], None]) -> None:
    with kvspool.create(tmp_path / "c", format="kvj") as log:
        few(log)
    change(tmp_path / "c")
    assert CountedShard.at(tmp_path / "c") is None


def test_a_page_of_an_earlier_run_of_the_machine_does_not_count(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "c", format="kvj") as log:
        few(log)
    with system.replaced(Watching(b"another run now.")):
        assert CountedShard.at(tmp_path / "c") is None


def test_another_kind_of_log_is_not_counted_without_opening(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "c", capacity="64KiB").close()
    assert CountedShard.at(tmp_path / "c") is None
