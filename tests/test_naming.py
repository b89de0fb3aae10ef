"""Deleting and renaming logs: nothing of a log that is in use is taken away, and nothing of others.

The crash tests kill or fail each call of the port. `tests/processes/test_naming_storm.py` lets processes do all of it at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import every_log
import pytest
from children import in_child, start
from commands import Run
from endings import Ending
from schedules import ALL

import kvspool
from kvspool import queue, system
from kvspool.engine import making
from kvspool.errors import LogExists, LogInUse, LogNotFound, LogVanished, NameNotDurable, NotALog, Unsupported

KINDS = tuple(kind for kind in every_log.KINDS if kind != "queue")
RENAMED = tuple(kind for kind in KINDS if kind not in ("fflg", "fixed"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a log of each kind, for copies."""
    root = tmp_path_factory.mktemp("made")
    for kind in KINDS:
        (root / kind).mkdir()
        every_log.make(kind, root / kind / "log")
    return root


def copied(made: Path, kind: str, root: Path) -> Path:
    """Copy a log of a kind into a new directory, and return its path."""
    shutil.copytree(made / kind, root)
    return root / "log"


def records(path: Path) -> list[tuple[int, bytes]]:
    with kvspool.open(path) as log:
        return [(record.sequence, record.value) for record in log.read(on_gap="skip")]


def listing(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.lstat().st_ino for path in sorted(root.rglob("*"))}


# Deleted.


