"""Create a log, and open the log at a path.

Each function imports the modules of a kind of log when it needs them: a program that uses spools loads no journal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from kvspool import system
from kvspool.engine import making, sizes
from kvspool.errors import LogExists, LogNotFound, NotALog
from kvspool.importing import import_whole
from kvspool.opening.keywords import refuse_unknown
from kvspool.options import DURABILITIES, TIMEOUT, Durability, Progress
from kvspool.record import STRUCTURED

if TYPE_CHECKING:
    from kvspool.engine.damage import VerifyReport
    from kvspool.engine.reports import RepairReport, Resized
    from kvspool.engine.retention import Retention
    from kvspool.journal import FixedJournal, Journal
    from kvspool.journal.format import Format
    from kvspool.log import Log
    from kvspool.queue import QueueRepairReport, QueueVerifyReport
    from kvspool.spool import Spool

JournalFormat = Literal["kvj", "sej", "fflg", "fixed"]
CONTROL_FILE = "spool.ctl"  # that of `spool.format`, whose import would take a few milliseconds
CAPACITY = "64MiB"  # of a spool, by default
SPOOL_OPTIONS = ("capacity", "policy", "reader_expiry", "prefill")
LONGEST_EXPIRY = 1e9  # seconds, some 30 years
LEAST_INTERVAL = 1e-3  # seconds
_SHARD_NAME = re.compile(r"(?:[A-Za-z0-9_-]+\.)?[1-9a]\.[0-3][0-9a-f]{2}")


@overload
def create(
    path: str | os.PathLike[str],
    *,
    format: Literal["spool"] = "spool",
    capacity: int | str = "64MiB",
    codec: str = "json",
    mode: int = 0o600,
    policy: str = "overwrite",
    reader_expiry: float | None = None,
    durability: Durability = "memory",
    sync_interval: float | None = None,
    timeout: float = TIMEOUT,
    allow_unsafe_fs: bool = False,
    prefill: bool = True,
    exist_ok: bool = False,
) -> Spool: ...


@overload
def create(
    path: str | os.PathLike[str],
    *,
    format: Literal["fixed"],
    codec: str = "json",
    mode: int = 0o600,
    durability: Durability = "memory",
    sync_interval: float | None = None,
    timeout: float = TIMEOUT,
    allow_unsafe_fs: bool = False,
    exist_ok: bool = False,
    item_bytes: int | str,
    items_per_blob: int | str,
) -> FixedJournal: ...


@overload
def create(
    path: str | os.PathLike[str],
    *,
    format: JournalFormat,
    first_sequence: int = 0,
    codec: str = "json",
    mode: int = 0o600,
    durability: Durability = "memory",
    sync_interval: float | None = None,
    timeout: float = TIMEOUT,
    allow_unsafe_fs: bool = False,
    retention: Retention | None = None,
    exist_ok: bool = False,
    **limits: Any,
) -> Journal: ...


@overload
def create(
    path: str | os.PathLike[str],
    *,
    format: str,
    codec: str = "json",
    mode: int = 0o600,
    durability: Durability = "memory",
    sync_interval: float | None = None,
    timeout: float = TIMEOUT,
    allow_unsafe_fs: bool = False,
    **options: Any,
) -> Log: ...


def create(
    path: str | os.PathLike[str],
    *,
    format: str = "spool",
    capacity: int | str | None = None,
    first_sequence: int = 0,
    codec: str = "json",
    mode: int = 0o600,
    policy: str | None = None,
    reader_expiry: float | None = None,
    durability: Durability = "memory",
    sync_interval: float | None = None,
    timeout: float = TIMEOUT,
    allow_unsafe_fs: bool = False,
    prefill: bool | None = None,
    retention: Retention | None = None,
    exist_ok: bool = False,
    **limits: Any,
) -> Log:
    """Create a log at `path` and open it. It is on disk, complete, when the call returns.

    format: "spool", the bounded ring described here, or a journal, which is unbounded: kvspool's own "kvj", or "sej", "fflg" or "fixed".
    Instead of capacity, policy, reader_expiry and prefill, journals take the options of their class in `kvspool.journal.formats`, such as
    `segment_bytes`. retention: for a journal, rules by which the writer that begins a segment removes the oldest ones; None: all are kept.

    first_sequence: of the first record, in a journal.

    capacity: size of the ring, in bytes or as "64MiB", the default; rounded up to 4096. It is reserved on disk at once, plus 68 KiB and
    0.04 % for the control block, and limits the log permanently. codec: how values that are neither bytes nor str are stored: "json",
    "msgpack", or "keyed", which is MessagePack with repeated keys stored once. mode: permission bits of the files; 0o600 by default, with
    0o640 the group may read. timeout: see `open`.

    policy: for a ring full of records that a durable reader has yet to commit: "overwrite" them (default), "block" up to the writer's
    timeout, or "raise" SpoolFull. Records that no durable reader needs are always overwritten. reader_expiry: seconds without progress
    after which writers no longer wait for a reader with pending records; None: they always wait.

    durability: when an append is on disk, in every handle that isn't opened with another level: "memory", after a `sync`; "os", within
    `sync_interval` seconds (default: 1) and a flush; "disk", when the call returns. See `kvspool.spool.durability`.

    prefill: for a spool, bring the pages of its ring into memory now, so that the first lap is as fast as later ones: up to 1 GiB, and an
    eighth of the available memory; the default. It takes about a microsecond a page; the kernel, or the first `sync`, writes the pages to
    disk. False: each page at the first store to it. Use this for many logs, or logs that are seldom full. Logs of the level "disk" always
    do, since their flushes take far longer.

    exist_ok: open an existing log at `path` if it has the same settings, of any size if no capacity is given. If several processes create
    it at once, each gets the same log. The log's files keep their permission bits, whatever `mode` is.

    Raises LogExists (with `exist_ok`: for different settings, which the message names), UnsafeFilesystem (a network file system, or a spool
    on btrfs, unless `allow_unsafe_fs`), TypeError for options that are unknown, missing or of other formats, ValueError, or the system's
    OSError (no space, no permission). Nothing is left then, except a hidden directory that a note of the error names, and files of a
    journal that can't be removed, or whose directory existed before. NameNotDurable: the log exists and is complete, but a crash of the
    machine may undo it. With `exist_ok` also the errors of `open`.
    """
    limits = {name: value for name, value in limits.items() if value is not None}
    of_spools = dict(zip(SPOOL_OPTIONS, (capacity, policy, reader_expiry, prefill), strict=True))
    given = [name for name, value in of_spools.items() if value is not None]
    check_options(format, [*given, *limits, *(() if retention is None else ("retention",))])
    system.refuse_unfit_host()
    target = Path(os.path.abspath(path))
    if codec not in STRUCTURED:
        raise ValueError(f"a codec is one of {', '.join(STRUCTURED)}, not {codec!r}")
    _check_durability(durability, sync_interval)
    making.check_target(target, mode, allow_unsafe_fs=allow_unsafe_fs)
    asked: dict[str, Any] = {"format": format, "codec": codec, "durability": durability, "sync_interval": sync_interval}
    make: Callable[[], Spool | Journal]
    if format == "spool":
        import_whole("kvspool.spool")
        from kvspool.spool import creation
        from kvspool.spool import format as spool_format

        if first_sequence:
            raise ValueError("the first record of a spool has the sequence 0; a journal may begin at another one")
        size = spool_format.ring_size(CAPACITY if capacity is None else capacity)
        policy = spool_format.POLICIES[0] if policy is None else policy
        _check_policy(policy, spool_format.POLICIES, reader_expiry)
        asked |= {"policy": policy, "reader_expiry": reader_expiry, **({} if capacity is None else {"capacity": size})}
        touched = creation.touchable(size) if prefill is not False and durability != "disk" else 0
        make = partial(_make_spool, target, {**asked, "capacity": size}, mode, touched, timeout, allow_unsafe_fs)
    else:
        import_whole("kvspool.journal")
        from kvspool.journal import files as journals
        from kvspool.journal.settings import CODECS, Settings

        if codec == "keyed":
            raise ValueError(f"keyed values need the key table of a spool; a journal takes {' or '.join(CODECS)}")
        known = _formats()[format]
        if missing := [name for name in known.needed_limits() if name not in limits]:
            raise TypeError(f"{_named(format)} needs the options {' and '.join(missing)}")
        form = known(**{name: sizes.parse(value) for name, value in limits.items()})
        asked |= {"retention": retention, "first_sequence": first_sequence, "limits": form.limits()}
        make = partial(journals.create, target, form, Settings(**asked), mode=mode, timeout=timeout)
        asked |= asked.pop("limits")
    if making.deleted(target):
        import_whole("kvspool.opening.contents")
        from kvspool.opening import contents

        contents.finish(target)
    while True:
        try:
            return make()
        except LogExists:
            if not exist_ok:
                raise
        try:
            return _open_same(target, asked, timeout, allow_unsafe_fs)
        except LogNotFound:
            if os.path.lexists(target):  # otherwise it was deleted since the first check
                raise


def _check_policy(policy: str, policies: tuple[str, ...], reader_expiry: float | None) -> None:
    if policy not in policies:
        raise ValueError(f"a policy is one of {', '.join(policies)}, not {policy!r}")
    if reader_expiry is not None and policy == "overwrite":
        raise ValueError("reader_expiry needs the policy block or raise: with overwrite no writer waits for a reader")
    if reader_expiry is not None and not 1e-9 <= reader_expiry <= LONGEST_EXPIRY:
        raise ValueError(f"reader_expiry is a number of seconds up to {LONGEST_EXPIRY:.0f}, not {reader_expiry}")


def _make_spool(target: Path, chosen: dict[str, Any], mode: int, touched: int, timeout: float, allow_unsafe_fs: bool) -> Spool:
    from kvspool.spool import creation
    from kvspool.spool import format as spool_format
    from kvspool.spool.spool import Spool

    made = creation.create(
        target,
        capacity=chosen["capacity"],
        codec=STRUCTURED[chosen["codec"]],
        mode=mode,
        policy=spool_format.POLICIES.index(chosen["policy"]),
        reader_expiry=round((chosen["reader_expiry"] or 0) * 1e9),
        durability=DURABILITIES.index(chosen["durability"]),
        sync_interval=round((chosen["sync_interval"] or 0) * 1e9),
        allow_unsafe_fs=allow_unsafe_fs,
        touched=touched,
    )
    return Spool(made, timeout, is_new=True)


def _open_same(target: Path, asked: dict[str, Any], timeout: float, allow_unsafe_fs: bool) -> Spool | Journal:
    """Open the log at a path if it has these settings. Raises LogExists for another one, and the errors of `open`."""
    import_whole("kvspool.opening.settings")
    from kvspool.opening import settings

    log = open_store(target, timeout=timeout, allow_unsafe_fs=allow_unsafe_fs)
    try:
        settings.refuse_others(target, settings.of_log(log), asked)
        return log
    except BaseException:
        log.close()
        raise


def check_options(format: str, names: Iterable[str], function: str = "create", also: Iterable[str] = ()) -> None:
    """Raise TypeError for options that `create` or this format doesn't have, and ValueError for an unknown format.

    function: its name for the error; also: further options that it has.
    """
    names = list(names)
    if format == "spool" and set(names) <= set(SPOOL_OPTIONS):
        return
    formats = _formats()
    if format not in ("spool", *formats):
        raise ValueError(f"a format is spool or one of {', '.join(formats)}, not {format!r}")
    own = _own_options(format)
    of_some = {name for one in ("spool", *formats) for name in _own_options(one)}
    refuse_unknown(function, names, all_options().union(also))
    for name in names:
        if name in of_some.difference(own):
            raise TypeError(f"{_named(format)} has no option {name!r}; its own options are {', '.join(own)}")


def all_options() -> set[str]:
    """Return the options of `create` for logs of all formats."""
    return {*(create.__kwdefaults__ or ()), *(name for form in _formats().values() for name in form.limit_names())}


def _own_options(format: str) -> tuple[str, ...]:
    """Return the options that not every format has."""
    return SPOOL_OPTIONS if format == "spool" else ("retention", *_formats()[format].limit_names())


def _formats() -> dict[str, type[Format]]:
    import_whole("kvspool.journal")
    from kvspool.journal.formats import FORMATS

    return FORMATS


def _named(format: str) -> str:
    return "a spool" if format == "spool" else f"a journal in the format {format}"


def resize(
    path: str | os.PathLike[str], capacity: int | str, *, timeout: float = TIMEOUT, progress: Callable[[int, int], None] | None = None
) -> Resized:
    """Change the size of the ring of the log at `path`, while others append to it and read it; on disk when the call returns.

    capacity: as in `create`. Records keep their sequences, durable readers their positions, and open handles continue automatically. A
    smaller ring keeps the newest records, and readers get a Gap with the reason "resized" for the others. Until it is done it takes the
    disk space of both rings. timeout: seconds to wait for each lock. progress: called with the position copied to, and the last one.

    Raises the errors of `open`; SpoolFull if the policy keeps records for a durable reader that would have no room; TooLarge for a record
    that would not fit; Corruption for a damaged log; LockTimeout; ValueError; or the system's OSError (no space, no permission, a file
    system that can't exchange two directories). The log is then unchanged. NameNotDurable: the log was resized, but the last flush of its
    parent directory failed. Handles use the new files; writers retry that flush, and append only when it succeeds.
    """
    import_whole("kvspool.spool")
    from kvspool.spool import format as spool_format

    size = spool_format.ring_size(capacity)
    with open(path, format="spool", timeout=timeout) as log:
        return log.resize(size, timeout=timeout, progress=progress)


@overload
def open(
    path: str | os.PathLike[str],
    *,
    format: Literal["spool"],
    timeout: float = TIMEOUT,
    durability: Durability | None = None,
    sync_interval: float | None = None,
    allow_unsafe_fs: bool = False,
) -> Spool: ...


@overload
def open(
    path: str | os.PathLike[str],
    *,
    format: Literal["fixed"],
    timeout: float = TIMEOUT,
    durability: Durability | None = None,
    sync_interval: float | None = None,
    allow_unsafe_fs: bool = False,
    **limits: int | str,
) -> FixedJournal: ...


@overload
def open(
    path: str | os.PathLike[str],
    *,
    format: JournalFormat,
    timeout: float = TIMEOUT,
    durability: Durability | None = None,
    sync_interval: float | None = None,
    allow_unsafe_fs: bool = False,
    **limits: Any,
) -> Journal: ...


@overload
def open(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    timeout: float = TIMEOUT,
    durability: Durability | None = None,
    sync_interval: float | None = None,
    allow_unsafe_fs: bool = False,
    **limits: Any,
) -> Log: ...


def open(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    timeout: float = TIMEOUT,
    durability: Durability | None = None,
    sync_interval: float | None = None,
    allow_unsafe_fs: bool = False,
    **limits: Any,
) -> Log:
    """Open the log at `path`, for reading, and if permitted also for writing.

    format: the only accepted one; None: any. limits: for a journal created by another program, the options of `create` for its format.
    timeout: seconds that a writer waits for another one's lock before LockTimeout. durability, sync_interval: for the appends of this
    handle, instead of those of `create`. allow_unsafe_fs: append to a spool where a full disk kills processes that store to mapped files
    (btrfs). Otherwise the spool can only be read there, and appends raise UnsafeFilesystem.

    Raises LogNotFound, NotALog (also for a queue: `kvspool.queue.open` opens it), UnknownVersion, MismatchedFiles, Truncated, Corruption,
    or the system's OSError.
    """
    _check_limits(format, limits)
    _check_durability(durability, sync_interval)
    target = Path(os.path.abspath(path))
    try:
        return _open(target, format, timeout, durability, sync_interval, allow_unsafe_fs, limits)
    except (FileNotFoundError, NotALog):
        if os.path.lexists(target):
            raise
        raise _not_found(target) from None  # it was deleted at this moment


def _open(
    target: Path,
    format: str | None,
    timeout: float,
    durability: Durability | None,
    sync_interval: float | None,
    allow_unsafe_fs: bool,
    limits: dict[str, int | str],
) -> Log:
    """Open what is at a path; see `open`."""
    if format in (None, "spool") and os.path.lexists(target / CONTROL_FILE):
        import_whole("kvspool.spool")
        from kvspool.spool.spool import Spool
        from kvspool.spool.spool_files import SpoolFiles

        _refuse_limits("spool", limits)
        system.refuse_unfit_host()
        return Spool(SpoolFiles(target, allow_unsafe_fs=allow_unsafe_fs), timeout, durability, sync_interval)
    if not os.path.lexists(target):  # or it is too long for a name
        raise _not_found(target)
    if _is_queue(target):
        raise NotALog(f"{target} is a queue, not a log: kvspool.queue.open opens it")
    import_whole("kvspool.journal")
    from kvspool.journal import files as journals

    found = None if format == "spool" else journals.find(target, format, {name: sizes.parse(value) for name, value in limits.items()})
    if found is not None:
        return journals.open(target, found, timeout=timeout, durability=durability, sync_interval=sync_interval)
    if target.is_dir() and any(_SHARD_NAME.fullmatch(name) for name in system.port.names(target)):
        raise NotALog(f"{target} holds shards: open one shard set in it with shard.open, or all of them with hub.open")
    import_whole("kvspool.opening.v1")
    from kvspool.opening import v1

    v1.refuse_ring(target)
    if format is not None:
        raise NotALog(f"{target} is not a log of the format {format}")
    raise NotALog(f"{target} is neither a log nor a directory of logs")


def open_store(path: str | os.PathLike[str], *, timeout: float = TIMEOUT, allow_unsafe_fs: bool = False) -> Spool | Journal:
    """Open a log for a caller to which its kind matters; see `open`."""
    return cast("Spool | Journal", open(path, timeout=timeout, allow_unsafe_fs=allow_unsafe_fs))


def _check_limits(format: str | None, limits: Collection[str]) -> None:
    """Raise TypeError for options that `open` doesn't have for this format (None: for any format), ValueError for an unknown format."""
    if format in (None, "spool") and not limits:
        return
    formats = _formats()
    if format not in (None, "spool", *formats):
        raise ValueError(f"a format is spool or one of {', '.join(formats)}, not {format!r}")
    all_limits = {name for form in formats.values() for name in form.limit_names()}
    refuse_unknown("open", limits, {*(open.__kwdefaults__ or ()), *all_limits})


