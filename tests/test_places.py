"""`kvspool.delete` and `kvspool.rename`: every kind of log, whatever is refused, fails or is killed."""

from __future__ import annotations

import errno
import os
import pty
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child
from every_log import KINDS, make
from faults import FILE_CALLS, FailingPort
from trees import tree

import hub
import kvspool
import shard
from kvspool import errors, system
from kvspool.cli import main
from kvspool.kernel.frames import TWIN
from kvspool.spool import format

LOGS = [kind for kind in KINDS if kind != "queue"]
KILLED = ["resized", "kvj", "fflg", "fixed"]
# That change something, or take a lock; before any other call things are as after the last one of these.
CALLS = ("make_directory", "rename", "flush", "remove", "remove_directory", "link", "try_lock", "try_lock_file", "unlock_all")


class Killing(system.Port):
    """Kills the process before the n-th call."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.left = nth
        for name in CALLS:
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted


def content(path: Path) -> tuple[list[Any], list[str], str]:
    """Return the records, the durable readers and the settings of a log."""
    with kvspool.open(path) as log:
        records = [(one.sequence, one.key, one.value, one.timestamp) for one in log.read(on_gap="skip")]  # type: ignore[union-attr]
        readers = [reader.name for reader in log.readers()]  # type: ignore[union-attr]
        stats = log.stats()
        return records, readers, f"{stats.codec} {stats.durability}"  # type: ignore[union-attr]


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".deleted")]


@pytest.mark.parametrize("kind", LOGS)
def test_a_deleted_log_leaves_nothing_and_another_one_may_take_its_place(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    kvspool.delete(tmp_path / "log")
    assert os.listdir(tmp_path) == []
    with pytest.raises(errors.LogNotFound):
        kvspool.delete(tmp_path / "log")
    make(kind, tmp_path / "log")


@pytest.mark.parametrize("kind", LOGS)
def test_a_renamed_log_is_what_it_was_and_takes_records(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    (tmp_path / "folder").mkdir()
    before = content(tmp_path / "log")
    kvspool.rename(tmp_path / "log", tmp_path / "folder" / "new")
    assert os.listdir(tmp_path) == ["folder"]
    assert content(tmp_path / "folder" / "new") == before
    with kvspool.open(tmp_path / "folder" / "new") as log, log.reader("place") as reader:  # type: ignore[union-attr]
        sequence = log.append(b"last")  # type: ignore[union-attr]
        assert [one.sequence for one in reader.read(on_gap="skip")][-1] == sequence
    with pytest.raises(errors.LogNotFound):
        kvspool.open(tmp_path / "log")
    make(kind, tmp_path / "log")


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("deed", ["delete", "rename"])
def test_a_log_in_use_is_refused_and_its_user_named(tmp_path: Path, kind: str, deed: str) -> None:
    path = tmp_path / "log"
    make(kind, path)

    def act() -> None:
        kvspool.delete(path) if deed == "delete" else kvspool.rename(path, tmp_path / "new")

    with kvspool.open(path) as log, log.reader("place"):  # type: ignore[union-attr]
        with pytest.raises(errors.LockTimeout, match=f"durable reader.*open.*({os.getpid()}|is locked)"):
            act()
    if TWIN == "compiled" or kind not in ("spool", "resized"):  # an interpreted writer of a spool holds its lock during an append alone
        with kvspool.open(path) as log:
            log.append(b"four")  # type: ignore[union-attr]
            with pytest.raises(errors.LockTimeout, match=f"is open for writing; process {os.getpid()} "):
                act()
    with kvspool.open(path) as log:
        list(log.read(on_gap="skip"))  # type: ignore[union-attr]
        act()
    assert not path.exists()


@pytest.mark.parametrize("kind", LOGS)
def test_open_handles_read_on_after_a_rename_and_report_a_deleted_log(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    with kvspool.open(tmp_path / "log") as log:
        kvspool.delete(tmp_path / "log")
        assert log.has_vanished()  # type: ignore[union-attr]
        with pytest.raises((errors.LogVanished, errors.LogNotFound)):
            log.append(b"four")  # type: ignore[union-attr]
    assert os.listdir(tmp_path) == []


def test_a_spool_that_is_open_reads_on_under_its_new_name(tmp_path: Path) -> None:
    make("spool", tmp_path / "log")
    with kvspool.open(tmp_path / "log") as log:
        before = [record.value for record in log.read()]  # type: ignore[union-attr]
        kvspool.rename(tmp_path / "log", tmp_path / "new")
        assert not log.has_vanished()  # type: ignore[union-attr]
        with kvspool.open(tmp_path / "new") as other:
            other.append(b"more")  # type: ignore[union-attr]
        assert [record.value for record in log.read()] == [*before, b"more"]  # type: ignore[union-attr]


def _directory(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_bytes(b"data")


def _link(path: Path) -> None:
    make("spool", path.with_name("other"))
    path.symlink_to("other")


def _shards(path: Path) -> None:
    shard.create(path, bits=1, capacity=4096).close()


def _hub(path: Path) -> None:
    with hub.create(path) as root:
        root.create_client("a", bits=0, capacity=4096).close()


@pytest.mark.parametrize(
    "lay",
    [_directory, _link, _shards, _hub, Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere"), lambda path: make("queue", path)],
    ids=["directory", "link", "shards", "hub", "empty", "file", "dangling", "queue"],
)
def test_what_is_no_log_is_refused_and_stays(tmp_path: Path, lay: Callable[[Path], None]) -> None:
    lay(tmp_path / "log")
    before = tree(tmp_path)
    with pytest.raises(errors.NotALog):
        kvspool.delete(tmp_path / "log")
    with pytest.raises(errors.NotALog):
        kvspool.rename(tmp_path / "log", tmp_path / "new")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("name", ["precious", "spool.ctl.bak", "link", "folder/x", "jnl/precious", "kvj/precious", "ofs2/x"])
def test_other_files_in_the_directory_of_a_log_are_refused_and_stay(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "log"
    make(kind, path)
    if name == "link":
        (path / "0000000000000000.link").symlink_to(tmp_path)
    else:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"precious")
    before = tree(tmp_path)
    for act in (lambda: kvspool.delete(path), lambda: kvspool.rename(path, tmp_path / "new")):
        with pytest.raises(OSError, match="holds other files") as raised:
            act()
        assert raised.value.errno == errno.ENOTEMPTY
    assert tree(tmp_path) == before


def test_a_rename_onto_something_is_refused(tmp_path: Path) -> None:
    make("spool", tmp_path / "log")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link", "log"):
        with pytest.raises(errors.LogExists):
            kvspool.rename(tmp_path / "log", tmp_path / name)
    with pytest.raises(FileNotFoundError):
        kvspool.rename(tmp_path / "log", tmp_path / "missing" / "log")
    with kvspool.open(tmp_path / "log") as log:
        assert log.append(b"more")  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [format.CONTROL_FILE, format.DATA_FILE])
@pytest.mark.parametrize("harm", ["gone", "cut", "garbage"])
def test_a_damaged_spool_is_deleted_too(tmp_path: Path, name: str, harm: str) -> None:
    make("spool", tmp_path / "log")
    file = tmp_path / "log" / name
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(b"" if harm == "cut" else os.urandom(100_000))
    kvspool.delete(tmp_path / "log")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", KILLED)
def test_a_deletion_that_is_killed_at_any_call_leaves_the_whole_log_or_none(tmp_path: Path, kind: str) -> None:
    ends = set()
    for nth in range(1, 400):
        folder = tmp_path / f"{nth}"
        folder.mkdir()
        make(kind, folder / "log")
        before = content(folder / "log")

        def deleted(nth: int = nth, folder: Path = folder) -> None:
            with system.replaced(Killing(nth)):
                kvspool.delete(folder / "log")

        try:
            in_child(deleted)
            assert os.listdir(folder) == []
            break
        except Died as died:
            assert died.signal == signal.SIGKILL
        is_there = (folder / "log").exists()
        ends.add((is_there, bool(hidden(folder))))
        if is_there:
            assert content(folder / "log") == before
            kvspool.delete(folder / "log")
        kvspool.create(folder / "log", capacity=4096).close()
        assert os.listdir(folder) == ["log"] or kind in ("fflg", "fixed")
    else:
        raise AssertionError("the deletion never came to its end")
    assert {(True, False), (False, True)} <= ends


@pytest.mark.parametrize("kind", KILLED)
def test_a_rename_that_is_killed_at_any_call_leaves_the_whole_log_at_one_of_the_names(tmp_path: Path, kind: str) -> None:
    ends = set()
    for nth in range(1, 400):
        folder = tmp_path / f"{nth}"
        folder.mkdir()
        make(kind, folder / "log")
        before = content(folder / "log")

        def renamed(nth: int = nth, folder: Path = folder) -> None:
            with system.replaced(Killing(nth)):
                kvspool.rename(folder / "log", folder / "new")

        try:
            in_child(renamed)
            assert content(folder / "new") == before
            break
        except Died as died:
            assert died.signal == signal.SIGKILL
        there = [name for name in ("log", "new") if (folder / name).exists()]
        assert len(there) == 1
        ends.add(there[0])
        assert content(folder / there[0]) == before
        kvspool.rename(folder / there[0], folder / ("new" if there == ["log"] else "log"))
        assert content(folder / ("new" if there == ["log"] else "log")) == before
    else:
        raise AssertionError("the rename never came to its end")
    assert ends == {"log", "new"}


@pytest.mark.parametrize("kind", ["resized", "kvj", "fixed"])
@pytest.mark.parametrize("deed", ["delete", "rename"])
@pytest.mark.parametrize("every", [False, True], ids=["once", "from then on"])
def test_a_failure_at_any_call_leaves_the_log_or_says_what_was_done(tmp_path: Path, kind: str, deed: str, every: bool) -> None:
    failures = 0
    for nth in range(1, 400):
        folder = tmp_path / f"{nth}"
        folder.mkdir()
        make(kind, folder / "log")
        before = content(folder / "log")
        port = FailingPort(nth, errno.EIO, (*FILE_CALLS, "remove", "remove_directory", "link"), every=every)
        try:
            with system.replaced(port):
                kvspool.delete(folder / "log") if deed == "delete" else kvspool.rename(folder / "log", folder / "new")
        except errors.NameNotDurable:
            assert not (folder / "log").exists()
        except OSError:
            there = [name for name in ("log", "new") if (folder / name).exists()]
            if there:
                assert content(folder / there[0]) == before, port.failed
            else:
                assert deed == "delete", port.failed
        else:
            if not port.failed:
                break
            assert not (folder / "log").exists()
        failures += 1
    else:
        raise AssertionError("it never came to its end")
    assert failures > 5


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("deed", ["delete", "rename"])
def test_the_names_are_on_disk_when_the_call_returns(tmp_path: Path, kind: str, deed: str) -> None:
    on_disk: dict[str, set[str]] = {}

    class Flushing(system.Port):
        def flush(self, fd: int) -> None:
            super().flush(fd)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                on_disk[os.readlink(f"/proc/self/fd/{fd}")] = set(os.listdir(fd))

    make(kind, tmp_path / "log")
    (tmp_path / "folder").mkdir()
    with system.replaced(Flushing()):
        kvspool.delete(tmp_path / "log") if deed == "delete" else kvspool.rename(tmp_path / "log", tmp_path / "folder" / "new")
    assert on_disk[str(tmp_path)] == {"folder"} == set(os.listdir(tmp_path))
    if deed == "rename":
        assert on_disk[str(tmp_path / "folder")] == set(os.listdir(tmp_path / "folder"))


def test_the_commands_delete_and_rename(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("spool", tmp_path / "log")
    assert main(["rename", str(tmp_path / "log"), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == f"renamed {tmp_path}/log to {tmp_path}/new\n"
    assert main(["rename", str(tmp_path / "log"), str(tmp_path / "new")]) == 3
    assert main(["delete", str(tmp_path / "new"), "--yes"]) == 0
    assert capsys.readouterr().out == f"deleted {tmp_path}/new\n"
    assert main(["delete", str(tmp_path / "new"), "--yes"]) == 3
    assert main(["delete", str(tmp_path), "--yes"]) == 4


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), (None, 2)])
def test_the_command_asks_on_a_terminal_and_needs_a_word_elsewhere(tmp_path: Path, answer: str | None, code: int) -> None:
    make("kvj", tmp_path / "log")
    command = [sys.executable, "-m", "kvspool.cli", "delete", str(tmp_path / "log")]
    if answer is None:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert (done.returncode, "give --yes" in done.stderr) == (code, True)
    else:
        ours, theirs = pty.openpty()
        try:
            os.write(ours, answer.encode())
            done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60)
        finally:
            os.close(ours)
            os.close(theirs)
        assert done.returncode == code
        assert done.stderr.startswith(f"Delete {tmp_path}/log with all of its records? [y/N] ")
    assert (tmp_path / "log").exists() == (code != 0)
