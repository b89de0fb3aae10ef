"""The shard index checks thousands of shards in parts, so that a call whose client has gone ends between two of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import hub
import kvspool
from hub.protocol.reading import Generation
from hub.root import file_version
from hub.root.generations import GENERATIONS, encode
from hub.server import shard_index
from hub.server.shard_index import ShardIndex

SHARDS = 5
T = TypeVar("T")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub root with some clients; each part of a check is one shard."""
    monkeypatch.setattr(shard_index, "PART", -1.0)
    hub.create(tmp_path / "root").close()
    for number in range(SHARDS):
        with kvspool.create(tmp_path / "root" / f"c{number}", format="kvj") as log:
            log.append(b"x")
    return tmp_path / "root"


class Runs:
    """Calls functions at once, like a call whose client goes before the call number `end`."""

    def __init__(self, end: int = 1000) -> None:
        self.count, self.end = 0, end

    async def __call__(self, work: Callable[..., T], /, *arguments: Any) -> T:
        self.count += 1
        if self.count == self.end:
            raise asyncio.CancelledError
        return work(*arguments)


def test_a_check_of_many_shards_ends_with_its_call_and_the_next_one_has_all(root: Path) -> None:
    index = ShardIndex(root)
    gone, present = Runs(4), Runs()

    async def states() -> dict[str, Any]:
        with pytest.raises(asyncio.CancelledError):
            await index.states(lambda client: True, gone)
        return await index.states(lambda client: True, present)

    found = asyncio.run(states())
    assert gone.count == 4
    assert present.count > SHARDS
    assert [(client, [state.next for state in states]) for client, states in found.items()] == [(f"c{at}", [1]) for at in range(SHARDS)]
    index.close()


def test_a_check_without_a_call_has_all_shards_too(root: Path) -> None:
    index = ShardIndex(root)
    changes = index.look("", lambda client: True)
    assert len(changes.shards) == SHARDS
    with kvspool.open(root / "c3") as log:
        log.append(b"more")
    index.note("c3", 0)
    assert [state.client for state in index.look(changes.token, lambda client: True).shards] == ["c3"]
    index.close()


def test_a_new_shard_is_found_without_a_check_of_all_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ShardIndex(root)
    changes = index.look("", lambda client: True)
    index._next_look = math.inf
    checked: list[Any] = []
    check = index._check
    monkeypatch.setattr(index, "_check", lambda key: (checked.append(key), check(key)))
    with kvspool.create(root / "new", format="kvj") as log:
        log.append(b"x")
    index.note("new", 0)
    assert [state.client for state in index.look(changes.token, lambda client: True).shards] == ["new"]
    assert checked == [("new", 0)]
    index.close()


def test_no_shard_is_checked_before_all_are_asked_for_and_then_each(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ShardIndex(root)
    checked: list[Any] = []
    check = index._check
    monkeypatch.setattr(index, "_check", lambda key: (checked.append(key), check(key)))
    index.note("c3", 0)
    changes = index.look(index.token, lambda client: True)
    assert not checked and not changes.shards
    assert len(index.look("", lambda client: True).shards) == len(index.look(changes.token, lambda client: True).shards) == SHARDS
    assert len(checked) == SHARDS
    index.close()


def test_a_shard_that_could_not_be_checked_for_a_lack_of_resources_is_checked_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = ShardIndex(root)
    with monkeypatch.context() as patch:
        patch.setattr(index, "_state", lambda *_: (_ for _ in ()).throw(OSError(24, "too many open files")))
        with pytest.raises(OSError, match="too many open files"):
            index.look("", lambda client: True)
    assert len(index.look("", lambda client: True).shards) == SHARDS
    index.close()


def test_a_table_of_generations_that_is_overwritten_in_place_is_seen_at_the_next_check(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_index, "LOOK", 0.0)
    monkeypatch.setattr(shard_index, "REST", 0)
    monkeypatch.setattr(file_version, "STABLE", 0)
    table = root / "c3" / GENERATIONS
    table.write_bytes(encode([Generation("00" * 16, 0)]))
    index = ShardIndex(root)
    changes = index.look("", lambda client: True)
    assert changes.shards[3].generations == [Generation("00" * 16, 0)]
    table.write_bytes(encode([Generation("11" * 16, 0)]))  # the directory's time stays the same
    assert [state.generations for state in index.look(changes.token, lambda client: True).shards] == [[Generation("11" * 16, 0)]]
    index.close()
