"""Create a spool: both files in a hidden directory, which then gets its name.

The directory is next to the target. Its files are flushed, and it is renamed into place. So no process ever sees half a spool. The disk
space is reserved in full: a store to a page without space would kill the process.

**The rename is never undone**: other processes may have appended since. The new files begin with their word `moved` set, as after a resize.
So no record is appended before the name is on disk: if the creator is killed, interrupted, or its flush fails, the next writer flushes it.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.engine import making, producer_table
from kvspool.engine.checksums import sealed
from kvspool.errors import LogExists, NameNotDurable
from kvspool.spool import epochs, format
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system import disk, filesystems
from kvspool.system.descriptor import Descriptor

MOST_TOUCHED = 1 << 30  # most bytes of a ring that are touched at creation
_PIECE = 1 << 20  # bytes touched at once
PRODUCER_FILES = (producer_table.NAME, f"{producer_table.NAME}.tmp")


def create(
    path: Path,
    *,
    capacity: int,
    codec: int,
    mode: int,
    policy: int = 0,
    reader_expiry: int = 0,
    durability: int = 0,
    sync_interval: int = 0,
    allow_unsafe_fs: bool = False,
    touched: int = 0,
) -> SpoolFiles:
    """Create a spool at `path`, on disk when the call returns, and return its open files.

    capacity: size of the ring in bytes, a multiple of 4096. mode: permission bits of the two files; users with read permission may also
    enter the directory. policy: its index in `format.POLICIES`. reader_expiry: ns, 0 for never. durability: its index in
    `kvspool.options.DURABILITIES`; sync_interval: ns, 0 for not given. touched: see `fill`.

    Raises LogExists, or the system's OSError (no space, no permission). Nothing is left then, or a hidden directory that a note names and
    the next call removes. NameNotDurable: the log exists, and is complete. So it may be after an exception of a signal handler.
    """
    making.remove_dead(path, discard)
    if not _is_free(path):
        raise LogExists(f"{path} exists already; kvspool.open opens it")
    if not allow_unsafe_fs:
        filesystems.refuse_killing(path.parent)
    header = format.ControlHeader(
        magic=format.CONTROL_MAGIC,
        version=format.VERSION,
        data_start=format.DATA_START,
        control_bytes=format.control_bytes(capacity),
        capacity=capacity,
        log_id=b"",
        created=system.port.now(),
        policy=policy,
        codec=codec,
        durability=durability,
        spare=b"",
        reader_expiry=reader_expiry,
        sync_interval=sync_interval,
        origin=b"",
        resizes=0,
        reserved=b"",
        crc=0,
    )
    try:
        return _made(path, header, mode, allow_unsafe_fs, touched)
    except OSError as error:
        is_clean = not getattr(error, "__notes__", None)  # otherwise a note names the directory that stays
        left = "; it is complete" if isinstance(error, NameNotDurable) else "; nothing is left" if is_clean else ""
        error.add_note(f"while creating the spool {path} of {capacity} bytes{left}")
        raise


def _is_free(path: Path) -> bool:
    """Return whether there is nothing at a path, or an empty directory."""
    there = system.port.look_up(path)
    try:
        return there is None or (stat.S_ISDIR(there.st_mode) and not system.port.names(path))
    except FileNotFoundError:  # it was deleted at this moment
        return True


def _made(path: Path, header: format.ControlHeader, mode: int, allow_unsafe_fs: bool, touched: int) -> SpoolFiles:
    """Make the files in a hidden directory, open them, and give the directory its name."""
    with making.directory(path, discard) as made:
        fill(made.path, header._replace(log_id=made.id), mode, touched=touched)
        # Opened first: once other processes can see the log, only the disk can fail, which raises NameNotDurable.
        files = SpoolFiles(made.path, allow_unsafe_fs=allow_unsafe_fs)
        try:
            if touched and files.is_writable:
                files.populate(touched)
            files.doubt_name()
            with disk.flushed_names(path.parent, done=f"{path} was created"):
                _publish(made, path)
                files.path = path
            with suppress(OSError):  # otherwise the next writer does it
                files.trust_name()
        except BaseException:
            with suppress(OSError):  # the first error counts; the files are closed anyway
                files.close()
            raise
        return files


def touchable(capacity: int) -> int:
    """Return how many bytes of a new ring to touch at its creation; see `fill`. Few enough that they stay in memory."""
    return min(capacity, MOST_TOUCHED, system.port.available_memory() // 8) // format.PAGE * format.PAGE


def fill(building: Path, header: format.ControlHeader, mode: int, epoch: format.Epoch | None = None, touched: int = 0) -> None:
    """Put the two files of an empty log into an empty directory, on disk when the call returns.

    epoch: the record of restarts of the machine; None if there was none. touched: bytes of the ring that are written now, in large pieces,
    so that they are in memory before the first lap: pages created one by one at the first store to each take four times as long. They
    contain zeros as before, so they need no flush.
    """
    if epoch is None:
        epoch = format.Epoch(system.port.boot_id(), 0, 0, 0, 0, 0, format.TRUE, 0)
    _write_data(building / format.DATA_FILE, header.log_id, header.capacity, mode, touched)
    head = sealed(format.HEADER.pack(header)) + epochs.packed(header.log_id, epoch)
    _write_file(building / format.CONTROL_FILE, header.control_bytes, head, mode)
    disk.flush_directory(building, 0o700 | mode & 0o444 | (mode & 0o444) >> 2)


def _publish(made: making.Making, path: Path) -> None:
    try:
        making.take_name(made.path, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
            raise LogExists(f"{path} exists already; kvspool.open opens it") from error
        raise


def _write_data(path: Path, log_id: bytes, capacity: int, mode: int, touched: int) -> None:
    header = format.DataHeader(format.DATA_MAGIC, format.VERSION, format.DATA_START, capacity, log_id, b"", 0)
    _write_file(path, format.DATA_START + capacity, sealed(format.DATA_HEADER.pack(header)), mode, touched)


def _write_file(path: Path, size: int, header: bytes, mode: int, touched: int = 0) -> None:
    with Descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        system.port.allocate(fd, size)
        system.port.write(fd, header, 0)
        system.port.set_mode(fd, mode)
        system.port.flush(fd)
        zeros = memoryview(bytes(min(touched, _PIECE)))
        for at in range(0, touched, _PIECE):
            system.port.write(fd, zeros[: touched - at], format.DATA_START + at)


def discard(building: Path) -> None:
    """Remove the temporary directory of an unfinished `create` or `resize`."""
    for name in (format.DATA_FILE, format.CONTROL_FILE, format.LOCK_FILE, *PRODUCER_FILES):
        with suppress(FileNotFoundError):
            system.port.remove(building / name)
    with suppress(FileNotFoundError):
        system.port.remove_directory(building)
