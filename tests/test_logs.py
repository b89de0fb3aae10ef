"""`kvspool.create` and `kvspool.open`: what they make, and every path that they refuse."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults import FILE_CALLS, FailingPort, TouchingPort
from trees import tree

import kvspool
from kvspool import errors, system
from kvspool.journal import Retention
from kvspool.opening import logs
from kvspool.queue import ChunkQueue
from kvspool.spool import format
from kvspool.system import filesystems


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(path: Path) -> tuple[int, int, int]:
    return tuple(os.stat(at).st_mode & 0o7777 for at in (path, path / format.CONTROL_FILE, path / format.DATA_FILE))  # type: ignore[return-value]


# Creation.


def test_a_created_log_is_empty_open_and_takes_records(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log:
        assert list(log) == []
        assert log.capacity == 1 << 20
        assert log.append(b"first") == 0
    with kvspool.open(tmp_path / "log") as log:
        assert [record.value for record in log] == [b"first"]
        assert log.append(b"second") == 1


@pytest.mark.parametrize(("asked", "given"), [(4096, 4096), (4097, 8192), (1, 4096), ("5000B", 8192), ("1MiB", 1 << 20)])
def test_the_capacity_is_rounded_up_to_pages(tmp_path: Path, asked: int | str, given: int) -> None:
    with kvspool.create(tmp_path / "log", capacity=asked) as log:
        assert log.capacity == given
    assert (tmp_path / "log" / format.DATA_FILE).stat().st_size == 4096 + given
    assert (tmp_path / "log" / format.CONTROL_FILE).stat().st_size == format.control_bytes(given)


def test_the_space_is_reserved_in_full(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity="1MiB").close()
    for name in (format.CONTROL_FILE, format.DATA_FILE):
        status = (tmp_path / "log" / name).stat()
        assert status.st_blocks * 512 >= status.st_size


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o777])
def test_no_other_user_may_enter_or_read_with_any_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        kvspool.create(tmp_path / "log", capacity=4096).close()
    assert modes(tmp_path / "log") == (0o700, 0o600, 0o600)


@pytest.mark.parametrize(("mode", "directory"), [(0o640, 0o750), (0o644, 0o755), (0o660, 0o750), (0o666, 0o755)])
@pytest.mark.parametrize("mask", [0, 0o077])
def test_read_permission_for_the_files_includes_the_directory(tmp_path: Path, mode: int, directory: int, mask: int) -> None:
    with umask(mask):
        kvspool.create(tmp_path / "log", capacity=4096, mode=mode).close()
    assert modes(tmp_path / "log") == (directory, mode, mode)


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": 0},
        {"capacity": -1},
        {"capacity": (1 << 42) + 1},
        {"capacity": "much"},
        {"codec": "pickle"},
        {"codec": "raw"},
        {"mode": 0o400},
        {"mode": 0o755},
        {"mode": 0o677},
        {"mode": 0o1600},
    ],
)
def test_wrong_arguments_are_refused_with_nothing_made(tmp_path: Path, wrong: dict[str, int | str]) -> None:
    with pytest.raises(ValueError):
        kvspool.create(tmp_path / "log", **wrong)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_a_missing_parent_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing is not a directory"):
        kvspool.create(tmp_path / "missing" / "log")


def _lay_nothing(path: Path) -> None:
    path.mkdir()


def _lay_file(path: Path) -> None:
    path.write_bytes(b"precious")


def _lay_empty_file(path: Path) -> None:
    path.touch()


def _lay_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_bytes(b"data")


def _lay_log(path: Path) -> None:
    with kvspool.create(path, capacity=4096) as log:
        log.append(b"precious")


def _lay_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _lay_link_to_empty_directory(path: Path) -> None:
    (path.parent / "empty").mkdir()
    path.symlink_to("empty")


def _lay_fifo(path: Path) -> None:
    os.mkfifo(path)


def _lay_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _lay_shards(path: Path) -> None:
    path.mkdir()
    for index in range(2):
        _lay_log(path / f"1.{index:03x}")


def _lay_loop(path: Path) -> None:
    path.symlink_to(path.name)


OCCUPIED = [
    _lay_file,
    _lay_empty_file,
    _lay_full_directory,
    _lay_log,
    _lay_dangling_link,
    _lay_link_to_empty_directory,
    _lay_fifo,
    _lay_loop,
]
NO_LOG = [_lay_nothing, *OCCUPIED[:3], *OCCUPIED[4:], _lay_socket, _lay_shards]


def named(lay: Callable[[Path], None]) -> str:
    return lay.__name__.removeprefix("_lay_").replace("_", " ")


@pytest.mark.parametrize("lay", OCCUPIED, ids=named)
def test_a_file_at_the_path_is_never_replaced(tmp_path: Path, lay: Callable[[Path], None]) -> None:
    lay(tmp_path / "log")
    before = tree(tmp_path)
    with pytest.raises(errors.LogExists, match="kvspool.open"):
        kvspool.create(tmp_path / "log", capacity=4096)
    assert tree(tmp_path) == before


def test_an_empty_directory_becomes_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        assert log.append(b"x") == 0
    assert modes(tmp_path / "log")[0] == 0o700


def test_a_file_system_without_shared_memory_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "of", lambda path: "nfs4")
    with pytest.raises(errors.UnsafeFilesystem, match="nfs4"):
        kvspool.create(tmp_path / "log", capacity=4096)
    assert os.listdir(tmp_path) == []
    kvspool.create(tmp_path / "log", capacity=4096, allow_unsafe_fs=True).close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.get)
def test_a_creation_that_fails_at_any_call_leaves_nothing_or_says_that_the_log_is_there(
    tmp_path: Path, number: int, open_files: Callable[[], set[str]]
) -> None:
    held = open_files()
    failures: list[str] = []
    leftovers: list[str] = []
    created = nth = 0
    while True:
        nth += 1
        port = FailingPort(nth, number, (*FILE_CALLS, "boot_id", "random", "names", "look_up"))
        try:
            with system.replaced(port):
                log = kvspool.create(tmp_path / "log", capacity=4096)
        except OSError as error:
            assert error.errno == number
            failures.append(port.failed)
            is_there = isinstance(error, errors.NameNotDurable)
        else:
            log.close()
            is_there = True  # a failure after the last flush leaves work to the next writer
            if not port.failed:
                break
        assert open_files() <= held, f"call {nth}, {port.failed}"
        if is_there:
            with kvspool.open(tmp_path / "log") as log:
                assert log.append(b"first") == 0
            assert os.listdir(tmp_path) == ["log"]
            shutil.rmtree(tmp_path / "log")
            created += 1
        assert is_there or not created
        if names := os.listdir(tmp_path):
            leftovers.append(f"call {nth}, {port.failed}: {names}")
            for name in names:
                shutil.rmtree(tmp_path / name)
        assert open_files() <= held, f"call {nth}, {port.failed}"
    assert {"open", "write", "allocate", "set_mode", "flush", "make_directory", "rename_new", "map", "close", "boot_id"} <= set(failures)
    assert leftovers == []
    assert created > 2


MIB = 1 << 20


@pytest.mark.parametrize(
    ("capacity", "memory", "options", "end"),
    [
        (5 << 19, 1 << 40, {}, 5 << 19),
        (5 << 19, 8 * MIB + 9000, {}, MIB),
        (5 << 19, 0, {}, 0),
        (5 << 19, 1 << 40, {"prefill": False}, 0),
        (5 << 19, 1 << 40, {"durability": "disk"}, 0),
    ],
)
def test_the_pages_of_a_new_ring_are_in_memory_as_far_as_there_is_enough(
    tmp_path: Path, capacity: int, memory: int, options: dict[str, Any], end: int
) -> None:
    port = TouchingPort(memory)
    with system.replaced(port):
        log = kvspool.create(tmp_path / "log", capacity=capacity, **options)
        assert port.touched == [(4096 + at, 4096 + min(at + MIB, end)) for at in range(0, end, MIB)]
        assert port.populated == (4096 + end if end else 0)
        with log:
            log.append_many([b"x" * 1000] * 100)
            assert [record.value for record in log.read()] == [b"x" * 1000] * 100
        assert (tmp_path / "log" / format.DATA_FILE).stat().st_size == 4096 + capacity


def test_the_pages_of_a_resized_and_of_a_salvaged_ring_are_in_memory_too(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    port = TouchingPort(1 << 40)
    with system.replaced(port):
        kvspool.resize(tmp_path / "log", 2 * MIB)
        assert port.touched == [(4096, 4096 + MIB), (4096 + MIB, 4096 + 2 * MIB)]
        kvspool.salvage(tmp_path / "log", tmp_path / "salvaged")
        assert port.touched == [(4096, 4096 + MIB), (4096 + MIB, 4096 + 2 * MIB), (4096, 8192)]


def test_a_creation_on_a_disk_that_fails_from_some_call_on_names_what_is_left(tmp_path: Path) -> None:
    left = set()
    for nth in range(1, 100):
        root = tmp_path / f"{nth}"
        root.mkdir()
        port = FailingPort(nth, errno.EIO, (*FILE_CALLS, "remove", "remove_directory", "boot_id"), every=True)
        try:
            with system.replaced(port):
                log = kvspool.create(root / "log", capacity=4096)
        except OSError as error:
            names = os.listdir(root)
            left |= {"log" if name == "log" else "hidden" for name in names}
            said = "\n".join(getattr(error, "__notes__", ["nothing is left"]))
            assert isinstance(error, errors.NameNotDurable) == (names == ["log"]), port.failed
            assert ("it is complete" in said) == (names == ["log"]), port.failed
            assert ("nothing is left" in said) == (names == []), port.failed
            assert all(str(root / name) in said for name in names), port.failed
            if names == ["log"]:
                kvspool.open(root / "log").close()
            else:
                kvspool.create(root / "log", capacity=4096).close()
            assert os.listdir(root) == ["log"]
        else:
            log.close()
            if not port.failed:
                break
    assert not port.failed and left == {"log", "hidden"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_full_disk_refuses_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    code = """
