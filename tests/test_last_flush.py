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
from kvspool.errors import NameNotDurable
from kvspool.journal.retention import Retention
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
    "spool": Operation(nothing, lambda path: kvspool.create(path, capacity=4096).close(), os.path.lexists),
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


def test_a_creation_that_cannot_be_undone_says_that_the_log_is_there(tmp_path: Path) -> None:
    class Stuck(DirectoryPort):
        def rename(self, source: Any, target: Any) -> None:
            if self.has_failed:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().rename(source, target)

    with system.replaced(Stuck(2)), pytest.raises(NameNotDurable, match="was created, but") as raised:
        kvspool.create(tmp_path / "log", capacity=4096)
    assert raised.value.directory == str(tmp_path)
    with kvspool.open(tmp_path / "log") as log:
        assert log.append(b"it is whole") == 0


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
    """Kills the process at the first flush after two directories changed places."""

    has_exchanged = False

    def exchange(self, one: Any, other: Any) -> None:
        super().exchange(one, other)
        self.has_exchanged = True

    def flush(self, fd: int) -> None:
        if self.has_exchanged:
            os.kill(os.getpid(), signal.SIGKILL)
        super().flush(fd)


def test_after_a_resize_that_is_killed_before_its_last_flush_the_first_writer_flushes_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    spool(path)

    def resize() -> None:
        with system.replaced(KilledAtTheFlush()):
            kvspool.resize(path, 8192)

    resizer = start(resize)
    with pytest.raises(Died):
        resizer()
    assert SpoolFiles(path).may_have_moved
    port = DirectoryPort(100)
    with system.replaced(port), kvspool.open(path) as log:
        assert log.capacity == 8192
        assert log.append(b"after") == 10
    assert port.left == 99
    assert not SpoolFiles(path).may_have_moved
