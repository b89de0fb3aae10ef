"""Handles can be neither copied nor pickled, and one that was never made whole is freed without a word; plain values can be both."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from holders_of_handles import Found, holders, load
from loops import interpreted

import hub
import kvspool
import shard
from kvspool.kernel.frames import TWIN
from kvspool.queue import ChunkQueue
from kvspool.record import Gap, Record

HOLDERS = holders()
PUBLIC = [
    "kvspool.spool.spool.Spool",
    "kvspool.writer.Writer",
    "kvspool.spool.reader.SpoolReader",
    "kvspool.engine.iteration.Iteration",
    "kvspool.engine.iteration.Following",
    "kvspool.spool.spool_files.SpoolFiles",
    "kvspool.journal.journal.Journal",
    "kvspool.journal.reader.JournalReader",
    "kvspool.journal.segment.Segment",
    "kvspool.producers.Producer",
    "kvspool.queue.queue.ChunkQueue",
    "kvspool.engine.producer_table.ProducerTable",
    "shard.merge.Merge",
    "shard.producers.ShardProducer",
    "shard.shardset.ShardSet",
    "hub.root.lease.ReaderLease",
    "hub.client.mirror.Mirror",
    "hub.root.reader.HubReader",
    "hub.client.remote.RemoteHub",
    "hub.root.root.HubRoot",
    "hub.server.server.HubServer",
    "hub.client.shipper.Shipper",
    "hub.root.store.Store",
]


def classes() -> list[Any]:
    """Return every handle of the packages, of both twins."""
    found = [load(one) for one in HOLDERS.values()]
    for name in PUBLIC:
        module, _, stem = name.rpartition(".")
        found.append(getattr(importlib.import_module(module), stem))
    frames = ("Ring", "FrameReader", "FrameWriter", "FrameScanner", "Batch", "Items")
    merges = ("FollowingLoops", "MergeSource", "Merging")
    stems = (
        ("kvspool.kernel.frames", frames),
        ("kvspool.kernel.group", ("FlushGroup",)),
        ("kvspool.kernel.lock", ("AppendLock",)),
        ("kvspool.kernel.tail", ("Tail",)),
        ("kvspool.kernel.chunks", ("Ends",)),
        ("kvspool.kernel.wakeups", ("Waiting",)),
        ("shard.kernel.merge", merges),
    )
    for stem, names in stems:
        found += [getattr(interpreted(stem), name) for name in names]
        with suppress(ImportError):
            compiled = importlib.import_module(f"{stem}_c")
            found += [getattr(compiled, name) for name in names]
    return list(dict.fromkeys(found))


CLASSES = classes()


def half_made(kind: Any) -> Any:
    """Return an object of a class whose `__init__` never ran."""
    if inspect.isabstract(kind):
        kind = type(kind.__name__, (kind,), {name: None for name in kind.__abstractmethods__})
    return kind.__new__(kind)


def attempts(handle: object) -> list[Callable[[], object]]:
    pickled = [lambda protocol=protocol: pickle.dumps(handle, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [lambda: copy.copy(handle), lambda: copy.deepcopy(handle), *pickled]


def name_of(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def test_the_walk_finds_the_handles_that_are_known() -> None:
    assert len(HOLDERS) > 60
    known = {"kvspool.spool.spool_files.SpoolFiles", "kvspool.queue.chunk.Chunk", "hub.root.lease.ReaderLease"}
    known.add("kvspool.engine.wakeups.Watcher")
    assert known <= set(HOLDERS)
    assert isinstance(HOLDERS["kvspool.spool.spool_files.SpoolFiles"], Found)


@pytest.mark.parametrize("kind", CLASSES, ids=name_of)
def test_a_handle_refuses_to_be_copied_or_pickled_and_says_how_to_get_another(kind: Any) -> None:
    handle = half_made(kind)
    for attempt in attempts(handle):
        with pytest.raises(TypeError, match=f"cannot copy or pickle a {kind.__name__}: .*open another handle"):
            attempt()


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if hasattr(kind, "__del__")], ids=name_of)
def test_an_object_whose_init_never_ran_is_freed_without_a_word(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: said.append(unraisable.exc_value))
    handle = half_made(kind)
    del handle
    gc.collect()
    assert not said


def test_open_handles_of_all_kinds_refuse_and_work_on(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "spool") as log, ChunkQueue.create(tmp_path / "queue") as queue:
        log.append_many([b"one", b"two"])
        with log.reader("r") as reader, log.writer() as writer, log.follow(timeout=0) as following:
            for handle in (log, reader, writer, following, log.read(), log.producer("p"), reader.read(), log.follow_async(), queue):
                for attempt in attempts(handle):
                    with pytest.raises(TypeError, match="cannot copy or pickle"):
                        attempt()
            assert writer.append(b"three") == 2
            assert [record.value for record in following] == [b"one", b"two", b"three"]
            assert [record.value for record in reader.read(limit=1)] == [b"one"]
        queue.put(b"x")
        assert queue.get() == b"x"


def test_plain_values_are_copied_and_pickled_as_before(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "spool") as log:
        log.append({"a": 1}, key=b"k")
        with log.reader("r"):
            values = [*log.read(), Gap(1, 2, "overrun", "log"), log.stats(), *log.readers(), log.verify()]
    for value in values:
        assert copy.copy(value) == value
        assert copy.deepcopy(value) == value
        assert pickle.loads(pickle.dumps(value)) == value
    assert isinstance(values[0], Record)
    assert pickle.loads(pickle.dumps(values[0])).data == {"a": 1}


# Names that `dir` shows.

WRITING = "append append_arrow append_many writer producer producers forget_producers retire_producers sync"
READING = "read read_values read_arrow follow follow_async get last view extent reader readers delete_reader group groups reset_group"
TASKS = "tasks task_stats delete_tasks dead_letters requeue"
KEEPING = "stats verify repair trim retention set_retention archive unarchive resize export close closed has_vanished"
LOG = f"{WRITING} {READING} {TASKS} {KEEPING} kind capabilities log_id path timeout durability sync_interval"
JOURNAL = "append_batch consumers ensure_log_id format torn trim_error"
SHOWN = {
    "spool": f"{LOG} capacity decode recovery",
    "kvj": f"{LOG} {JOURNAL}",
    "sej": f"{LOG} {JOURNAL}",
    "fflg": f"{LOG} {JOURNAL}",
    "fixed": f"{LOG} {JOURNAL} item oldest prune replay rewind",
    "queue": "clear close create drain durability empty full get get_if get_many get_nowait max_chunks open path peek peek_nowait "
    "put put_many put_nowait qsize stats sync timeout",
    "shards": """append append_arrow append_many bits capabilities close closed create extent follow follow_async
        forget_producers get group groups last open path prefix producer producers read read_values
        reset_group retire_producers root shard_of shards stats sync view writer
        dead_letters delete_tasks requeue task_stats tasks""",
    "hub": """client clients close closed create create_client delete_reader extent follow follow_async get group
        groups held last open path read read_values reader readers reset_group stats view
        dead_letters delete_tasks requeue task_stats tasks""",
}


@pytest.mark.parametrize("kind", SHOWN)
def test_dir_shows_what_users_call_and_everything_else_is_there_all_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    handle: Any
    if kind == "shards":
        handle = shard.create(path, bits=1, capacity=4096)
    elif kind == "hub":
        handle = hub.create(path)
    elif kind == "queue":
        handle = kvspool.queue.create(path)
    else:
        fixed = {"item_bytes": 4, "items_per_blob": 4} if kind == "fixed" else {}
        handle = kvspool.create(path, format=kind, **fixed)
    with handle:
        assert [name for name in sorted(dir(handle)) if not name.startswith("__")] == sorted(SHOWN[kind].split())
        hidden = {name for cls in type(handle).__mro__ for name in vars(cls).get("HELPERS", ())}
        if TWIN == "interpreted":  # the compiled one hides some without help
            assert [name for name in hidden if not hasattr(handle, name)] == []


READER = "close closed commit committed follow follow_async isolation lag name read rewind seek seek_time"
MEMBER = "assigned attend close closed commit follow follow_async lag name positions read seek"


@pytest.mark.parametrize(
    ("kind", "reader"), [("spool", f"{READER} sequence view"), ("kvj", f"{READER} sequence view"), ("hub", f"{READER} positions")]
)
def test_dir_of_a_reader_and_a_member_shows_what_users_call(tmp_path: Path, kind: str, reader: str) -> None:
    made: Any = hub.create(tmp_path / "log") if kind == "hub" else kvspool.create(tmp_path / "log", format=kind)
    with made as log:
        for handle, names in ((log.reader("r"), reader), (log.group("g"), MEMBER)):
            with handle:
                assert [name for name in sorted(dir(handle)) if not name.startswith("__")] == sorted(names.split())
