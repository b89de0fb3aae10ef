"""Make a log, and open what lies at a path."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvspool import filesystems, sizes, system
from kvspool.errors import LogNotFound, NotALog
from kvspool.record import STRUCTURED
from kvspool.spool import Spool, format, pair
from kvspool.spool.spool import TIMEOUT
from kvspool.spool.verify import Progress, VerifyReport

LONGEST_EXPIRY = 1e9  # seconds, some 30 years
_SHARD_NAME = re.compile(r"(?:[A-Za-z0-9_-]+\.)?[1-9a]\.[0-3][0-9a-f]{2}")


def create(
    path: str | os.PathLike[str],
    *,
    capacity: int | str = "64MiB",
    codec: str = "json",
    mode: int = 0o600,
    policy: str = "overwrite",
    reader_expiry: float | None = None,
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

    Raises LogExists, UnsafeFilesystem (a network file system, unless `allow_unsafe_fs`), ValueError, or the system's OSError (no
    space, no permission); nothing is left behind then.
    """
    system.refuse_unfit_host()
    target = Path(os.path.abspath(path))
    size = -(-sizes.parse(capacity) // format.PAGE) * format.PAGE
    if not format.LEAST_CAPACITY <= size <= format.MOST_CAPACITY:
        raise ValueError(f"a capacity is {format.LEAST_CAPACITY} bytes to {sizes.show(format.MOST_CAPACITY)}, not {capacity}")
    if codec not in STRUCTURED:
        raise ValueError(f"a codec is one of {', '.join(STRUCTURED)}, not {codec!r}")
    if policy not in format.POLICIES:
        raise ValueError(f"a policy is one of {', '.join(format.POLICIES)}, not {policy!r}")
    if reader_expiry is not None and policy == "overwrite":
        raise ValueError("reader_expiry needs the policy block or raise: with overwrite nobody waits for a reader")
    if reader_expiry is not None and not 1e-9 <= reader_expiry <= LONGEST_EXPIRY:
        raise ValueError(f"reader_expiry is a number of seconds up to {LONGEST_EXPIRY:.0f}, not {reader_expiry}")
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
    )
    return Spool(made, timeout)


def open(path: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> Spool:
    """Open the log that lies at `path`, for reading, and for writing where that is permitted.

    timeout: how many seconds a writer waits for another one's lock before LockTimeout. Raises LogNotFound, NotALog, UnknownVersion,
    MismatchedPair, Truncated, Corruption, or the system's OSError.
    """
    target = Path(os.path.abspath(path))
    if os.path.lexists(target / format.CONTROL_FILE):
        system.refuse_unfit_host()
        return Spool(pair.Pair(target), timeout)
    if not os.path.lexists(target):
        raise LogNotFound(f"{target} does not exist; kvspool.create makes a log")
    if target.is_dir() and any(_SHARD_NAME.fullmatch(name) for name in system.port.names(target)):
        raise NotALog(f"{target} holds shards: open one shard set in it with shard.open, or all of them with hub.open")
    raise NotALog(f"{target} is neither a log nor a directory of logs")


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifyReport:
    """Check every record of the log at `path` against its checksum, while writers and readers go on.

    progress: called as `progress(done, all)` now and then, with bytes. Raises what `open` raises, and Corruption where the control block
    doesn't say where the log ends: `repair` finds that out from the records.
    """
    with open(path) as log:
        return log.verify(progress)
