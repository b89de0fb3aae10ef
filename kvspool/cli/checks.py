"""The checks of `kvspool doctor`, one function for each: its finding, its state, and advice if it isn't ok."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvspool import queue, system
from kvspool.cli import plugins, queues
from kvspool.engine import making, sizes
from kvspool.engine.wakeups import CHANGED, Watcher
from kvspool.errors import Corruption, KvspoolError, LogNotFound, MismatchedFiles, NotALog, Unrecovered
from kvspool.importing import other_pythons, pip_install
from kvspool.journal import files as journals
from kvspool.kernel import frames
from kvspool.record import Gap
from kvspool.system import filesystems
from kvspool.system.descriptor import Descriptor

LEAST_FREE = 1 << 30  # bytes; with less the next log may not fit
LEAST_SHARED_MEMORY = 256 << 20  # bytes; a container has 64 MiB by default
LEAST_INSTANCES = 128  # one for each following reader, of all processes of a user
WAIT = 5.0  # seconds to wait for an event that takes microseconds


class Check(msgspec.Struct, frozen=True):
    """One check. advice: what to do if the state isn't ok."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def of_host() -> Iterator[Check]:
    """Check what every log needs, and the packages above it."""
    yield _python()
    yield _twin()
    yield _machine()
    yield _shared_memory()
    yield from _inotify_limits()
    yield from _write_back()
    yield _package("pyarrow", "arrow")
    yield _pyspark()
    yield _package("deltalake", "tables")
    yield _package("pyiceberg", "iceberg")


def of_place(path: Path) -> Iterator[Check]:
    """Check the file system of a path, also of one that doesn't exist yet, and try a log's operations there."""
    place = next(parent for parent in (path, *path.parents) if parent.is_dir())
    yield _file_system(place)
    yield _free_space(place)
    yield _rights(place)
    yield from _unfinished(path)
    # Test files must not be created within a log.
    fits = place == path and os.access(place, os.W_OK) and not any(place.glob("*.ctl")) and not _is_journal(place)
    trial = place if fits else place.parent if os.access(place.parent, os.W_OK) else Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=trial, prefix=".kvspool-doctor-") as file:
        yield _locks(Path(file.name))
        yield _wakeups(Path(file.name))


def of_log(path: Path) -> Iterator[Check]:
    """Open the log and read all of it, which checks every record's checksum."""
    try:
        if queue.is_queue(path):
            yield _queue(path)
            return
        with plugins.opened(path) as log:
            yield from _sync_errors(log.stats())
            yield from _records(log)
    except LogNotFound:
        yield Check("log", "warn", f"{path} does not exist", f"kvspool create {path}")
    except NotALog as error:
        is_only_a_place = path.is_dir() and not any(path.glob("*.ctl"))
        yield Check("log", "warn" if is_only_a_place else "fail", str(error), "give the path of a log to check it")
    except (Corruption, MismatchedFiles) as error:
        rescue = f"kvspool salvage {path} RESCUED copies the sound records"
        if _is_journal(path):
            rescue = f"kvspool verify {path} shows all damage, kvspool repair {path} removes it"
        yield Check("log", "fail", str(error), f"{rescue}; or restore a copy")
    except Unrecovered as error:
        yield Check("log", "warn", str(error), f"kvspool stats {path}, as a user with write permission")
    except (KvspoolError, OSError) as error:
        yield Check("log", "fail", str(error), "the message says what to do; nothing was changed")


def _queue(path: Path) -> Check:
    """Check every file of a queue, damaged or not."""
    report = queue.verify(path)
    if report.is_sound:
        return Check("queue", "ok", queues.summary(report))
    return Check("queue", "fail", "; ".join(report.problems), f"kvspool repair {path}, which removes no entry; or restore a copy")


def _is_journal(path: Path) -> bool:
    """Return whether there is a journal at a path, damaged or not."""
    try:
        return not any(path.glob("*.ctl")) and journals.find(path) is not None
    except (KvspoolError, ValueError):
        return True


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 16):
        return Check("Python", "ok", version)
    return Check("Python", "warn", version, "kvspool is tested with Python 3.11 to 3.15")


