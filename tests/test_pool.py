"""Memory that is lent again: never while anything can still see it."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvspool
from kvspool import system
from kvspool.engine.pool import Pool

PIECE = 1 << 16


def fill(view: memoryview, byte: int) -> None:
    view[:] = bytes([byte]) * len(view)


def test_memory_is_lent_again_once_its_view_is_gone() -> None:
    pool = Pool(PIECE, spare=2)
    view = pool.lend(100)
    assert len(view) == PIECE
    fill(view, 1)
    memory = view.obj
    del view
    again = pool.lend(PIECE)
    assert again.obj is memory


def test_memory_that_is_lent_is_never_lent_to_another() -> None:
    pool = Pool(PIECE, spare=2)
    views = [pool.lend(PIECE) for _ in range(5)]
    for number, view in enumerate(views):
        fill(view, number)
    assert [view[0] for view in views] == [view[-1] for view in views] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "keep", [lambda view: view[10:20], lambda view: view.cast("Q"), lambda view: memoryview(view.obj)], ids=["slice", "cast", "mapping"]
)
def test_memory_that_any_other_view_shares_is_not_lent_again(keep: Callable[[memoryview], memoryview]) -> None:
    pool = Pool(PIECE, spare=2)
    view = pool.lend(PIECE)
    fill(view, 7)
    kept = keep(view)
    before = kept.tobytes()
    del view
    for byte in range(4):
        fill(pool.lend(PIECE), byte)
    assert kept.tobytes() == before


def test_no_more_than_the_spare_pieces_stay_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(system.Port):
        def private_memory(self, size: int) -> mmap.mmap:
            made.append(size)
            return super().private_memory(size)

    pool = Pool(PIECE, spare=2)
    with system.replaced(Counted()):
        views = [pool.lend(PIECE) for _ in range(4)]
        assert made == [PIECE] * 4
        views.clear()
        views = [pool.lend(PIECE) for _ in range(4)]
    assert made == [PIECE] * 6


def test_memory_larger_than_a_piece_is_not_kept() -> None:
    pool = Pool(PIECE, spare=2)
    large = pool.lend(PIECE + 1)
    assert len(large) == PIECE + 1
    del large
    assert len(pool.lend(1)) == PIECE


def test_a_kernel_that_releases_no_pages_keeps_no_spare_memory() -> None:
    class Old(system.Port):
        def release_pages(self, memory: mmap.mmap) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    pool = Pool(PIECE, spare=2)
    with system.replaced(Old()):
        view = pool.lend(PIECE)
        memory = view.obj
        del view
        assert pool.lend(PIECE).obj is not memory


# Batches of a log.


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A log that is full, and small; but its batches count as large ones."""
    pytest.importorskip("pyarrow")
    from kvspool.engine import batches
    from kvspool.spool import gathering

    monkeypatch.setattr(gathering, "LARGE", 1 << 14)
    for module in (batches, gathering):
        monkeypatch.setattr(module, "LARGE_BATCH", 200)
        monkeypatch.setattr(module, "BATCH", 100)
    monkeypatch.setattr(batches, "_pools", [Pool(1 << 20, spare=8)])
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        refill(log, b"a")
        yield log


def refill(log: Any, letter: bytes) -> None:
    """Overwrite all records by others."""
    for _ in range(10):
        log.append_many([letter * (20 + number % 40) for number in range(100)])


def addresses(table: Any) -> set[int]:
    return {chunk.buffers()[2].address for chunk in table.column("value").chunks}


@pytest.mark.parametrize(
    "hold",
    [
        lambda table: table,
        lambda table: table.column("value"),
        lambda table: table.slice(5, 9),
        lambda table: table.column("value").chunk(0)[3:7],
        lambda table: table.column("value").chunk(0).buffers()[2],
        lambda table: memoryview(table.column("sequence").chunk(0).buffers()[1]),
        lambda table: memoryview(table.column("sequence").chunk(0).buffers()[1])[80:160],
        lambda table: table.column("sequence").chunk(0).to_numpy(zero_copy_only=True),
        lambda table: table.column("sequence").chunk(0).to_numpy(zero_copy_only=True)[4:8],
        lambda table: table.to_batches()[0].select(["timestamp"]),
    ],
    ids=["table", "column", "slice", "part", "buffer", "view", "part of a view", "numpy", "part of numpy", "batch"],
)
def test_a_batch_that_is_held_does_not_change_while_more_is_read(log: Any, hold: Callable[[Any], Any]) -> None:
    held = hold(log.read_arrow())
    before = seen(held)
    for letter in (b"b", b"c", b"d"):
        refill(log, letter)
        gc.collect()
        assert log.read_arrow().num_rows > 0
    assert seen(held) == before


def seen(held: Any) -> Any:
    """Return a copy of the contents."""
    for name in ("to_pybytes", "to_pylist", "tolist"):
        if hasattr(held, name):
            return getattr(held, name)()
    return bytes(held)


def test_a_stream_reuses_the_memory_of_batches_that_were_dropped(log: Any) -> None:
    from kvspool import arrow

    cursor = log.cursor("earliest", bounded=True)
    used = [batch.column("value").buffers()[2].address for batch in arrow.batches(cursor, most=50)]
    cursor.close()
    assert len(used) > len(set(used))


def test_a_table_that_was_dropped_leaves_its_memory_to_the_next_one(log: Any) -> None:
    table = log.read_arrow()
    assert table.column("value").num_chunks > 1
    before = addresses(table)
    del table
    gc.collect()
    assert addresses(log.read_arrow()) & before


@pytest.mark.parametrize("coded", [False, True])
def test_batches_that_are_held_do_not_change_while_more_is_streamed(log: Any, coded: bool) -> None:
    from kvspool import arrow

    cursor = log.cursor("earliest", bounded=True)
    held = list(arrow.batches(cursor, most=100, coded=coded))
    copies = [batch.to_pylist() for batch in held]
    refill(log, b"z")
    again = list(arrow.batches(log.cursor("earliest", bounded=True), most=100, coded=coded))
    assert [batch.to_pylist() for batch in held] == copies
    assert {value[:1] for batch in again for value in batch.column("value").to_pylist()} == {b"z"}
    cursor.close()