def _refuse_limits(format: str, limits: Iterable[str]) -> None:
    """Raise TypeError for options of a journal in `open` of another kind of log."""
    for name in limits:
        raise TypeError(f"{_named(format)} can't be opened with the option {name!r}")


def is_log(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a log at a path, according to the file names; it may be damaged."""
    target = Path(os.path.abspath(path))
    if os.path.lexists(target / CONTROL_FILE):
        return True
    import_whole("kvspool.journal")
    from kvspool.journal import files as journals

    return journals.lies_at(target) or _is_queue(target)


def _not_found(path: Path) -> LogNotFound:
    return LogNotFound(f"{path} does not exist; kvspool.create creates a log")


def _is_queue(path: Path) -> bool:
    if not os.path.isfile(path):  # also false for a name that is too long
        return False
    import_whole("kvspool.queue")
    from kvspool.queue import is_queue

    return is_queue(path)


def lies_at(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a log of any format at a path, also one that only its contents identify: another program's journal.

    Raises Corruption, FormatError or ValueError for a journal that can't be read.
    """
    target = Path(os.path.abspath(path))
    if is_log(target):
        return True
    import_whole("kvspool.journal")
    from kvspool.journal import files as journals

    return target.is_dir() and journals.find(target) is not None


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifyReport | QueueVerifyReport:
    """Check every record of the spool, journal or queue at `path` against its checksum, if it has one, while others write and read.

    progress: called as `progress(done, all)` from time to time, with bytes. Raises the errors of `open`, and Corruption if the control
    block doesn't give the end of the log: `repair` finds it from the records.
    """
    if _is_queue(target := Path(os.path.abspath(path))):
        import_whole("kvspool.queue")
        from kvspool import queue

        return queue.verify(target)
    with open(path) as log:
        return log.verify(progress)


def repair(path: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> RepairReport | QueueRepairReport:
    """Repair the spool, journal or queue at `path`, and let it take records again.

    All of it is on disk when the call returns.

    timeout: seconds to wait for each lock. `kvspool.spool.repair` and `kvspool.journal.repair` describe the repairs and errors.
    """
    target = Path(os.path.abspath(path))
    if _is_queue(target):
        import_whole("kvspool.queue")
        from kvspool import queue

        return queue.repair(target, timeout=timeout)
    if not os.path.lexists(target / CONTROL_FILE):
        import_whole("kvspool.journal")
        from kvspool.journal import files as journals

        found = journals.find(target)
        if found is not None:
            with journals.open(target, found, timeout=timeout) as log:
                return log.repair(timeout)
    import_whole("kvspool.spool")
    from kvspool.spool.repair import repair as repair_spool

    return repair_spool(target, timeout=timeout)


def _check_durability(durability: Durability | None, sync_interval: float | None) -> None:
    if durability is not None and durability not in DURABILITIES:
        raise ValueError(f"a durability is one of {', '.join(DURABILITIES)}, not {durability!r}")
    if sync_interval is not None and durability != "os":
        raise ValueError("sync_interval needs the durability os: the others have no interval")
    if sync_interval is not None and not LEAST_INTERVAL <= sync_interval <= LONGEST_EXPIRY:
        raise ValueError(f"sync_interval is {LEAST_INTERVAL:g} to {LONGEST_EXPIRY:.0f} seconds, not {sync_interval}")
