"""`kvspool.delete` and `kvspool.rename`: every kind of log, whatever is refused, fails or is killed."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, start
from every_log import FORMATS, KINDS, make
from faults import FILE_CALLS, FailingPort
from trees import tree

import hub
import kvspool
import shard
from kvspool import errors, system
from kvspool.cli import main
from kvspool.engine.removal import MARKER
from kvspool.kernel.frames import TWIN

LOGS = [kind for kind in KINDS if kind != "queue"]
BARE = ("fflg", "fixed")
RENAMED = [kind for kind in LOGS if kind not in BARE]
ACTS = [*(("delete", kind) for kind in LOGS), *(("rename", kind) for kind in RENAMED)]
FOREIGN = ["precious", "spool.ctl.bak", "link", "folder/x", "jnl/precious", "kvj/x", "ofs/precious", "index/x", MARKER]
NAMES = ("rename", "rename_new", "link", "remove", "remove_directory", "make_directory")
CHANGES = (*NAMES, "open", "write", "truncate", "allocate", "flush", "try_lock", "try_lock_file", "unlock", "unlock_all", "unlock_file")


class Killing(system.Port):
    """Kills the process before, or after, the n-th call."""

    def __init__(self, nth: int, calls: tuple[str, ...], *, after: bool) -> None:
        super().__init__()
        self.left = nth
        self.after = after
        for name in calls:
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            result = call(*arguments, **options) if self.after or self.left else None
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


def act(deed: str, path: Path, timeout: float = 0.0) -> None:
    if deed == "delete":
        kvspool.delete(path, timeout=timeout)
    else:
        kvspool.rename(path, path.with_name("new"), timeout=timeout)


def content(path: Path) -> tuple[list[Any], list[str], str]:
    """Return the records, the durable readers and the settings of a log."""
    with kvspool.open(path) as log:
        records = [(one.sequence, one.key, one.value, one.timestamp) for one in log.read(on_gap="skip")]
        stats = log.stats()
        return records, [reader.name for reader in log.readers()], f"{stats.codec} {stats.durability}"


def killed(function: Callable[[], object]) -> bool:
    try:
        in_child(lambda: function() and None)
    except Died as died:
        assert died.signal == signal.SIGKILL
        return True
    return False


# Deletions and renames.


@pytest.mark.parametrize("kind", LOGS)
def test_a_deleted_log_leaves_nothing_and_another_one_may_take_its_place(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    kvspool.delete(tmp_path / "log")
    assert os.listdir(tmp_path) == []
    with pytest.raises(errors.LogNotFound):
        kvspool.delete(tmp_path / "log")
    make(kind, tmp_path / "log")


@pytest.mark.parametrize("kind", RENAMED)
def test_a_renamed_log_is_what_it_was_and_takes_records(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    (tmp_path / "folder").mkdir()
    before, files = content(tmp_path / "log"), tree(tmp_path / "log")
    kvspool.rename(tmp_path / "log", tmp_path / "folder" / "new")
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["new"]
    after = tree(tmp_path / "folder" / "new")
    assert {name: found[0] for name, found in files.items()} == {name: found[0] for name, found in after.items()}  # type: ignore[index]
    assert content(tmp_path / "folder" / "new") == before
    with kvspool.open(tmp_path / "folder" / "new") as log, log.reader("place") as reader:
        sequence = log.append(b"last")
        assert [one.sequence for one in reader.read(on_gap="skip")][-1] == sequence
    with pytest.raises(errors.LogNotFound):
        kvspool.open(tmp_path / "log")
    make(kind, tmp_path / "log")


@pytest.mark.parametrize("kind", BARE)
def test_a_journal_of_two_directories_is_not_renamed(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    before = content(tmp_path / "log")
    with pytest.raises(errors.Unsupported, match="copy"):
        kvspool.rename(tmp_path / "log", tmp_path / "new")
    assert content(tmp_path / "log") == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("deed", "kind"), ACTS)
def test_a_log_in_use_is_refused_and_its_user_named(tmp_path: Path, deed: str, kind: str) -> None:
    path = tmp_path / "log"
    make(kind, path)
    before = content(path)
    with kvspool.open(path) as log, log.reader("place"):
        with pytest.raises(errors.LockTimeout, match=f"durable reader.*open.*({os.getpid()}|is locked)"):
            act(deed, path)
    assert content(path) == before
    if TWIN == "compiled" or kind not in ("spool", "resized"):  # an interpreted writer of a spool holds its lock during an append alone
        with kvspool.open(path) as log:
            log.append(b"four")
            with pytest.raises(errors.LockTimeout, match="is open for writing"):
                act(deed, path)
            log.append(b"four")
    with kvspool.open(path) as log:
        list(log.read(on_gap="skip"))
        act(deed, path)
    assert not path.exists()


@pytest.mark.parametrize("kind", LOGS)
def test_open_handles_report_a_deleted_log_and_append_nothing(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    with kvspool.open(tmp_path / "log") as log:
        kvspool.delete(tmp_path / "log")
        with pytest.raises((errors.LogVanished, errors.LogNotFound)):
            log.append(b"four")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", RENAMED)
def test_a_handle_of_a_renamed_log_never_writes_to_the_log_that_has_its_old_path(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    with kvspool.open(tmp_path / "log") as log:
        list(log.read(on_gap="skip"))
        kvspool.rename(tmp_path / "log", tmp_path / "new")
        make(kind, tmp_path / "log")
        before = content(tmp_path / "log")
        if kind in ("spool", "resized"):
            with pytest.raises((errors.LogVanished, errors.MismatchedFiles)):
                log.append(b"four")
            assert content(tmp_path / "log") == before


def test_a_spool_that_is_open_reads_on_under_its_new_name(tmp_path: Path) -> None:
    make("spool", tmp_path / "log")
    with kvspool.open(tmp_path / "log") as log:
        before = [record.value for record in log.read()]
        kvspool.rename(tmp_path / "log", tmp_path / "new")
        with kvspool.open(tmp_path / "new") as other:
            other.append(b"more")
        assert [record.value for record in log.read()] == [*before, b"more"]


# Refusals.


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


def _marked(path: Path) -> None:
    """Make a directory of logs, one of which has the name of a marker."""
    path.mkdir()
    kvspool.create(path / MARKER, format="kvj").close()
    (path / "producers").write_bytes(b"precious")


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


def test_a_directory_with_a_log_that_has_the_name_of_a_marker_stays(tmp_path: Path) -> None:
    _marked(tmp_path / "logs")
    before = tree(tmp_path)
    with pytest.raises(OSError, match="holds other files"):
        kvspool.delete(tmp_path / "logs")
    with pytest.raises(errors.LogExists):
        kvspool.create(tmp_path / "logs", capacity=4096)
    assert tree(tmp_path) == before
    kvspool.delete(tmp_path / "logs" / MARKER)
    assert os.listdir(tmp_path / "logs") == ["producers"]


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_in_the_directories_of_a_log_are_refused_and_stay(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "log"
    make(kind, path)
    if (path / name).parent.is_file():
        name = "index.bak"  # consumers of FFLG are in a file of that name
    if name == "link":
        (path / "0000000000000000.idx").symlink_to(tmp_path)
    else:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"precious")
    before = tree(tmp_path)
    with pytest.raises((OSError, errors.NotALog), match="holds other files|is not a log"):  # of a journal's directory it may be both
        kvspool.delete(path)
    after = tree(tmp_path)
    assert {key: after[key] for key in before if "writers" not in key} == {key: before[key] for key in before if "writers" not in key}


def test_a_file_that_only_has_the_name_of_a_segment_is_refused_and_stays(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="fflg", **FORMATS["fflg"]) as log:
        log.append_many([b"x" * 500] * 99)
    file = tmp_path / "log" / "0000000000000000a"  # the format looks into the first segment and the last one alone
    file.write_bytes(b"precious")
    before = tree(tmp_path / "log")
    with pytest.raises(OSError, match="holds other files"):
        kvspool.delete(tmp_path / "log")
    assert tree(tmp_path / "log") == before and len(before) > 2


def test_segments_that_a_link_leads_to_are_refused_and_stay(tmp_path: Path) -> None:
    make("kvj", tmp_path / "log")
    (tmp_path / "log" / "kvj").rename(tmp_path / "elsewhere")
    (tmp_path / "log" / "kvj").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path)
    with pytest.raises(OSError, match="holds other files"):
        kvspool.delete(tmp_path / "log")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", BARE)
@pytest.mark.parametrize("name", ["precious", "ofs/x", "index/precious"])
def test_other_files_next_to_a_journal_are_refused_and_stay(tmp_path: Path, kind: str, name: str) -> None:
    make(kind, tmp_path / "log")
    file = tmp_path / ".log.kvspool" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"precious")
    before = tree(tmp_path)
    with pytest.raises(OSError, match="holds other files") as raised:
        kvspool.delete(tmp_path / "log")
    assert raised.value.errno == errno.ENOTEMPTY
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", RENAMED)
def test_a_rename_replaces_nothing(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    make("spool", tmp_path / "other")
    before = tree(tmp_path)
    for name in ("file", "link", "empty", "other", "log"):
        with pytest.raises(errors.LogExists):
            kvspool.rename(tmp_path / "log", tmp_path / name)
    with pytest.raises(FileNotFoundError):
        kvspool.rename(tmp_path / "log", tmp_path / "missing" / "log")
    with pytest.raises(OSError):
        kvspool.rename(tmp_path / "log", tmp_path / "log" / "inside")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["spool", "kvj", "sej"])
def test_names_may_have_the_greatest_length_of_the_system(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 255)
    make("kvj" if kind == "spool" else kind, path)
    kvspool.rename(path, tmp_path / ("y" * 255))
    kvspool.delete(tmp_path / ("y" * 255))
    assert os.listdir(tmp_path) == []


# Next to other processes.


@pytest.mark.parametrize(("deed", "kind"), ACTS)
def test_a_writer_that_waits_for_a_deletion_or_rename_appends_nothing_that_is_lost(tmp_path: Path, deed: str, kind: str) -> None:
    path = tmp_path / "log"
    make(kind, path)
    begun, opened = os.pipe(), os.pipe()

    class Slow(system.Port):
        def rename_new(self, *names: Any) -> None:
            os.write(begun[1], b"xx")
            threading.Event().wait(0.2)  # meanwhile the writers wait for the locks
            super().rename_new(*names)

    def remove() -> None:
        os.read(opened[0], 1)
        os.read(opened[0], 1)
        with system.replaced(Slow()):
            act(deed, path, timeout=30)

    def write() -> list[int]:
        appended = []
        with kvspool.open(path) as log:
            os.write(opened[1], b"x")
            os.read(begun[0], 1)
            for _ in range(3):
                try:
                    appended.append(log.append(b"four"))
                except (errors.LogVanished, errors.LogNotFound, errors.MismatchedFiles, errors.LockTimeout, FileNotFoundError):
                    break
        return appended

    writers = [start(write), start(write)]
    start(remove)()
    appended = [sequence for wait in writers for sequence in wait()]
    for end in (*begun, *opened):
        os.close(end)
    if deed == "delete":
        assert appended == []
    else:
        assert set(appended) <= {sequence for sequence, *_ in content(tmp_path / "new")[0]}
    assert not path.exists()


@pytest.mark.parametrize("kind", LOGS)
def test_of_many_deleters_and_creators_each_acknowledged_log_is_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    options: dict[str, Any] = {"format": kind, **FORMATS[kind]} if kind in FORMATS else {"capacity": 4096}

    def create() -> int:
        made = 0
        for _ in range(30):
            try:
                with kvspool.create(path, timeout=20, **options) as log:
                    made += 1
                    assert log.append(b"four") == 0
                    if TWIN == "compiled" or kind in FORMATS:  # it is open for writing, so no process can delete it
                        with kvspool.open(path) as same:
                            assert same.log_id == log.log_id and list(same.read_values()) == [b"four"]
                    assert list(log.read_values()) == [b"four"]
            except (errors.LogExists, errors.LogVanished, errors.LogNotFound, errors.MismatchedFiles):  # the others before the append
                pass
        return made

    def delete() -> int:
        deleted = 0
        for _ in range(60):
            try:
                kvspool.delete(path, timeout=20)
                deleted += 1
            except (errors.LogNotFound, errors.NotALog, FileNotFoundError):
                pass
        return deleted

    waits = [start(deed) for deed in (create, create, delete, delete)]
    made, more, deleted, others = (wait() for wait in waits)
    assert made + more > 0
    assert deleted + others <= made + more


# Killed.


def states(tmp_path: Path, deed: str, kind: str, calls: tuple[str, ...], *, after: bool, check: Callable[[Path, Any], str]) -> set[str]:
    """Kill a deed before or after each call, and return the results of `check` for each state."""
    found = set()
    for nth in range(1, 2000):
        folder = tmp_path / f"{deed}-{after}-{nth}"
        folder.mkdir()
        make(kind, folder / "log")
        before = content(folder / "log")

        def run(nth: int = nth, folder: Path = folder) -> None:
            with system.replaced(Killing(nth, calls, after=after)):
                act(deed, folder / "log")

        if not killed(run):
            return found
        found.add(check(folder, before))
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_deletion_that_is_killed_at_any_call_leaves_the_whole_log_or_none(tmp_path: Path, kind: str, after: bool) -> None:
    def check(folder: Path, before: Any) -> str:
        path = folder / "log"
        try:
            now = content(path)
        except errors.LogNotFound:
            if path.exists():
                assert main(["doctor", str(path)]) in (0, 1)
            kvspool.create(path, capacity=4096).close()
            kvspool.delete(path)
            end = "gone"
        except errors.NotALog:
            assert os.listdir(path) == []
            kvspool.create(path, capacity=4096).close()
            kvspool.delete(path)
            end = "empty"
        else:
            assert now == before
            with kvspool.open(path) as log:
                assert log.append(b"four") >= 0
            kvspool.delete(path)
            end = "whole"
        make(kind, path)  # as if nothing had been there
        assert content(path)[0] == [(one[0], one[1], one[2], now_time) for one, now_time in zip(before[0], times(path), strict=True)]
        return end

    found = states(tmp_path, "delete", kind, NAMES if after else CHANGES, after=after, check=check)
    assert {"whole", "gone"} <= found or after


def times(path: Path) -> list[int]:
    return [record[3] for record in content(path)[0]]


@pytest.mark.parametrize("kind", RENAMED)
def test_a_rename_that_is_killed_at_any_call_leaves_the_whole_log_at_one_of_the_paths(tmp_path: Path, kind: str) -> None:
    def check(folder: Path, before: Any) -> str:
        (there,) = os.listdir(folder)
        assert content(folder / there) == before
        with kvspool.open(folder / there) as log:
            log.append(b"four")
        kvspool.rename(folder / there, folder / "other")
        return there

    assert states(tmp_path, "rename", kind, CHANGES, after=False, check=check) == {"log", "new"}


@pytest.mark.parametrize("kind", LOGS)
def test_files_that_a_killed_deletion_has_left_are_named_by_the_doctor_and_finished_by_the_next(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(kind, tmp_path / "log")
    assert killed(lambda: _killed_after(tmp_path / "log", "rename_new"))
    with pytest.raises(errors.LogNotFound):
        kvspool.open(tmp_path / "log")
    for path in (tmp_path, tmp_path / "log"):
        main(["doctor", str(path)])
        assert f"kvspool delete {tmp_path / 'log'}" in capsys.readouterr().out.replace("\n", "")
    kvspool.delete(tmp_path / "log")
    assert os.listdir(tmp_path) == []


def _killed_after(path: Path, call: str) -> None:
    with system.replaced(Killing(1, (call,), after=True)):
        kvspool.delete(path)


@pytest.mark.parametrize("kind", BARE)
def test_a_journal_at_the_path_of_one_whose_deletion_was_killed_has_none_of_its_files(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "log")
    assert killed(lambda: _killed_after(tmp_path / "log", "rename_new"))
    options: dict[str, Any] = {"item_bytes": 4, "items_per_blob": 4} if kind == "fixed" else {}
    with kvspool.create(tmp_path / "log", format=kind, **options) as log:
        assert log.readers() == [] and log.append(b"four") == 0
    assert MARKER not in os.listdir(tmp_path / ".log.kvspool")


@pytest.mark.parametrize(("deed", "kind"), [act for act in ACTS if act[1] in ("resized", "kvj", "fixed")])
@pytest.mark.parametrize("every", [False, True], ids=["once", "from then on"])
def test_a_failure_at_any_call_leaves_the_log_or_says_what_was_done(tmp_path: Path, deed: str, kind: str, every: bool) -> None:
    failures = 0
    for nth in range(1, 400):
        folder = tmp_path / f"{nth}"
        folder.mkdir()
        make(kind, folder / "log")
        before = content(folder / "log")
        port = FailingPort(nth, errno.EIO, (*FILE_CALLS, "remove", "remove_directory", "rename_new"), every=every)
        try:
            with system.replaced(port):
                act(deed, folder / "log")
        except errors.NameNotDurable:
            with pytest.raises(errors.LogNotFound):
                kvspool.open(folder / "log")
        except OSError as error:
            said = " ".join(getattr(error, "__notes__", ()))
            if "was deleted, but not all" in said:
                kvspool.delete(folder / "log")
                assert os.listdir(folder) == []
            elif "was deleted, but not the directory" in said:
                assert not any(any(names) for _, *names in os.walk(folder / os.listdir(folder)[0]))
            else:
                assert content(folder / "log") == before, port.failed
                with kvspool.open(folder / "log") as log:
                    log.append(b"four")
        else:
            if not port.failed:
                break
            assert not (folder / "log").exists()
        failures += 1
    else:
        raise AssertionError("it never came to its end")
    assert failures > 5


# The commands.


def test_the_commands_delete_and_rename(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("spool", tmp_path / "log")
    assert main(["rename", str(tmp_path / "log"), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == f"renamed {tmp_path}/log to {tmp_path}/new\n"
    assert main(["rename", str(tmp_path / "new"), str(tmp_path / "log"), "--json"]) == 0
    assert capsys.readouterr().out == f'{{"renamed":"{tmp_path}/new","new":"{tmp_path}/log"}}\n'
    assert main(["delete", str(tmp_path / "log"), "--yes", "--json"]) == 0
    assert capsys.readouterr().out == f'{{"deleted":"{tmp_path}/log"}}\n'
    assert main(["delete", str(tmp_path / "log"), "--yes"]) == 3
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("yes\n", 0), ("\n", 1), ("no\n", 1), (None, 2)])
def test_the_command_asks_before_it_deletes_a_log(tmp_path: Path, answer: str | None, code: int) -> None:
    make("spool", tmp_path / "log")
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
        assert f"Delete {tmp_path}/log with all of its records? [y/N] " in done.stderr
    assert (tmp_path / "log").exists() == (code != 0)
