"""The directory of a journal: a handle writes to its own journal only, and creators exclude each other and writers."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from children import in_child, start
from schedules import some

import kvspool
from kvspool import system
from kvspool.engine import making
from kvspool.errors import FormatError, KvspoolError, LockTimeout, LogExists, LogVanished, ReaderBusy
from kvspool.journal import FixedJournal, Journal, Retention
from kvspool.journal.files import LEFTOVERS
from kvspool.system.descriptor import Descriptor

FORMATS: dict[str, dict[str, Any]] = {
    "kvj": {"segment_bytes": 100},
    "sej": {"segment_bytes": 100},
    "fflg": {"segment_bytes": 10_000},
    "fixed": {"item_bytes": 4, "items_per_blob": 2},
}
VERBS: dict[str, Callable[[Any], object]] = {
    "append": lambda log: log.append(b"lost"),
    "append_many": lambda log: log.append_many([b"lost"] * 3),
    "archive": lambda log: log.archive(),
    "delete_reader": lambda log: log.delete_reader("before"),
    "ensure_log_id": lambda log: log.under_lock(1, log._begin_id),
    "open_for_sync": lambda log: log.open_for_sync(5, 6),
    "open_to_write": lambda log: log.open_to_write(),
    "producer": lambda log: log.producer("p").append_many([b"lost"], batch=1),
    "prune": lambda log: log.prune(2),
    "reader": lambda log: log.reader("another"),
    "repair": lambda log: log.repair(),
    "rewind": lambda log: log.rewind(1),
    "set_retention": lambda log: log.set_retention(Retention(max_bytes=1)),
    "sync": lambda log: log.sync(),
    "trim": lambda log: log.trim(before=2, force=True),
}
ONLY = {
    "archive": ("kvj",),
    "open_for_sync": ("fixed",),
    "producer": ("kvj",),
    "prune": ("fixed",),
    "rewind": ("fixed",),
}
CASES = [(name, verb) for name in FORMATS for verb in VERBS if name in ONLY.get(verb, FORMATS)]


def create(path: Path, name: str) -> Journal:
    return kvspool.create(path, format=name, **FORMATS[name])  # type: ignore[call-overload,no-any-return]


def reopened(path: Path, name: str, **options: Any) -> Journal:
    log = kvspool.open(path, format=name, **FORMATS[name], **options)  # type: ignore[call-overload]
    assert isinstance(log, Journal)
    return log


def fill(log: Journal) -> None:
    log.append_many([b"%04d" % number for number in range(6)])
    log.offsets.store("before", 1)


def replace(path: Path, name: str, moved: Path | None) -> None:
    """Put another journal at a path, after the one there was removed, or moved away."""
    if moved is None:
        shutil.rmtree(path)
    else:
        path.rename(moved)
    with create(path, name) as other:
        fill(other)


def files(root: Path) -> dict[str, bytes]:
    """Return the content of all files; the locks' words in a lock file and its tail don't count."""
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and ".lck" not in path.name}


# Identity.


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("name", "verb"), CASES)
def test_a_handle_writes_nothing_into_a_journal_that_replaced_its_own(tmp_path: Path, name: str, verb: str, moved: bool) -> None:
    path = tmp_path / "log"
    with create(path, name) as first:
        fill(first)
    with reopened(path, name) as stale:
        replace(path, name, tmp_path / "moved" if moved else None)
        before = files(path)
        with pytest.raises(LogVanished, match="open it again"):
            VERBS[verb](stale)
        assert files(path) == before
    with reopened(path, name) as other:
        assert [record.value for record in other] == [b"%04d" % number for number in range(6)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_commit_changes_no_reader_of_a_journal_that_replaced_its_own(tmp_path: Path, name: str) -> None:
    path = tmp_path / "log"
    with create(path, name) as first:
        fill(first)
    with reopened(path, name) as stale, stale.reader("before") as reader:
        reader.seek(5)
        replace(path, name, None)
        with pytest.raises(LogVanished, match="open it again"):
            reader.commit()
    with reopened(path, name) as other:
        assert other.offsets.load("before") == 1


READS: dict[str, Callable[[Any], object]] = {
    "cursor": lambda log: log.cursor(),
    "follow": lambda log: next(log.follow(timeout=0), None),
    "read": lambda log: list(log.read()),
    "read_values": lambda log: list(log.read_values(2)),
    "view": lambda log: log.view(0).__enter__(),
}


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("verb", READS)
def test_a_handle_reads_nothing_from_a_journal_that_replaced_its_own(tmp_path: Path, name: str, verb: str, moved: bool) -> None:
    path = tmp_path / "log"
    with create(path, name) as first:
        fill(first)
    with reopened(path, name) as stale:
        replace(path, name, tmp_path / "moved" if moved else None)
        with pytest.raises(LogVanished, match="open it again"):
            READS[verb](stale)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_cursor_enters_no_segment_of_a_journal_that_replaced_its_own(tmp_path: Path, name: str, moved: bool) -> None:
    path = tmp_path / "log"
    with create(path, name) as first:
        count = 2000 if name == "fflg" else 20  # of several segments
        first.append_many([b"old."] * count)
        assert len(first.bases()) > 1
    with reopened(path, name) as stale:
        for most in (1, 2):
            reading = stale.read(on_gap="yield")
            items = reading.poll(most)
            if most == 2:
                replace(path, name, tmp_path / "moved" if moved else None)
                with reopened(path, name) as other:
                    other.append_many([b"new."] * count)
            with pytest.raises(LogVanished) if most == 2 else nullcontext():
                while batch := reading.poll(most):
                    items += batch
            assert {item.value for item in items} == {b"old."}
            assert len(items) == count or most == 2


def test_an_item_is_never_one_of_a_journal_that_replaced_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with create(path, "fixed") as first:
        fill(first)
    with reopened(path, "fixed") as stale:
        replace(path, "fixed", None)
        assert isinstance(stale, FixedJournal)
        with pytest.raises(LogVanished):
            stale.item(0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_keeps_no_reader_of_a_journal_that_replaced_its_own_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / "log"
    with create(path, name) as first:
        fill(first)
    with reopened(path, name) as stale, stale.reader("before"):
        replace(path, name, None)
        with reopened(path, name) as other, other.reader("before") as reader:
            assert reader.sequence == 1
            with reopened(path, name) as third, pytest.raises(ReaderBusy):
                third.reader("before")


@pytest.mark.parametrize("limits", [{}, {"item_bytes": 4}])
def test_a_journal_without_settings_whose_items_have_an_unknown_length_is_refused(tmp_path: Path, limits: Any) -> None:
    with pytest.raises(FormatError, match="items_per_blob: give them as options, or create a journal"):
        kvspool.open(tmp_path, format="fixed", **limits)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_forked_child_writes_nothing_into_a_journal_that_replaced_its_parents(tmp_path: Path, name: str) -> None:
    path = tmp_path / "log"
    with create(path, name) as log:
        fill(log)

        def append() -> None:
            replace(path, name, tmp_path / "moved")
            with pytest.raises(LogVanished):
                log.append(b"lost")

        in_child(append)
    with reopened(path, name) as other:
        assert len(list(other)) == 6


def test_a_replaced_journal_is_noticed_where_directories_have_no_identity_of_their_own(tmp_path: Path) -> None:
    """As on overlayfs, where only the inode number is known, which a later directory may get."""

    class Overlay(system.Port):
        def identity(self, path: Any) -> str:
            os.stat(path)
            return "1"

    path = tmp_path / "log"
    with system.replaced(Overlay()):
        create(path, "kvj").close()
        with reopened(path, "kvj") as stale:
            replace(path, "kvj", None)
            with pytest.raises(LogVanished):
                stale.append(b"lost")


def test_a_journal_that_was_moved_away_and_back_takes_records_from_its_old_handle(tmp_path: Path) -> None:
    path = tmp_path / "log"
    create(path, "kvj").close()
    with reopened(path, "kvj") as log:
        path.rename(tmp_path / "moved")
        with pytest.raises(LogVanished):
            log.append(b"a")
        (tmp_path / "moved").rename(path)
        assert log.append(b"a") == 0


# Creation.


class Failing(system.Port):
    """Lets the n-th write, flush, opening or lock fail, after `meanwhile` was called."""

    def __init__(self, nth: int, meanwhile: Callable[[], None]) -> None:
        self.left = nth
        self.meanwhile = meanwhile
        for name in ("open", "write", "flush", "try_lock", "try_share", "try_lock_file", "map", "status", "names"):
            setattr(self, name, self._failing(getattr(self, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if not self.left:
                with system.replaced(system.Port()):
                    self.meanwhile()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **options)

        return counted


@pytest.mark.parametrize("name", FORMATS)
def test_a_creator_that_fails_at_any_call_removes_no_record_of_another_process(tmp_path: Path, name: str) -> None:
    opened = 0
    for nth in range(1, 200):
        path = tmp_path / str(nth) / "log"
        path.parent.mkdir()
        acknowledged: list[bytes] = []

        def append(path: Path = path, acknowledged: list[bytes] = acknowledged) -> None:
            nonlocal opened
            with suppress(KvspoolError), reopened(path, name, timeout=0) as other:
                opened += 1
                other.append(b"mine")
                acknowledged.append(b"mine")

        port = Failing(nth, append)
        try:
            with system.replaced(port):
                create(path, name).close()
        except (OSError, KvspoolError):
            assert port.left <= 0
        else:
            if port.left > 0:
                break
        if acknowledged:
            with reopened(path, name) as log:
                assert [record.value for record in log] == acknowledged
    else:
        raise AssertionError("the creator never came to its end")
    assert opened > 3


@pytest.mark.parametrize("name", FORMATS)
def test_a_creator_that_fails_in_a_directory_that_was_there_leaves_it_empty_for_the_next_one(tmp_path: Path, name: str) -> None:
    failed = 0
    for nth in range(1, 200):
        path = tmp_path / str(nth) / "log"
        path.mkdir(parents=True)
        with suppress(OSError), system.replaced(Failing(nth, lambda: None)) as port:
            create(path, name).close()
        assert isinstance(port, Failing)
        if port.left > 0:
            break
        if not list(path.rglob("*")) or set(os.listdir(path)) <= LEFTOVERS:
            failed += 1
            create(path, name).close()
        with reopened(path, name) as log:
            assert log.append(b"four") == 0
    else:
        raise AssertionError("the creator never came to its end")
    assert failed > 10


def test_a_writer_waits_for_a_creator_and_appends_then(tmp_path: Path) -> None:
    path = tmp_path / "log"

    class Waited(system.Port):
        wait: Any = None

        def truncate(self, fd: int, size: int) -> None:  # of the first segment
            if self.wait is None:
                self.wait = start(append)
            super().truncate(fd, size)

    def append() -> int:
        with system.replaced(system.Port()), kvspool.open(path) as log:
            return log.append(b"mine")

    port = Waited()
    with system.replaced(port):
        create(path, "kvj").close()
    assert port.wait() == 0
    with reopened(path, "kvj") as log:
        assert [record.value for record in log] == [b"mine"]


# Creators of different kinds.

NAMING = ("flush", "look_up", "make_directory", "names", "remove_directory", "rename", "rename_new", "try_lock_file")


class Stopping(system.Port):
    """Stops its own process before the n-th of some calls."""

    def __init__(self, nth: int, only: tuple[str, ...] = NAMING) -> None:
        self._left = nth
        for name in only:
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGSTOP)
            return call(*args, **options)

        return counted


def creating(path: Path, format: str, port: Stopping) -> Callable[[], str]:
    """Start a process that creates a log through a port; return the function that waits for its result."""

    def run() -> str:
        try:
            with system.replaced(port):
                kvspool.create(path, format=format, **({"capacity": 4096} if format == "spool" else FORMATS[format])).close()
        except LogExists:
            return "exists"
        return "created"

    return start(run)


def is_stopped(creator: Any) -> bool:
    """Return whether a process is stopped, when it is, or has ended."""
    found = os.waitid(os.P_PID, creator.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    return found is not None and found.si_code == os.CLD_STOPPED


@pytest.mark.parametrize("stopped", ["spool", "kvj", "fflg"])
@pytest.mark.parametrize("is_there", [False, True])
def test_of_creators_of_two_kinds_one_succeeds_wherever_the_other_one_is_stopped(tmp_path: Path, stopped: str, is_there: bool) -> None:
    outcomes = set()
    for nth in some(range(1, 100), 2, int(is_there)):
        root = tmp_path / str(nth)
        root.mkdir()
        path = root / "log"
        if is_there:
            path.mkdir()
        one: Any = creating(path, stopped, Stopping(nth))
        if not is_stopped(one):
            assert one() == "created"
            break
        other: Any = creating(path, "sej" if stopped == "spool" else "spool", Stopping(1, ("sleep",)))
        is_waiting = is_stopped(other)
        os.kill(one.pid, signal.SIGCONT)
        if is_waiting:
            os.kill(other.pid, signal.SIGCONT)
        found = (one(), other())
        assert sorted(found) == ["created", "exists"], nth
        outcomes.add(found)
        with kvspool.open(path) as log:
            assert log.kind == (stopped if found[0] == "created" else "sej" if stopped == "spool" else "spool")
            assert log.append(b"x") == 0
    else:
        raise AssertionError("the creator never came to its end")
    assert outcomes == {("created", "exists"), ("exists", "created")}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_spool_replaces_no_directory_that_a_creator_has_locked(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds if the file system has no rename that replaces nothing."""

    class Old(system.Port):
        def rename_new(self, source: Any, target: Any) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(making, "TIMEOUT", 0.01)
    path = tmp_path / "log"
    path.mkdir()
    with system.replaced(Old()):
        with Descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as creator:
            assert system.port.try_lock_file(creator, shared=False)
            with pytest.raises(LockTimeout, match="another process is creating a log"):
                kvspool.create(path, capacity=4096)
            assert os.listdir(tmp_path) == ["log"]
        kvspool.create(path, capacity=4096).close()
        kvspool.create(tmp_path / "other", capacity=4096).close()
    assert sorted(os.listdir(tmp_path)) == ["log", "other"]
