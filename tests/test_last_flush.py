"""An operation whose last flush fails says whether it was done: NameNotDurable where it was, any other error where it wasn't."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from children import Died, start
from faults import DirectoryPort

import hub
import kvspool
from hub.root import retention
from hub.security import private
from kvspool import system
from kvspool.engine.retention import Retention
from kvspool.errors import NameNotDurable
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system import disk

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Operation(NamedTuple):
    """prepare: what is there before. run: the operation. state: what it changes."""

    prepare: Callable[[Path], Any]
    run: Callable[[Path], Any]
    state: Callable[[Path], Any]


def nothing(path: Path) -> None:
    """Prepare nothing."""


def spool(path: Path) -> None:
    with kvspool.create(path, capacity=4096) as log:
        log.append_many([b"x"] * 10)


def journal(format: str, **limits: Any) -> Callable[[Path], None]:
    def prepare(path: Path) -> None:
        with kvspool.create(path, format=format, **limits) as log:  # type: ignore[call-overload]
            log.append_many([bytes(8)] * 40)
            if format != "fixed":
                log.reader("r", 0).close()

    return prepare


def commit(path: Path) -> None:
    with kvspool.open(path) as log, log.reader("r", 0) as reader:
        list(reader.read())
        reader.commit()


def place(path: Path) -> int | None:
    with kvspool.open(path) as log:
        return next((one.sequence for one in log.readers() if one.name == "r"), None)


def bases(path: Path) -> list[int]:
    with kvspool.open(path, format="kvj") as log:
        return log.bases()


def plain_segments(path: Path) -> list[str]:
    """Return the segments that count in their uncompressed form."""
    return sorted(name for name in os.listdir(path / "kvj") if name.endswith(".kvj"))


def opened(path: Path, work: Callable[[Any], Any]) -> Any:
    with kvspool.open(path) as log:
        return work(log)


def hub_root(path: Path) -> None:
    with hub.create(path) as root:
        kvspool.create(path / "c.1.000", format="kvj").close()
        kvspool.open(path / "c.1.000").append(b"x")
        root.reader("r").close()


def hub_commit(path: Path) -> None:
    with hub.open(path) as root, root.reader("r") as reader:
        list(reader.read())
        reader.commit()


def hub_place(path: Path) -> bytes | None:
    file = path / ".hub" / "readers" / "r.positions"
    return file.read_bytes() if file.exists() else None


SEGMENTS = {"segment_bytes": 256}
CHANGES = {
    "create a spool": Operation(nothing, lambda path: kvspool.create(path, capacity=4096).close(), os.path.lexists),
    "resize": Operation(spool, lambda path: kvspool.resize(path, 8192), lambda path: opened(path, lambda log: log.capacity)),
    "trim": Operation(journal("kvj", **SEGMENTS), lambda path: opened(path, lambda log: log.trim(before=30, force=True)), bases),
    "archive": Operation(journal("kvj", **SEGMENTS), lambda path: opened(path, lambda log: log.archive(before=8)), plain_segments),
    "commit kvj": Operation(journal("kvj"), commit, place),
    "commit sej": Operation(journal("sej"), commit, place),
    "commit fflg": Operation(journal("fflg"), commit, place),
    "delete a reader": Operation(journal("kvj"), lambda path: opened(path, lambda log: log.delete_reader("r")), place),
    "prune": Operation(
        journal("fixed", item_bytes=8, items_per_blob=10),
        lambda path: opened(path, lambda log: log.prune(25)),
        lambda path: opened(path, lambda log: log.oldest()),
    ),
    "hub commit": Operation(hub_root, hub_commit, hub_place),
    "hub delete": Operation(hub_root, lambda path: hub.open(path).delete_reader("r"), hub_place),
    "hub retention": Operation(
        hub_root, lambda path: retention.change(path, lambda old: old.with_rules("c", Retention(max_age=1))), retention.load
    ),
    "secret": Operation(nothing, lambda path: private.write(path, b"x"), os.path.lexists),
}
CREATIONS = {
    "kvj": Operation(nothing, lambda path: kvspool.create(path, format="kvj").close(), os.path.lexists),
    "sej": Operation(nothing, lambda path: kvspool.create(path, format="sej").close(), os.path.lexists),
    "fflg": Operation(nothing, lambda path: kvspool.create(path, format="fflg").close(), os.path.lexists),
    "queue": Operation(nothing, lambda path: kvspool.queue.create(path).close(), os.path.lexists),
    "hub root": Operation(nothing, lambda path: hub.create(path).close(), os.path.lexists),
    "a directory": Operation(nothing, disk.make_directory, os.path.lexists),
}


def outcomes(tmp_path: Path, operation: Operation) -> list[bool]:
    """Let each flush of a directory fail in its turn; return whether NameNotDurable said that the operation was done."""
    found = []
    for nth in range(1, 100):
        (tmp_path / str(nth)).mkdir()
        path = tmp_path / str(nth) / "it"
        operation.prepare(path)
        before = operation.state(path)
        port = DirectoryPort(nth)
        try:
            with system.replaced(port):
                operation.run(path)
        except OSError as error:
            assert error.errno == errno.EIO
            assert isinstance(error, NameNotDurable) == (operation.state(path) != before), f"flush {nth}"
            found.append(isinstance(error, NameNotDurable))
            if not found[-1]:
                operation.run(path)  # it can be done again
        else:
            if not port.has_failed:
                return found
    raise AssertionError


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_whose_last_flush_fails_says_that_it_was_done(tmp_path: Path, name: str) -> None:
    assert outcomes(tmp_path, CHANGES[name])[-1]


@pytest.mark.parametrize("name", CREATIONS)
def test_a_creation_whose_last_flush_fails_leaves_nothing(tmp_path: Path, name: str) -> None:
    found = outcomes(tmp_path, CREATIONS[name])
    assert found and not any(found)


class AppendedMeanwhile(system.Port):
    """Lets the flush of a directory fail with `error` after another handle has appended to the log there."""

    def __init__(self, path: Path, error: BaseException) -> None:
        self.path = path
        self.error = error

    def flush(self, fd: int) -> None:
        if os.path.samestat(os.fstat(fd), os.stat(self.path.parent)):
            with system.replaced(system.Port()), kvspool.open(self.path) as log:
                assert log.append(b"meanwhile", durable=True) == 0
            raise self.error
        super().flush(fd)


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()], ids=["a failure", "Ctrl-C"])
def test_a_created_spool_that_others_append_to_stays_whatever_its_last_flush_does(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "log"
    is_failure = isinstance(error, OSError)
    with system.replaced(AppendedMeanwhile(path, error)), pytest.raises(NameNotDurable if is_failure else KeyboardInterrupt) as raised:
        kvspool.create(path, capacity=4096)
    if isinstance(raised.value, NameNotDurable):
        assert str(raised.value).startswith(f"{path} was created, but")
        assert raised.value.directory == str(tmp_path)
    with kvspool.open(path) as log:
        assert [record.value for record in log.read()] == [b"meanwhile"]
        assert log.append(b"more") == 1
    assert os.listdir(tmp_path) == ["log"]


def test_a_created_spool_takes_no_record_before_its_name_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with system.replaced(DirectoryPort(2)), pytest.raises(NameNotDurable, match="was created, but"):
        kvspool.create(path, capacity=4096)
    with kvspool.open(path) as log:
        with system.replaced(DirectoryPort(1, every=True)):
            assert list(log) == []
            with pytest.raises(OSError, match="Input/output") as raised:
                log.append(b"refused")
        assert "takes no records before" in raised.value.__notes__[0]
        port = DirectoryPort(100)
        with system.replaced(port):
            assert log.append(b"taken") == 0
            assert log.append(b"taken") == 1
        assert port.left == 99, "the directory is flushed once"


def test_the_error_says_what_was_done_and_what_to_do_next(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with system.replaced(DirectoryPort(1)), pytest.raises(NameNotDurable) as raised:
        disk.replace(tmp_path / "file", b"new", 0o600, done="the file has other bytes")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert str(raised.value).startswith("the file has other bytes, but a crash of the machine may undo it")
    assert str(raised.value).endswith(f"run `sync {tmp_path}`")
    assert (raised.value.done, raised.value.directory) == ("the file has other bytes", str(tmp_path))
    assert (raised.value.errno, raised.value.exit_code) == (errno.EIO, 6)


def test_a_resized_log_takes_no_record_before_its_name_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    spool(path)
    with kvspool.open(path) as open_before, open_before.reader("durable", 0) as reader:
        with system.replaced(DirectoryPort(3)), pytest.raises(NameNotDurable, match="was resized to 8192 bytes"):
            kvspool.resize(path, 8192)
        with kvspool.open(path) as log:
            for one in (log, open_before):
                with system.replaced(DirectoryPort(1, every=True)):
                    assert one.capacity == 8192
                    assert len(list(one)) == 10
                    with pytest.raises(OSError, match="Input/output") as raised:
                        one.append(b"refused")
                    assert len(list(one)) == 10
                assert not isinstance(raised.value, NameNotDurable)
                assert "takes no records before" in raised.value.__notes__[0]
            port = DirectoryPort(100)
            with system.replaced(port):
                assert log.append(b"taken") == 10
                assert log.append(b"taken") == 11
            assert port.left == 99, "the directory is flushed once"
            assert open_before.append(b"taken") == 12
            assert len(list(reader.read())) == 13
            assert reader.commit() == 13
    kvspool.resize(path, 4096)
    assert os.listdir(tmp_path) == ["log"]


def test_files_that_a_resize_put_aside_stay_while_their_directory_cannot_be_flushed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    spool(path)
    with system.replaced(DirectoryPort(3)), pytest.raises(NameNotDurable):
        kvspool.resize(path, 8192)
    there = sorted(os.listdir(tmp_path))
    assert len(there) == 2
    with system.replaced(DirectoryPort(1, every=True)), pytest.raises(OSError, match="Input/output"):
        kvspool.resize(path, 16384)
    assert sorted(os.listdir(tmp_path)) == there


class KilledAtTheFlush(system.Port):
    """Kills the process at the flush of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def flush(self, fd: int) -> None:
        if os.path.samestat(os.fstat(fd), os.stat(self.directory)):
            os.kill(os.getpid(), signal.SIGKILL)
        super().flush(fd)


@pytest.mark.parametrize(
    ("prepare", "change", "records"),
    [(nothing, lambda path: kvspool.create(path, capacity=8192), 0), (spool, lambda path: kvspool.resize(path, 8192), 10)],
    ids=["create", "resize"],
)
def test_if_a_process_is_killed_before_the_last_flush_the_first_writer_flushes_the_directory(
    tmp_path: Path, prepare: Callable[[Path], Any], change: Callable[[Path], Any], records: int
) -> None:
    path = tmp_path / "log"
    prepare(path)

    def changing() -> None:
        with system.replaced(KilledAtTheFlush(tmp_path)):
            change(path)

    changer = start(changing)
    with pytest.raises(Died):
        changer()
    assert SpoolFiles(path).may_have_moved
    port = DirectoryPort(100)
    with system.replaced(port), kvspool.open(path) as log:
        assert log.capacity == 8192
        assert log.append(b"after") == records
    assert port.left == 99
    assert not SpoolFiles(path).may_have_moved
