"""Make a log, and open what lies at a path."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from kvspool import filesystems, sizes, system
from kvspool.errors import LogNotFound, NotALog
from kvspool.queue import ChunkQueue, is_queue
from kvspool.record import STRUCTURED
from kvspool.spool import Spool, format, pair
from kvspool.spool import resize as resizing
from kvspool.spool.resize import Resized
from kvspool.spool.spool import TIMEOUT
from kvspool.spool.verify import Progress, VerifyReport

LONGEST_EXPIRY = 1e9  # seconds, some 30 years
LEAST_INTERVAL = 1e-3  # seconds
_SHARD_NAME = re.compile(r"(?:[A-Za-z0-9_-]+\.)?[1-9a]\.[0-3][0-9a-f]{2}")


def create(
    path: str | os.PathLike[str],
    *,
    capacity: int | str = "64MiB",
    codec: str = "json",
    mode: int = 0o600,
    policy: str = "overwrite",
    reader_expiry: float | None = None,
    durability: format.Durability = "memory",
    sync_interval: float | None = None,
    timeout: float = TIMEOUT,
    allow_unsafe_fs: bool = False,
) -> Spool:
    """Make a spool at `path` and open it. It is on disk, complete, when the call returns.

    capacity: size of the ring, in bytes or as "64MiB"; rounded up to 4096. It is reserved on disk at once, and bounds what the log will
    ever take. codec: how values that are neither bytes nor str are stored: "json", "msgpack", or "keyed",
    which is MessagePack with repeated keys stored once. mode: permission bits of the
    files; 0o600 by default, with 0o640 the group may read. timeout: see `open`.

    policy: what a writer does when the ring is full of records that a durable reader has yet to commit: "overwrite" them, "block" up
    to its timeout, or "raise" SpoolFull. Records that no durable reader waits for are always overwritten. reader_expiry: seconds
    after which writers wait no more for a reader that hasn't moved although it had something to read; None: they always wait.

    durability: when an append is on disk, in every handle that isn't opened with another one: "memory", after a `sync`; "os", within
    `sync_interval` seconds (default: 1) and a flush; "disk", when the call returns. See `kvspool.spool.durability`.

    Raises LogExists, UnsafeFilesystem (a network file system, unless `allow_unsafe_fs`), ValueError, or the system's OSError (no
    space, no permission); nothing is left behind then.
    """
    system.refuse_unfit_host()
    target = Path(os.path.abspath(path))
    size = _ring_size(capacity)
    if codec not in STRUCTURED:
        raise ValueError(f"a codec is one of {', '.join(STRUCTURED)}, not {codec!r}")
    if policy not in format.POLICIES:
        raise ValueError(f"a policy is one of {', '.join(format.POLICIES)}, not {policy!r}")
    if reader_expiry is not None and policy == "overwrite":
        raise ValueError("reader_expiry needs the policy block or raise: with overwrite nobody waits for a reader")
    if reader_expiry is not None and not 1e-9 <= reader_expiry <= LONGEST_EXPIRY:
        raise ValueError(f"reader_expiry is a number of seconds up to {LONGEST_EXPIRY:.0f}, not {reader_expiry}")
    _check_durability(durability, sync_interval)
    if not 0o600 <= mode <= 0o666 or mode & 0o111:
        raise ValueError(f"mode is 0o600 with rights for others added, not {mode:#o}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no directory; make it first")
    if not allow_unsafe_fs:
        filesystems.refuse_unsafe(target.parent)
    made = pair.create(
        target,
        capacity=size,
        codec=STRUCTURED[codec],
        mode=mode,
        policy=format.POLICIES.index(policy),
        reader_expiry=0 if reader_expiry is None else round(reader_expiry * 1e9),
        durability=format.DURABILITIES.index(durability),
        sync_interval=0 if sync_interval is None else round(sync_interval * 1e9),
    )
    return Spool(made, timeout)


def resize(
    path: str | os.PathLike[str], capacity: int | str, *, timeout: float = TIMEOUT, progress: Callable[[int, int], None] | None = None
) -> Resized:
    """Give the log at `path` a ring of another size, while others append to it and read it; on disk when the call returns.

    capacity: as `create` has it. Records keep their sequences, durable readers their places; whoever has the log open goes on by himself.
    In a smaller ring the newest records stay, and readers get a Gap with the reason "resized" for the others. It takes the disk space of
    both rings until it is done. timeout: seconds to wait for each lock. progress: called with the position copied to, and the last one.

    Raises what `open` raises; SpoolFull where the policy keeps records for a durable reader that would have no room; TooLarge for a record
    that would not fit; Corruption for a damaged log; LockTimeout; ValueError; or the system's OSError (no space, no permission, a file
    system that can't exchange two directories). The log is as it was then.
    """
    size = _ring_size(capacity)
    with _open_spool(path, timeout) as log:
        return resizing.resize(log, size, timeout, progress)


def _ring_size(capacity: int | str) -> int:
    size = -(-sizes.parse(capacity) // format.PAGE) * format.PAGE
    if not format.LEAST_CAPACITY <= size <= format.MOST_CAPACITY:
        raise ValueError(f"a capacity is {format.LEAST_CAPACITY} bytes to {sizes.show(format.MOST_CAPACITY)}, not {capacity}")
    return size


def open(
    path: str | os.PathLike[str],
    *,
    timeout: float = TIMEOUT,
    durability: format.Durability | None = None,
    sync_interval: float | None = None,
) -> Spool:
    """Open the log that lies at `path`, for reading, and for writing where that is permitted.

    timeout: how many seconds a writer waits for another one's lock before LockTimeout. durability, sync_interval: for the appends of this
    handle, in place of what `create` was told. Raises LogNotFound, NotALog, UnknownVersion,
    MismatchedPair, Truncated, Corruption, or the system's OSError.

    Where a queue in QewQew's files lies at the path, that is opened: a `kvspool.queue.ChunkQueue`, which is no Spool.
    """
    _check_durability(durability, sync_interval)
    target = Path(os.path.abspath(path))
    if os.path.lexists(target / format.CONTROL_FILE):
        system.refuse_unfit_host()
        return Spool(pair.Pair(target), timeout, durability, sync_interval)
    if not os.path.lexists(target):
        raise LogNotFound(f"{target} does not exist; kvspool.create makes a log")
    if is_queue(target):
        options = {} if durability is None else {"durability": durability, "sync_interval": sync_interval}
        return ChunkQueue.open(target, timeout=timeout, **options)  # type: ignore[return-value, arg-type]
    if target.is_dir() and any(_SHARD_NAME.fullmatch(name) for name in system.port.names(target)):
        raise NotALog(f"{target} holds shards: open one shard set in it with shard.open, or all of them with hub.open")
    raise NotALog(f"{target} is neither a log nor a directory of logs")


def _open_spool(path: str | os.PathLike[str], timeout: float = TIMEOUT) -> Spool:
    if is_queue(Path(os.path.abspath(path))):
        raise NotALog(f"{path} is a queue; kvspool.queue has what can be done with it")
    return open(path, timeout=timeout)


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifyReport:
    """Check every record of the log at `path` against its checksum, while writers and readers go on.

    progress: called as `progress(done, all)` now and then, with bytes. Raises what `open` raises, and Corruption where the control block
    doesn't say where the log ends: `repair` finds that out from the records.
    """
    with _open_spool(path) as log:
        return log.verify(progress)


def _check_durability(durability: format.Durability | None, sync_interval: float | None) -> None:
    if durability is not None and durability not in format.DURABILITIES:
        raise ValueError(f"a durability is one of {', '.join(format.DURABILITIES)}, not {durability!r}")
    if sync_interval is not None and durability != "os":
        raise ValueError("sync_interval needs the durability os: the others have no interval")
    if sync_interval is not None and not LEAST_INTERVAL <= sync_interval <= LONGEST_EXPIRY:
        raise ValueError(f"sync_interval is {LEAST_INTERVAL:g} to {LONGEST_EXPIRY:.0f} seconds, not {sync_interval}")