def _twin() -> Check:
    if frames.TWIN == "compiled":
        return Check("frame loops", "ok", "compiled")
    if os.environ.get("KVSPOOL_NO_EXTENSIONS") == "1":
        return Check("frame loops", "warn", "interpreted: slower", "unset KVSPOOL_NO_EXTENSIONS")
    return Check("frame loops", "warn", "interpreted: slower", "install a C compiler and reinstall kvspool")


def _machine() -> Check:
    found = f"{sys.platform}, {sys.byteorder}-endian"
    try:
        system.refuse_unfit_host()
    except OSError as error:
        return Check("machine", "fail", found, str(error.strerror))
    return Check("machine", "ok", found)


def _shared_memory() -> Check:
    try:
        total, _, free = shutil.disk_usage("/dev/shm")
    except OSError:
        return Check("/dev/shm", "warn", "not there", "mount a tmpfs at /dev/shm to keep logs in memory")
    found = f"{sizes.show(total)}, {sizes.show(free)} free"
    if total < LEAST_SHARED_MEMORY:
        return Check("/dev/shm", "warn", found, "for logs in memory make it larger; containers: --shm-size=1g")
    return Check("/dev/shm", "ok", found)


def _inotify_limits() -> Iterator[Check]:
    for name, meaning, least in (
        ("max_user_instances", "following readers, per user", LEAST_INSTANCES),
        ("max_user_watches", "files watched, per user", 8192),
        ("max_queued_events", "pending events", 1024),
    ):
        value = _setting(f"fs/inotify/{name}")
        if value is None:
            yield Check(f"inotify {name}", "warn", "unknown", "mount /proc to see it")
        elif value < least:
            advice = f"sysctl fs.inotify.{name}={least}; readers beyond the limit poll every 5 ms"
            yield Check(f"inotify {name}", "warn", f"{value:,} ({meaning})", advice)
        else:
            yield Check(f"inotify {name}", "ok", f"{value:,} ({meaning})")


def _write_back() -> Iterator[Check]:
    """Report what a crash of the machine may cost without `sync`, and from when on writers have to wait for the disk."""
    expire, period = _setting("vm/dirty_expire_centisecs"), _setting("vm/dirty_writeback_centisecs")
    if expire is None or period is None:
        yield Check("write-back", "warn", "unknown", "mount /proc to see it")
    elif period == 0:
        yield Check("write-back", "warn", "vm.dirty_writeback_centisecs is 0: nothing is written by age", "call sync, or set it to 500")
    else:
        yield Check("write-back", "ok", f"unsynced records are written within about {(expire + period) / 100:.0f} s")
    limits = []
    for name in ("dirty_background", "dirty"):
        size = _setting(f"vm/{name}_bytes")
        limits.append(sizes.show(size) if size else f"{_setting(f'vm/{name}_ratio')} %")
    yield Check("unwritten memory", "ok", f"written from {limits[0]} on, writers wait from {limits[1]} on (vm.dirty_*)")