@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_log_leaves_nothing_and_its_name_is_free(kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")
    kvspool.delete(path)
    assert list((tmp_path / "root").iterdir()) == []
    every_log.make(kind, path)
    assert records(path)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_a_log_can_have_is_known_as_its_own(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    every_log.make(kind, path)
    for _, deed in every_log.deeds(path):
        deed()
    kvspool.delete(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_open_handles_get_log_vanished(kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")
    with kvspool.open(path) as log, kvspool.open(path) as other:
        following = log.follow(timeout=60)
        next(following)
        kvspool.delete(path)
        with pytest.raises(LogVanished):
            list(following)
        for use in (lambda: log.append(b"four"), lambda: list(log.read()), lambda: log.reader("new"), lambda: other.append_many([b"four"])):
            with pytest.raises(LogVanished):
                use()
        every_log.make(kind, path)
        before = records(path)
        for use in (lambda: log.append(b"four"), lambda: other.append_many([b"four"]), lambda: log.reader("new")):
            with pytest.raises((LogVanished, kvspool.errors.MismatchedFiles)):
                use()
        assert records(path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_in_use_is_refused_and_the_error_names_the_processes(kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")

    def hold(how: str) -> Callable[[], Any]:
        ready, done = os.pipe(), os.pipe()

        def child() -> None:
            with kvspool.open(path) as log:
                reader = log.reader("place") if how == "reader" else None
                if how == "writer":
                    log.append(b"four")
                os.write(ready[1], b"x")
                os.read(done[0], 1)
                if reader is not None:
                    reader.close()

        wait = start(child)
        os.read(ready[0], 1)

        def release() -> int:
            os.write(done[1], b"x")
            wait()
            for end in (*ready, *done):
                os.close(end)
            return int(wait.pid)  # type: ignore[attr-defined]

        return release

    before = records(path)
    for how in ("writer", "reader"):
        release = hold(how)
        try:
            for deed in (lambda: kvspool.delete(path), lambda: kvspool.rename(path, tmp_path / "new")):
                with pytest.raises((LogInUse, Unsupported)) as raised:
                    deed()
                if isinstance(raised.value, LogInUse):
                    told = raised.value
        finally:
            pid = release()
        assert pid in told.processes and f"process {pid} (" in str(told)
        assert records(path)[: len(before)] == before
    kvspool.delete(path)


def test_a_handle_of_the_same_process_is_named(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append(b"one")
        with pytest.raises(LogInUse, match="in this process; nothing was changed") as raised:
            kvspool.delete(tmp_path / "log")
        assert raised.value.processes == (os.getpid(),)
    kvspool.delete(tmp_path / "log")


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_others_are_named_and_nothing_is_removed(kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")
    directories = [path, *(one for one in path.iterdir() if one.is_dir()), *(path.parent.glob(".log.kvspool"))]
    for directory in directories:
        for create in (lambda at: at.write_text("mine"), lambda at: at.mkdir(), lambda at: at.symlink_to(tmp_path), os.mkfifo):
            place = directory / "notes of mine"
            create(place)
            before = listing(tmp_path)
            with pytest.raises(OSError, match="notes of mine") as raised:
                kvspool.delete(path)
            assert raised.value.errno == errno.ENOTEMPTY
            assert {name for name in before if "/writers-" not in name} <= {*listing(tmp_path)}
            place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    kvspool.delete(path)


def test_a_link_to_a_file_of_the_log_is_not_followed(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", format="kvj").close()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "0000000000000000.idx").write_text("precious")
    (tmp_path / "log" / "index").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="index"):
        kvspool.delete(tmp_path / "log")
    assert (tmp_path / "precious" / "0000000000000000.idx").read_text() == "precious"
    assert records(tmp_path / "log") == []


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    queue.create(tmp_path / "queue").close()
    with queue.create(tmp_path / "queue", exist_ok=True) as kept:
        kept.put(b"one")
    kvspool.create(tmp_path / "log", capacity=4096).close()
    (tmp_path / "link").symlink_to("log")
    (tmp_path / "empty").mkdir()
    before = listing(tmp_path)
    for name, error in {"none": LogNotFound, "none/log": LogNotFound, "queue": NotALog, "link": NotALog, "empty": NotALog}.items():
        for deed in (kvspool.delete, lambda path: kvspool.rename(path, tmp_path / "new")):
            with pytest.raises(error):
                deed(tmp_path / name)
    kvspool.delete(tmp_path / "none", missing_ok=True)
    assert listing(tmp_path) == before


def test_a_parent_that_is_a_link_leads_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    kvspool.create(tmp_path / "link" / "log", format="fflg").close()
    kvspool.delete(tmp_path / "link" / "log")
    assert os.listdir(tmp_path / "real") == []


def test_the_note_of_a_copy_goes_with_its_log(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    (tmp_path / ".log.copy").mkdir()
    (tmp_path / ".log.copy" / "note").write_text("{}")
    with pytest.raises(OSError, match="note of a copy"):
        kvspool.rename(tmp_path / "log", tmp_path / "new")
    kvspool.delete(tmp_path / "log")
    assert os.listdir(tmp_path) == []


# Renamed.


@pytest.mark.parametrize("kind", RENAMED)
def test_a_renamed_log_has_all_that_it_had(kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")
    with kvspool.open(path) as log:
        before = (records(path), log.log_id, [(one.name, one.sequence) for one in log.readers()], len(log.producers()))
    (tmp_path / "other").mkdir()
    new = tmp_path / "other" / "new"
    kvspool.rename(path, new)
    assert os.listdir(tmp_path / "root") == []
    with kvspool.open(new) as log:
        assert (records(new), log.log_id, [(one.name, one.sequence) for one in log.readers()], len(log.producers())) == before
        log.append(b"four")
    every_log.make(kind, path)
    kvspool.delete(new)
    assert records(path)


@pytest.mark.parametrize("kind", RENAMED)
def test_nothing_is_replaced(kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    kvspool.create(tmp_path / "other", capacity=4096).close()
    before = listing(tmp_path)
    for name in ("empty", "file", "dangling", "other", "root/log"):
        with pytest.raises(LogExists):
            kvspool.rename(path, tmp_path / name)
    with pytest.raises(FileNotFoundError):
        kvspool.rename(path, tmp_path / "none" / "log")
    with pytest.raises(ValueError, match="choose another name"):
        kvspool.rename(path, tmp_path / f".x.{'0f' * 16}.deleted")
    assert {*before} <= {*listing(tmp_path)} and records(path)


@pytest.mark.parametrize("kind", ["fflg", "fixed"])
def test_a_journal_with_settings_in_a_second_directory_cannot_be_renamed(kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")
    with kvspool.open(path) as log:
        assert "rename" not in log.capabilities
    with pytest.raises(Unsupported, match="copy it"):
        kvspool.rename(path, tmp_path / "new")
    assert records(path) and not (tmp_path / "new").exists()


def test_a_handle_of_a_renamed_journal_changes_nothing_at_the_old_path(tmp_path: Path) -> None:
    for format in ("kvj", "sej"):
        path = tmp_path / format
        with kvspool.create(path, format=format) as log:
            log.append(b"one")
        with kvspool.open(path) as log:
            kvspool.rename(path, tmp_path / "new")
            kvspool.create(path, format=format).close()
            for use in (lambda log=log: log.append(b"two"), lambda log=log: log.reader("r"), lambda log=log: log.set_retention(None)):
                with pytest.raises(LogVanished):
                    use()
        assert records(path) == [] and records(tmp_path / "new") == [(0, b"one")]
        kvspool.delete(tmp_path / "new")


# Waiters, forced to be in between.


class Meanwhile(system.Port):
    """Calls a function once, before the first rename that replaces nothing, in this process, with the system's own port."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def rename_new(self, source: Any, target: Any) -> None:
        work, self._work = self._work, None
        if work is not None:
            with system.replaced(system.REAL):
                work()
        super().rename_new(source, target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deed", ["append", "append_many", "reader", "producer", "resize", "delete_reader", "open", "rename", "delete"])
def test_a_process_that_waits_during_a_deletion_changes_nothing_afterwards(deed: str, kind: str, tmp_path: Path, made: Path) -> None:
    path = copied(made, kind, tmp_path / "root")
    new = tmp_path / "new"
    has_begun, may_begin = threading.Event(), threading.Event()
    outcome: list[object] = []
    log = kvspool.open(path, timeout=60)

    def use() -> None:
        may_begin.wait()
        uses: dict[str, Callable[[], object]] = {
            "append": lambda: log.append(b"four"),
            "append_many": lambda: log.append_many([b"four"]),
            "reader": lambda: log.reader("new"),
            "producer": lambda: log.producer("new").append_many([b"four"], batch=0),
            "resize": lambda: log.resize(65536),
            "delete_reader": lambda: log.delete_reader("place"),
            "open": lambda: kvspool.open(path, timeout=60).append(b"four"),
            "rename": lambda: kvspool.rename(path, new, timeout=60),
            "delete": lambda: kvspool.delete(path, timeout=60),
        }
        has_begun.set()
        try:
            outcome.append(uses[deed]())
        except Exception as error:  # checked below
            outcome.append(error)

    thread = threading.Thread(target=use)
    thread.start()

    def work() -> None:
        may_begin.set()
        has_begun.wait()
        thread.join(0.05)  # it should wait; if it is late, it comes after the deletion, which must be as good

    with system.replaced(Meanwhile(work)):
        kvspool.delete(path)
    every_log.make(kind, path)
    before, names = records(path), listing(tmp_path)
    thread.join()
    assert isinstance(outcome[0], Exception) or deed in ("delete", "rename", "open") or outcome == [None], outcome
    if deed in ("append", "append_many", "reader", "producer", "resize", "delete_reader"):
        expected = (LogVanished, Unsupported, kvspool.errors.MismatchedFiles)
        assert isinstance(outcome[0], expected), outcome
        assert records(path) == before
        assert {*names} <= {*listing(tmp_path)}
    log.close()


def test_a_creator_that_comes_during_a_deletion_keeps_its_log(tmp_path: Path, made: Path) -> None:
    for first in KINDS:
        for second in ("spool", "kvj", "fflg", "fixed"):
            path = copied(made, first, tmp_path / f"{first}-{second}")

            class Creating(system.Port):
                """Creates a log as soon as the name is free, in another thread: creators may wait for the deletion."""

                thread: threading.Thread | None = None

                def rename_new(self, source: Any, target: Any) -> None:
                    super().rename_new(source, target)
                    if self.thread is None and str(target).endswith(making.DELETED):
                        self.thread = threading.Thread(target=every_log.make, args=(second, path))  # noqa: B023
                        self.thread.start()
                        self.thread.join(0.02)

            port = Creating()
            with system.replaced(port):
                kvspool.delete(path)
            assert port.thread is not None
            port.thread.join()
            assert records(path)
            with kvspool.open(path) as log:
                log.append(b"four")
            hidden = {name for name in os.listdir(path.parent) if name != "log"}
            assert hidden == ({".log.kvspool"} if second in ("fflg", "fixed") else set())


# Killed and failed.


def states(made: Path, kind: str, root: Path, deed: Callable[[Path], None], number: int = signal.SIGKILL) -> Iterator[tuple[int, Path]]:
    """Yield the path of a copied log, for each call of the port before which a child that did the deed to it was killed."""
    step = 1 if ALL else 5
    for nth in range(1 + KINDS.index(kind) % step, 1000, step):  # other calls of each kind
        path = copied(made, kind, root / f"{nth}")
        child = os.fork()
        if child == 0:
            try:
                with system.replaced(Ending(nth, number)):
                    deed(path)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        yield nth, path
        if not os.WIFSIGNALED(status):
            assert nth > 20
            return
        shutil.rmtree(path.parent)
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("kind", KINDS)
def test_a_deletion_killed_at_any_call_leaves_the_whole_log_or_is_finished_by_the_next_one(kind: str, tmp_path: Path, made: Path) -> None:
    expected = records(made / kind / "log")
    seen = set()
    for nth, path in states(made, kind, tmp_path / "states", kvspool.delete):
        (path.parent / "other").write_text("mine")
        if path.exists():
            assert records(path) == expected, nth
            with kvspool.open(path) as log:
                log.append(b"four")
            seen.add("whole")
            kvspool.delete(path)
        elif nth % 2:
            seen.add("gone")
            kvspool.delete(path, missing_ok=True)
        else:
            seen.add("gone")
            kvspool.create(path, capacity=4096).close()
            kvspool.delete(path)
        assert os.listdir(path.parent) == ["other"], nth
    assert seen == {"whole", "gone"}


@pytest.mark.parametrize("kind", ["fflg", "fixed"])
def test_a_log_that_follows_a_killed_deletion_keeps_its_settings(kind: str, tmp_path: Path, made: Path) -> None:
    for nth, path in states(made, kind, tmp_path / "states", kvspool.delete):
        if not path.exists():
            every_log.make(kind, path)
            before = records(path)
            with kvspool.open(path) as log:
                retention = log.retention
            kvspool.delete(path.parent / "none", missing_ok=True)
            with kvspool.open(path) as log:
                assert log.retention == retention
                log.append(b"four")
            assert records(path)[: len(before)] == before, nth


@pytest.mark.parametrize("kind", RENAMED)
def test_a_renaming_killed_at_any_call_leaves_the_whole_log_under_one_name(kind: str, tmp_path: Path, made: Path) -> None:
    expected = records(made / kind / "log")
    seen = set()
    for nth, path in states(made, kind, tmp_path / "states", lambda path: kvspool.rename(path, path.with_name("new"))):
        (name,) = os.listdir(path.parent)
        seen.add(name)
        assert records(path.with_name(name)) == expected, nth
        with kvspool.open(path.with_name(name)) as log:
            log.append(b"four")
    assert seen == {"log", "new"}


class Failing(system.Port):
    """Lets the n-th call of the given ones fail."""

    def __init__(self, name: str, nth: int) -> None:
        self.left = nth
        inner = getattr(self, name)

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if not self.left:
                raise OSError(errno.EIO, "failed for the test")
            return inner(*args, **options)

        setattr(self, name, call)


CALLS = ("open", "flush", "names", "look_up", "remove", "remove_directory", "rename_new", "status", "try_lock_file", "identity", "map")


@pytest.mark.parametrize("kind", ["spool", "kvj", "fixed"])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_any_call_leaves_the_log_whole_or_deleted(call: str, kind: str, tmp_path: Path, made: Path) -> None:
    expected = records(made / kind / "log")
    for nth in range(1, 100, 1 if ALL else 2):
        path = copied(made, kind, tmp_path / f"{nth}")
        port = Failing(call, nth)
        with system.replaced(port):
            try:
                kvspool.delete(path)
                error = None
            except OSError as raised:
                error = raised
        if path.exists():
            assert error is not None and not isinstance(error, NameNotDurable)
            assert records(path) == expected
            with kvspool.open(path) as log:
                log.append(b"four")
        if isinstance(error, NameNotDurable):
            assert call == "flush" and not path.exists() and error.done == f"{path} was deleted"
        kvspool.delete(path, missing_ok=True)
        assert os.listdir(path.parent) == [], (nth, error)
        if port.left > 0:
            return
    raise AssertionError("it never came to its end")


def test_nothing_is_removed_before_the_deletion_is_on_disk(tmp_path: Path, made: Path) -> None:
    path = copied(made, "kvj", tmp_path / "root")
    with system.replaced(Failing("flush", 1)), pytest.raises(NameNotDurable):
        kvspool.delete(path)
    (left,) = path.parent.iterdir()
    left.rename(path)  # as a crash of the machine may
    assert records(path) == records(made / "kvj" / "log")


# Leftovers.


def test_a_restored_copy_of_a_leftover_and_a_directory_of_a_user_stay(tmp_path: Path, made: Path) -> None:
    path = copied(made, "kvj", tmp_path / "root")
    with system.replaced(Failing("flush", 1)), pytest.raises(NameNotDurable):
        kvspool.delete(path)
    (left,) = path.parent.iterdir()
    shutil.copytree(left, tmp_path / "backup")
    kvspool.create(path, format="kvj").close()
    assert os.listdir(path.parent) == ["log"]
    shutil.copytree(tmp_path / "backup", left)
    (path.parent / f".log.{'0f' * 16}.deleted").symlink_to(tmp_path)
    before = listing(path.parent)
    with kvspool.open(path) as log:
        log.append(b"four")
    kvspool.delete(path)
    assert records(left) == records(made / "kvj" / "log")
    assert {name for name in before if not name.startswith("log")} == {*listing(path.parent)}


def test_a_living_deletion_is_not_finished_by_others(tmp_path: Path, made: Path) -> None:
    path = copied(made, "kvj", tmp_path / "root")

    class Looking(system.Port):
        def remove(self, path: Any) -> None:
            with system.replaced(system.REAL):
                kvspool.delete(other, missing_ok=True)
            super().remove(path)

    other = path
    with system.replaced(Looking()):
        kvspool.delete(path)
    assert os.listdir(path.parent) == []


def test_doctor_names_the_remains_of_a_killed_deletion(tmp_path: Path, made: Path, run: Run) -> None:

    path = copied(made, "kvj", tmp_path / "root")
    with system.replaced(Failing("flush", 1)), pytest.raises(NameNotDurable):
        kvspool.delete(path)
    assert "kvspool rm" in run("doctor", path.parent, "--json").out
    run("rm", path, "--missing-ok")
    assert os.listdir(path.parent) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("format", ["spool", "kvj"])
def test_another_user_with_read_permission_deletes_nothing(format: str) -> None:
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    try:
        path = root / "log"
        with kvspool.create(path, format=format, mode=0o644) as log:
            log.append(b"one")

        def attempt() -> None:
            os.setuid(65534)
            with pytest.raises(PermissionError):
                kvspool.delete(path)

        in_child(attempt)
        assert records(path) == [(0, b"one")]
    finally:
        shutil.rmtree(root)
