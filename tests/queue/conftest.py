from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from loops import twins

from kvspool.kernel import chunks_py
from kvspool.queue import ChunkQueue, chain, contents, queue


def use(monkeypatch: pytest.MonkeyPatch, twin: ModuleType) -> None:
    """Let every queue use the loops of this twin."""
    monkeypatch.setattr(chain, "Ends", twin.Ends)
    monkeypatch.setattr(queue, "Ends", twin.Ends)
    monkeypatch.setattr(contents, "copies", twin.copies)
    monkeypatch.setattr(contents, "count", twin.count)


@pytest.fixture(params=twins("kvspool.kernel.chunks"), ids=lambda module: module.__name__.rpartition(".")[2])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The interpreted loops, then the compiled ones if they were built; queues use them."""
    use(monkeypatch, request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every queue use the interpreted loops, whose calls to the system all go through the port."""
    use(monkeypatch, chunks_py)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a queue to create."""
    return tmp_path / "queue.dat"


@pytest.fixture
def make(path: Path) -> Iterator[Callable[..., ChunkQueue]]:
    """Make queues, or open more handles of one, that are closed in the end: `make(chunk_bytes=..., ...)`."""
    made: list[ChunkQueue] = []

    def create(**options: Any) -> ChunkQueue:
        made.append(ChunkQueue.create(path, **{"chunk_bytes": 64, "exist_ok": True, **options}))
        return made[-1]

    yield create
    for one in made:
        one.close()