def _setting(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _pyspark() -> Check:
    """Check PySpark, and whether its authors name this version of Python."""
    check = _package("pyspark", "spark")
    others = other_pythons("pyspark")
    if not others:
        return check
    return Check("pyspark", "warn", check.found, f"this PySpark names Python {others}: use one of them for Spark, or a newer PySpark")


def _package(name: str, extra: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "warn", "not installed", pip_install(extra))


def _file_system(place: Path) -> Check:
    name = filesystems.of(place)
    if name in filesystems.KILLING:
        found = f"{name} at {place}: a store to a spool or a queue kills its process when the disk is full, so both are refused there"
        advice = f"use a journal there, or ext4, xfs or tmpfs; {filesystems.ALLOWED}=1 takes the risk"
        return Check("file system", "warn", found, advice)
    if name in filesystems.COPYING:
        found = f"{name} at {place}: an append kills its process when the disk is full"
        return Check("file system", "warn", found, "keep space free there, or use ext4, xfs or tmpfs")
    if name in filesystems.SAFE:
        return Check("file system", "ok", f"{name} at {place}")
    return Check("file system", "fail", f"{name} at {place}: memory and locks may not be shared there", "use a local disk or tmpfs")


def _free_space(place: Path) -> Check:
    total, _, free = shutil.disk_usage(place)
    found = f"{sizes.show(free)} of {sizes.show(total)}"
    if free < LEAST_FREE:
        return Check("free space", "warn", found, "a new log reserves its whole capacity; make room first")
    return Check("free space", "ok", found)


def _rights(place: Path) -> Check:
    """Check which users may change the files there; in a sticky directory, only the owner of each file."""
    status = place.stat()
    rights = stat.S_IMODE(status.st_mode)
    if rights & stat.S_IWOTH and not rights & stat.S_ISVTX:
        return Check("rights", "warn", f"any user may change the files in {place} (mode {rights:o})", f"chmod o-w {place}")
    return Check("rights", "ok", f"only permitted users may change the files in {place}")


def _unfinished(path: Path) -> Iterator[Check]:
    """Name the hidden directories that killed creators and resizes left, of the log at a path, or of all logs in a directory."""
    try:
        inside = list(making.unfinished(path)) if path.is_dir() else []
        beside = [one for one in making.unfinished(path.parent) if one.name == path.name] if path.parent.is_dir() else []
    except OSError:
        return  # a directory that we may not list
    for one in (*inside, *beside):
        if not one.is_locked:
            again = {making.NEW: "kvspool create", making.RESIZE: "kvspool resize"}.get(one.suffix, "kvspool rm")
            found = f"{one.path}: left by a {again} that was killed, or is still running"
            yield Check("leftovers", "warn", found, f"the next `{again} {one.path.with_name(one.name)}` removes it")


def _locks(file: Path) -> Check:
    """Check whether a second open file description is refused a lock, and gets it when the first one releases it."""
    advice = "writers would damage the log here; use a local disk or tmpfs, and Linux 3.15 or later"
    with Descriptor(file, os.O_RDWR) as first, Descriptor(file, os.O_RDWR) as second:
        try:
            got, got_too = system.port.try_lock(first, 0), system.port.try_lock(second, 0)
            system.port.unlock(first, 0)
            got_later = system.port.try_lock(second, 0)
        except OSError as error:
            return Check("locks", "fail", f"refused: {error}", advice)
    if (got, got_too, got_later) == (True, False, True):
        return Check("locks", "ok", f"work in {file.parent}")
    return Check("locks", "fail", f"don't work in {file.parent}", advice)


def _wakeups(file: Path) -> Check:
    """Check whether a write wakes a watcher of the file."""
    try:
        with closing(Watcher()) as watcher:
            return _woken(watcher, file)
    except OSError as error:
        return Check("wake-ups", "fail", f"inotify fails: {error}", "following readers need it; check the sandbox or container")


def _woken(watcher: Watcher, file: Path) -> Check:
    watcher.watch(file, CHANGED, file)
    if watcher.is_blind:
        return Check("wake-ups", "warn", "no inotify instance is free", "end other watchers, or raise fs.inotify.max_user_instances")
    file.write_bytes(b"\1")
    deadline = system.port.monotonic() + WAIT
    while system.port.monotonic() < deadline:
        if file in (watcher.wait(WAIT) or ()):
            return Check("wake-ups", "ok", f"inotify works in {file.parent}")
    return Check("wake-ups", "warn", "no event arrived", "readers poll every half second here; use a local disk or tmpfs")


def _sync_errors(stats: Any) -> Iterator[Check]:
    for one in stats if isinstance(stats, list) else [stats]:
        if getattr(one, "sync_error", 0):
            found = f"{one.path}: a flush to disk failed: {os.strerror(one.sync_error)}"
            yield Check("disk", "fail", found, "it takes no more records; copy its records to a new log on a working disk")


def _records(log: plugins.OpenLog) -> Iterator[Check]:
    """Read all of the log. Only damage is a fault of the stored records; other gaps have other causes."""
    count = 0
    lost: Counter[str] = Counter()
    for item in log.read(on_gap="yield"):
        if isinstance(item, Gap):
            lost[item.reason] += item.count
        else:
            count += 1
    words = "their checksums match" if getattr(log, "has_checksums", True) else "whole and in order; there are no checksums"
    yield Check("records", "ok", f"{count:,} read, {words}")
    for reason, number in lost.items():
        if reason == "damaged":
            yield Check("damage", "fail", f"{number:,} records don't match their checksums, or are missing", "all others can be read")
        elif reason == "overrun":
            yield Check("overrun", "warn", f"{number:,} records were overwritten during the check", "writers continue; nothing is damaged")
        else:
            yield Check(reason, "warn", f"{number:,} sequences are missing", "records that were not synced when it happened are lost")