import errno, os, sys, kvspool
root = sys.argv[1]
try:
    kvspool.create(root + "/log", capacity="2MiB")
except OSError as error:
    assert error.errno == errno.ENOSPC, error
    assert any("while creating" in note for note in error.__notes__)
else:
    sys.exit("no error")
assert os.listdir(root) == [], os.listdir(root)
log = kvspool.create(root + "/log", capacity="512KiB")
filler = os.open(root + "/filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(filler, bytes(4096))
except OSError as error:
    assert error.errno == errno.ENOSPC, error
assert os.statvfs(root).f_bavail == 0
for at in range(3000):
    log.append(bytes(1000))
log.sync()
records = list(log)
assert [record.sequence for record in records] == list(range(records[0].sequence, 3000))
print("full and fine", records[0].sequence)
"""
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", tmp_path / "disk", sys.executable, code], capture_output=True, text=True, timeout=60
    )
    if "unshare" in ran.stderr or "mount" in ran.stderr:
        pytest.skip(f"this machine lets nobody mount: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("full and fine")


def _create_at_once(path: Path, barrier: multiprocessing.synchronize.Barrier, results: multiprocessing.SimpleQueue[str]) -> None:
    barrier.wait()
    try:
        kvspool.create(path, capacity=4096).close()
        results.put("won")
    except errors.LogExists:
        results.put("lost")


def test_of_creators_at_once_exactly_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(15):
        barrier, results = context.Barrier(3), context.SimpleQueue()
        racers = [context.Process(target=_create_at_once, args=(tmp_path / f"log{attempt}", barrier, results)) for _ in range(3)]
        for racer in racers:
            racer.start()
        outcomes = sorted(results.get() for _ in racers)
        for racer in racers:
            racer.join()
        assert outcomes == ["lost", "lost", "won"]
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]
        kvspool.open(tmp_path / f"log{attempt}").close()


def test_a_creator_overtaken_between_its_look_and_its_rename_loses(tmp_path: Path) -> None:
    class Overtaken(system.Port):
        def rename_new(self, source: object, target: object) -> None:
            with system.replaced(system.Port()):
                kvspool.create(tmp_path / "log", capacity=4096).close()
            super().rename_new(source, target)  # type: ignore[arg-type]

    with system.replaced(Overtaken()), pytest.raises(errors.LogExists):
        kvspool.create(tmp_path / "log", capacity=8192)
    assert os.listdir(tmp_path) == ["log"]
    with kvspool.open(tmp_path / "log") as log:
        assert log.capacity == 4096


# Opening.


def test_what_is_missing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(errors.LogNotFound, match="kvspool.create"):
        kvspool.open(tmp_path / "log")
    with pytest.raises(FileNotFoundError):
        kvspool.open(tmp_path / "no" / "such" / "folder")
    with pytest.raises(errors.LogNotFound):
        kvspool.open(tmp_path / ("n" * 300))


@pytest.mark.parametrize("lay", NO_LOG, ids=named)
def test_what_is_no_log_is_refused_and_not_touched(tmp_path: Path, lay: Callable[[Path], None]) -> None:
    lay(tmp_path / "log")
    before = tree(tmp_path)
    with pytest.raises(errors.NotALog) as caught:
        kvspool.open(tmp_path / "log")
    assert str(tmp_path / "log") in str(caught.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["1.000", "1.001", "host.2.003", "a.3ff", "web-1.a.000"])
def test_a_directory_of_shards_names_what_opens_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    _lay_log(tmp_path / "root" / name)
    with pytest.raises(errors.NotALog, match=r"shard\.open.*hub\.open"):
        kvspool.open(tmp_path / "root")


def test_a_link_to_a_log_opens_it(tmp_path: Path) -> None:
    _lay_log(tmp_path / "real")
    (tmp_path / "log").symlink_to("real")
    with kvspool.open(tmp_path / "log") as log:
        assert [record.value for record in log] == [b"precious"]


def test_a_relative_path_stays_the_same_log_when_the_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with kvspool.create("log", capacity=4096) as log:
        monkeypatch.chdir("/")
        assert log.append(b"x") == 0
        assert log.path == tmp_path / "log"


def test_opening_and_reading_changes_no_byte(tmp_path: Path) -> None:
    _lay_log(tmp_path / "log")
    before = tree(tmp_path)
    with kvspool.open(tmp_path / "log") as log:
        assert len(list(log.read())) == 1
        log.stats()
    assert tree(tmp_path) == before


def test_importing_opens_nothing_and_starts_nothing() -> None:
    code = "import os, threading, kvspool; print(threading.active_count(), [n for n in os.listdir('/proc/self/fd') if int(n) > 3])"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "1 []\n"


@pytest.mark.parametrize("options", [{"capacity": 8192}, {"format": "kvj"}], ids=["spool", "kvj"])
def test_a_follower_s_timeout_of_nan_is_refused_and_a_limit_may_be_any_number(tmp_path: Path, options: dict[str, Any]) -> None:
    nan = float("nan")
    with kvspool.create(tmp_path / "log", **options) as log:
        log.append(b"one")
        for follow in (log.follow, log.follow_async, log.reader("place").follow):
            with pytest.raises(ValueError, match="timeout is a number of seconds, not nan"):
                follow(timeout=nan)
        assert len(list(log.follow(timeout=float("-inf"), limit=10**30))) == 1


# Keywords.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"capcity": 4096}, "unexpected keyword argument 'capcity'; did you mean 'capacity'?"),
        ({"format": "kvj", "segment_byte": 4096}, "did you mean 'segment_bytes'?"),
        ({"zzz": 1}, r"it takes allow_unsafe_fs, capacity, codec, "),
        (
            {"format": "kvj", "capacity": 4096},
            "a journal in the format kvj has no option 'capacity'; its own options are retention, segment_bytes",
        ),
        ({"format": "sej", "policy": "overwrite"}, "has no option 'policy'"),
        ({"format": "fflg", "prefill": False}, "has no option 'prefill'"),
        ({"format": "kvj", "total_bytes": 4096}, "a journal in the format kvj has no option 'total_bytes'"),
        ({"segment_bytes": 4096}, "a spool has no option 'segment_bytes'; its own options are capacity, policy, reader_expiry, prefill"),
        ({"retention": Retention(max_bytes=1)}, "a spool has no option 'retention'"),
        ({"format": "fixed"}, "a journal in the format fixed needs the options item_bytes and items_per_blob"),
        ({"format": "fixed", "item_bytes": 4}, "a journal in the format fixed needs the options items_per_blob"),
    ],
)
def test_create_refuses_options_that_are_unknown_missing_or_of_other_formats(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        kvspool.create(tmp_path / "log", **given)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", ["spool", "kvj", None])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"create": True}, "open() got an unexpected keyword argument 'create'; it takes allow_unsafe_fs, durability, format, "),
        ({"time_out": 1}, "did you mean 'timeout'?"),
    ],
)
def test_open_refuses_unknown_options_with_anything_at_the_path(
    tmp_path: Path, format: str | None, given: dict[str, Any], words: str
) -> None:
    path = tmp_path / "log"
    if format is not None:
        kvspool.create(path, format=format).close()  # type: ignore[call-overload]
    for asked in (None, format):
        with pytest.raises(TypeError, match=re.escape(words)):
            kvspool.open(path, format=asked, **given)  # type: ignore[call-overload]


def test_a_journal_of_items_without_settings_is_opened_with_both_lengths_only(tmp_path: Path) -> None:
    for given in ({}, {"item_bytes": 4}, {"items_per_blob": 8}):
        with pytest.raises(errors.FormatError, match=r"has no settings .* the format fixed can't be read without its item.*: give them"):
            kvspool.open(tmp_path, format="fixed", **given)
    with kvspool.open(tmp_path, format="fixed", item_bytes=4, items_per_blob=8) as log:
        assert len(log) == 0


@pytest.mark.parametrize("format", ["spool", "kvj"])
def test_open_refuses_options_that_the_log_has_no_use_for(tmp_path: Path, format: str) -> None:
    path = tmp_path / "log"
    kvspool.create(path, format=format).close()  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="can't be opened with the option 'item_bytes'"):
        kvspool.open(path, item_bytes=4)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="can't be opened with the option 'item_bytes'"):
        kvspool.open(path, format=format, item_bytes=4)  # type: ignore[call-overload]


# A log that may be there.

KINDS: list[dict[str, Any]] = [
    {"capacity": 65536},
    {"capacity": 65536, "policy": "block", "reader_expiry": 7.5, "codec": "keyed", "durability": "os", "sync_interval": 0.5},
    {"format": "kvj", "segment_bytes": "1MiB", "first_sequence": 5, "retention": Retention(max_bytes=1 << 30)},
    {"format": "sej", "durability": "disk"},
    {"format": "fflg", "total_bytes": "1GiB", "codec": "msgpack"},
    {"format": "fixed", "item_bytes": 4, "items_per_blob": 100},
]


@pytest.mark.parametrize("options", KINDS, ids=[str(kind) for kind in range(len(KINDS))])
def test_create_opens_a_log_of_the_same_settings_if_it_may_exist(tmp_path: Path, options: dict[str, Any]) -> None:
    with kvspool.create(tmp_path / "log", exist_ok=True, **options) as log:
        first = log.append(b"four")
    with kvspool.create(tmp_path / "log", exist_ok=True, **options) as log:
        assert log.append(b"more") == first + 1
        assert [record.value for record in log.read()] == [b"four", b"more"]
    with pytest.raises(errors.LogExists, match="kvspool.open opens"):
        kvspool.create(tmp_path / "log", **options)


@pytest.mark.parametrize(
    ("options", "others", "words"),
    [
        ({"capacity": 65536}, {"capacity": "1MiB"}, "capacity 64.0 KiB -> 1.0 MiB."),
        (KINDS[1], {}, "codec keyed -> json, durability os -> memory, sync_interval 0.5 -> none, policy block -> overwrite, "),
        (KINDS[1], {}, "reader_expiry 7.5 -> none."),
        ({"capacity": 65536}, {"format": "kvj"}, "format spool -> kvj."),
        ({"format": "kvj"}, {"format": "sej"}, "format kvj -> sej."),
        (KINDS[2], {"format": "kvj"}, "first_sequence 5 -> 0, segment_bytes 1.0 MiB -> 64.0 MiB."),
        (KINDS[5], {"format": "fixed", "item_bytes": 5, "items_per_blob": 100}, "item_bytes 4 B -> 5 B."),
    ],
)
def test_a_log_of_other_settings_is_refused_with_each_that_differs(
    tmp_path: Path, options: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    kvspool.create(tmp_path / "log", **options).close()
    before = tree(tmp_path)
    with pytest.raises(errors.LogExists, match=re.escape(words)):
        kvspool.create(tmp_path / "log", exist_ok=True, **others)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("seconds", [1 / 3, 2 / 3, 0.1])
def test_seconds_are_compared_as_they_are_stored(tmp_path: Path, seconds: float) -> None:
    options: dict[str, Any] = {"policy": "block", "reader_expiry": seconds, "durability": "os", "sync_interval": seconds}
    for _ in range(2):
        kvspool.create(tmp_path / "log", capacity=65536, exist_ok=True, **options).close()


def test_an_option_that_is_none_is_the_default(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "kvj", format="kvj", capacity=None, segment_bytes=None).close()
    with kvspool.create(tmp_path / "spool", capacity=4096) as log:
        log.append(b"one")
    assert kvspool.copy(tmp_path / "spool", tmp_path / "copy", format="kvj", capacity=None).records == 1


def test_a_log_of_any_capacity_is_opened_if_none_is_asked_for(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    kvspool.resize(tmp_path / "log", 16384)
    with kvspool.create(tmp_path / "log", exist_ok=True) as log:
        assert log.capacity == 16384


def test_what_is_no_log_and_a_queue_are_no_log_that_may_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    ChunkQueue.create(tmp_path / "queue").close()
    for options in ({}, {"format": "kvj"}):
        for name in ("file", "queue"):
            with pytest.raises(errors.NotALog):
                kvspool.create(tmp_path / name, exist_ok=True, **options)
    assert (tmp_path / "file").read_bytes() == b"precious"


CREATOR = """
import sys, kvspool
options = {"capacity": 4096} if sys.argv[2] == "spool" else {}
sys.stdin.readline()
for number in range(20):
    with kvspool.create(f"{sys.argv[1]}/{number}", exist_ok=True, format=sys.argv[2], **options) as log:
        log.append(sys.argv[3].encode())
"""


@pytest.mark.parametrize("format", ["spool", "kvj", "sej", "fflg"])
def test_of_processes_that_create_a_log_at_once_each_gets_it(tmp_path: Path, format: str) -> None:
    command = [sys.executable, "-c", CREATOR, str(tmp_path), format]
    creators = [subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for number in range(4)]
    for one in creators:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    assert [one.communicate(timeout=60)[1] for one in creators] == [""] * 4
    for number in range(20):
        with kvspool.open(tmp_path / str(number)) as log:
            assert sorted(record.value for record in log.read()) == [b"0", b"1", b"2", b"3"]  # type: ignore[union-attr]


def test_a_log_that_is_deleted_while_it_is_opened_is_created_again(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    places = [tmp_path / "log"]

    real = logs._open_same

    def open_same(target: Path, *arguments: Any) -> Any:
        if places:
            shutil.rmtree(places.pop())
        return real(target, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_open_same", open_same)
        with kvspool.create(tmp_path / "log", capacity=4096, exist_ok=True) as log:
            assert log.append(b"new") == 0
