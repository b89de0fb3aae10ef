"""The interface of a log of any kind: one class, with one signature for each verb; it says in advance which operations it lacks."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typed_program
from kinds import OPTIONS

import kvspool
from kvspool import queue
from kvspool.errors import Closed, NotALog, Unsupported
from kvspool.journal import FixedJournal, Journal, Retention
from kvspool.journal.reader import JournalReader
from kvspool.log import CAPABILITIES, Log
from kvspool.reader import Reader
from kvspool.spool import Spool
from kvspool.spool.reader import SpoolReader

ENGINE = ("append_prepared",)  # no verb of users: a journal's takes more
VERBS = [name for name, _ in inspect.getmembers(Log, inspect.isfunction) if not name.startswith("_") and name not in ENGINE]
OF_READERS = [name for name, _ in inspect.getmembers(Reader, inspect.isfunction) if not name.startswith("_")]
LACKS: dict[str, Callable[[Any], object]] = {
    "archive": lambda log: log.archive(),
    "keys": lambda log: log.append(b"four", key=b"k"),
    "types": lambda log: log.append(b"four", type=1),
    "producers": lambda log: log.producer("one"),
    "resize": lambda log: log.resize("1MiB"),
    "trim": lambda log: log.trim(before=1),
}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of each parameter."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("store", [Spool, Journal, FixedJournal])
def test_each_verb_has_one_signature_and_one_docstring(store: type[Log], name: str) -> None:
    own, declared = getattr(store, name), getattr(Log, name)
    assert parameters(own) == parameters(declared)
    assert (inspect.getdoc(own) or "").endswith(inspect.getdoc(declared) or "-")  # the compiled twin puts the signature before it


@pytest.mark.parametrize("name", OF_READERS)
@pytest.mark.parametrize("store", [SpoolReader, JournalReader])
def test_each_verb_of_a_reader_has_one_signature_and_one_docstring(store: type[Reader], name: str) -> None:
    own, declared = getattr(store, name), getattr(Reader, name)
    assert parameters(own) == parameters(declared)
    assert name == "end" or inspect.getdoc(own) == inspect.getdoc(declared)


def test_open_and_create_return_a_log_of_the_kind(log: Log, kind: str) -> None:
    assert isinstance(log, Log)
    assert log.kind == kind
    log.append(b"four")
    with kvspool.open(log.path) as other:
        assert isinstance(other, Log)
        assert other.kind == kind
        assert other.path == log.path
        assert other.log_id == log.log_id


def test_an_empty_log_is_true_and_has_no_length(log: Log) -> None:
    assert log
    assert len(log) == 0
    assert log.last() == []
    assert list(log) == []


def test_capabilities_say_what_a_kind_refuses(log: Log, kind: str) -> None:
    assert log.capabilities <= set(CAPABILITIES)
    for capability, call in LACKS.items():
        if capability not in log.capabilities:
            with pytest.raises(Unsupported, match=f"a log of the kind {kind} has no {capability}: ") as raised:
                call(log)
            assert (raised.value.kind, raised.value.capability) == (kind, capability)
            assert raised.value.instead == CAPABILITIES[capability]
    assert len(log) == 0


def test_capabilities_say_what_a_kind_can_do(log: Log) -> None:
    log.append_many([b"four"] * 3)
    for capability, call in LACKS.items():
        if capability in log.capabilities:
            call(log)


def test_a_log_without_retention_says_so(log: Log) -> None:
    assert log.retention is None
    if "trim" in log.capabilities:
        log.set_retention(Retention(max_bytes=1 << 20))
        assert log.retention == Retention(max_bytes=1 << 20)
    else:
        with pytest.raises(Unsupported):
            log.set_retention(Retention(max_bytes=1 << 20))


def test_a_typed_program_for_any_kind_runs_on_each(log: Log, kind: str) -> None:
    path = log.path
    log.close()
    assert typed_program.main(path) > 0
    assert sum(1 for _ in kvspool.open(path.with_name("copy"))) > 0


CALLS: dict[str, Callable[[Any], object]] = {
    "append": lambda log: log.append(b"four"),
    "append_many": lambda log: log.append_many([b"four"]),
    "writer": lambda log: log.writer(),
    "producers": lambda log: log.producers(),
    "read": lambda log: log.read(),
    "read_values": lambda log: log.read_values(),
    "read_arrow": lambda log: log.read_arrow(),
    "follow": lambda log: log.follow(),
    "follow_async": lambda log: log.follow_async(),
    "get": lambda log: log.get(0),
    "last": lambda log: log.last(),
    "len": len,
    "iter": iter,
    "reader": lambda log: log.reader("r"),
    "readers": lambda log: log.readers(),
    "delete_reader": lambda log: log.delete_reader("r"),
    "stats": lambda log: log.stats(),
    "verify": lambda log: log.verify(),
    "repair": lambda log: log.repair(),
    "sync": lambda log: log.sync(),
    "export": lambda log: log.export(io.BytesIO()),
    "extent": lambda log: log.extent(),
    "append_many of no record": lambda log: log.append_many([]),
    "producer": lambda log: log.producer("one"),
    "forget_producers": lambda log: log.forget_producers(["one"]),
    "retire_producers": lambda log: log.retire_producers("one"),
    "archive": lambda log: log.archive(dry_run=True),
    "unarchive": lambda log: log.unarchive(dry_run=True),
    "trim": lambda log: log.trim(before=0, dry_run=True),
    "resize": lambda log: log.resize("1MiB"),
    "set_retention": lambda log: log.set_retention(None),
    "view": lambda log: log.view(0).__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_verb_of_a_closed_log_raises_closed(filled: Log, name: str) -> None:
    assert not filled.closed
    filled.close()
    filled.close()
    assert filled.closed
    with pytest.raises(Closed):
        CALLS[name](filled)


def test_statistics_and_reports_have_the_same_core_on_every_kind(filled: Log, kind: str) -> None:
    stats = filled.stats()
    assert (stats.format, stats.records, stats.first_sequence, stats.next_sequence) == (kind, 30, 0, 30)
    assert stats.path == str(filled.path)
    assert filled.sync() == 30
    assert filled.stats().synced_sequence == 30
    report = filled.verify()
    assert type(report) is kvspool.VerifyReport
    assert report.is_sound
    assert (report.path, report.format) == (str(filled.path), kind)
    assert (report.records, report.first_sequence, report.next_sequence) == (30, 0, 30)
    filled.repair()
    assert filled.append(b"four") == 30


def test_an_export_has_every_record(filled: Log) -> None:
    file = io.BytesIO()
    assert filled.export(file, start=10, end=20).records == 10
    assert file.getvalue().count(b"\n") == 10
    assert filled.export(io.BytesIO(), "parquet").records == 30


def test_a_queue_is_no_log(tmp_path: Path) -> None:
    with queue.create(tmp_path / "queue") as made:
        made.put(b"entry")
        with pytest.raises(NotALog, match="is a queue, not a log: kvspool.queue.open opens it"):
            kvspool.open(tmp_path / "queue")
        with queue.open(tmp_path / "queue") as other:
            assert other.get(timeout=5) == b"entry"


def test_open_refuses_every_other_kind(log: Log, kind: str) -> None:
    log.append(b"four")
    log.close()
    before = sorted(log.path.rglob("*"))
    for other in OPTIONS.keys() - {kind}:
        limits = OPTIONS["fixed"] if other == "fixed" else {}
        with pytest.raises(NotALog):
            kvspool.open(log.path, format=other, **limits)
    assert sorted(log.path.rglob("*")) == before


def test_open_of_no_kind_takes_shards_or_other_files_for_a_log(tmp_path: Path) -> None:
    shard = pytest.importorskip("shard")
    shard.create(tmp_path / "shards", bits=1, capacity="1MiB").close()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_bytes(b"text")
    for path in (tmp_path / "shards", tmp_path / "notes"):
        for kind in OPTIONS:
            limits = OPTIONS["fixed"] if kind == "fixed" else {}
            with pytest.raises(NotALog):
                kvspool.open(path, format=kind, **limits)


def test_a_readers_name_is_text_that_is_not_empty(log: Log) -> None:
    with pytest.raises(TypeError):
        log.reader(5)  # type: ignore[arg-type]
    if log.kind != "fflg":  # its program takes any bytes for an id
        with pytest.raises(ValueError):
            log.reader("")
    assert log.readers() == []


def test_the_docs_have_a_row_for_each_capability(log: Log, kind: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "log.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")]
    head = next(row for row in rows if row[0] == "capability")
    table = {row[0].strip("`"): row for row in rows if row[0].strip("`") in CAPABILITIES}
    assert {name: row[-1] for name, row in table.items()} == CAPABILITIES
    assert {name for name, row in table.items() if row[head.index(kind)] == "yes"} == log.capabilities


def above() -> list[tuple[type, type]]:
    """Return the classes of many logs at once, each with the class whose verbs it shares."""
    pytest.importorskip("pyarrow")
    from hub import HubRoot
    from hub.client.remote import RemoteHub
    from hub.root.reader import HubReader
    from shard import ShardSet

    return [(ShardSet, Log), (HubRoot, Log), (RemoteHub, Log), (HubReader, Reader)]


def test_sets_and_hubs_call_what_they_share_by_the_same_names() -> None:
    apart = {  # whose records have a place: a shard, or a client and a shard, before the sequence
        *((one, verb) for one in ("ShardSet", "HubRoot") for verb in ("get", "view")),
        ("HubReader", "seek"),
    }
    for one, shared in above():
        verbs = [name for name in dir(one) if name in {"Log": VERBS, "Reader": OF_READERS}[shared.__name__]]
        assert {"close", "readers"} <= set(verbs) or {"close", "sync"} <= set(verbs) or shared is Reader
        for name in verbs:
            here = {parameter: (kind, default) for parameter, kind, default in parameters(getattr(one, name))}
            there = {parameter: (kind, default) for parameter, kind, default in parameters(getattr(shared, name))}
            common = here.keys() & there.keys()
            assert {parameter: here[parameter] for parameter in common} == {parameter: there[parameter] for parameter in common}
            positional = [parameter for parameter, (kind, _) in there.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            if one.__name__ != "RemoteHub" and (one.__name__, name) not in apart:
                first = [parameter for parameter, (kind, _) in here.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
                assert first[: len(positional)] == positional[: len(first)], (one, name)


LEFT_OUT = {
    "ShardSet": """reader readers delete_reader
        read_arrow export verify repair archive unarchive trim set_retention resize ensure_log_id has_vanished""",
    "HubRoot": """append append_many append_arrow writer producer producers forget_producers retire_producers sync
        read_arrow export verify repair archive unarchive trim set_retention resize ensure_log_id has_vanished""",
}


def test_what_sets_and_roots_leave_out_is_in_the_docs() -> None:
    for one, _ in above():
        if one.__name__ in LEFT_OUT:
            left_out = set(LEFT_OUT[one.__name__].split())
            assert {verb for verb in VERBS if not hasattr(one, verb)} - Log.HELPERS == left_out
            name = "shards.md" if one.__name__ == "ShardSet" else "hub-readers.md"
            page = (Path(__file__).parents[2] / "docs" / name).read_text("utf-8")
            rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
            assert [verb for verb in left_out if f"`{verb}`" not in rows] == []
