"""The errors of kvspool, one class each.

    KvspoolError
    |-- Closed                  the handle was closed
    |-- LogNotFound             the path does not exist         (also FileNotFoundError)
    |-- LogExists               the path exists already         (also FileExistsError)
    |-- LogVanished             the log was deleted or replaced while it was open
    |-- FormatError             this version can't read it
    |   |-- NotALog             neither a log nor anything that holds logs
    |   |-- UnknownVersion      written by a newer kvspool
    |   |-- MismatchedFiles      control block and data file of different logs
    |   `-- MissingExtra        it needs a package that isn't installed (also ImportError)
    |-- Unrecovered             the machine was restarted, and no process with permission to write has opened the log since
    |-- Corruption              a kvspool log, but damaged
    |   |-- Truncated           a file is shorter than its header says, or than the part that was read, or was to be flushed
    |   |-- NotAFile            a FIFO, device, socket or directory has a file's name (also OSError)
    |   `-- ChecksumMismatch    an item's bytes don't match its checksum
    |-- TooLarge                the record is too large         (also ValueError)
    |-- Unencodable             no codec takes the value        (also TypeError)
    |-- Undecodable             the value doesn't match its codec (also ValueError)
    |-- NotImportable           the input is not a record       (also ValueError)
    |-- NotKept                 a copy would lose keys, types, timestamps or codecs (also ValueError)
    |-- OtherRecords            the target of a copy holds records that aren't the source's
    |-- OutOfRange              no such sequence yet            (also ValueError)
    |-- Pruned                  the item was removed            (also LookupError)
    |-- Unsupported             this kind of log doesn't support it (also ValueError)
    |-- UnsafeFilesystem        shared memory doesn't work there
    |-- LockTimeout             another process or thread holds the lock (also TimeoutError)
    |-- LogInUse                a log that is open can't be deleted or renamed
    |-- SpoolFull               no room until a durable reader moves on
    |   `-- Pinned              no room until a view is closed
    |-- AppendedInPart          a batch was interrupted: the first records of it are stored, and stay
    |-- QueueFull               no room in the queue            (also queue.Full)
    |-- QueueEmpty              the queue is empty              (also queue.Empty)
    |-- ReaderBusy              another process or thread has this durable reader open
    |-- NoSuchReader            the log has no durable reader of this name (also LookupError)
    |-- TooManyReaders          every reader slot is in use
    |-- Revoked                 a silent member of a group has lost its shards
    |-- TooManyMembers          a group has its largest number of members
    |-- LeaseLost               a task is no longer its worker's
    |-- TooManyWorkers          a task list has its largest number of workers
    |-- BatchChanged            a partly stored batch was repeated with other records
    |-- BatchOutOfOrder         a batch before the last begun one (also ValueError)
    |-- TooManyPieces           a batch was interrupted too often
    |-- TooManyProducers        no room for another producer
    |-- Moved                   the log was moved to new files by a resize; never leaves the package
    |-- Reentered               an append during another one, from a signal handler (also RuntimeError)
    |-- NoEventLoop             a task awaits a log without asyncio (also RuntimeError)
    |-- Poisoned                a flush to disk failed; the log takes no more records
    |-- NotDurable              the records were appended, but are not known to be on disk
    |   `-- Unsettled           the same for a queue's entries, put or taken
    |-- NameNotDurable          an operation was done, but a crash of the machine may undo it (also OSError)
    |-- TimeUnknown             an unreadable segment may have the latest time of its journal (also OSError)
    `-- GapError                records were lost before they could be read

**A batch that is stored in part.** Large batches are published in pieces, so an error can come after some of them. `appended_by(error)`
returns the sequences that are stored then. An error that promises "nothing was written" becomes the `__cause__` of an AppendedInPart.
Others, such as the system's OSError, Poisoned or KeyboardInterrupt, keep their class and get a note and the attribute `appended`.

Wrong arguments raise plain ValueError and TypeError. The system's OSError (disk full, permission denied, no more descriptors) passes
through unchanged, with a note that names the file. `exit_code` is the exit code of the command for the class.
"""

from __future__ import annotations

import os
import queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspool.gap import Gap


class KvspoolError(Exception):
    """Base of every error of this package.

    `partial` holds the sound records that a call had read before it failed, if it returns all records at once, as `read_arrow` does. It is
    None otherwise.
    """

    exit_code = 1
    partial: Any = None


class Closed(KvspoolError):
    """An operation on a closed handle. Nothing happened; open the log again."""


class LogNotFound(KvspoolError, FileNotFoundError):
    """The path does not exist. Nothing happened; `kvspool.create` creates a log."""

    exit_code = 3


class LogExists(KvspoolError, FileExistsError):
    """The path exists already. It was not touched; `kvspool.open` opens a log."""

    exit_code = 3


class LogVanished(KvspoolError):
    """The log's files were deleted or replaced while it was open. The handle can no longer be used; open the path again."""

    exit_code = 3


class FormatError(KvspoolError):
    """The file or directory at the path can't be read by this version. It was not touched."""

    exit_code = 4


class NotALog(FormatError):
    """The path holds neither a log nor a directory of logs."""


class UnknownVersion(FormatError):
    """The log was written by a newer kvspool. Upgrade, and open it again."""


class MismatchedFiles(FormatError):
    """`spool.ctl` and `spool.dat` belong to different logs: one was copied or restored without the other."""


class MissingExtra(FormatError, ImportError):
    """The operation needs a package that isn't installed. Nothing was changed; the message names the extra and its packages."""

    @classmethod
    def of(cls, extra: str, words: str, error: ImportError) -> MissingExtra:
        """Return the error for a failed import of a package of `extra`. words: "Spark needs the package pyspark"."""
        from kvspool.importing import pip_install

        return cls(f"{words} ({error}). The extra {extra} has it: {pip_install(extra)}")


class Unrecovered(KvspoolError):
    """The machine was restarted since the log was written, or an older copy of its control block was restored, and you may only read it.
    Nothing was changed.

    Its control block can't be trusted before the log is recovered. Any process with permission to write recovers it by opening it once.
    """

    exit_code = 5


class Corruption(KvspoolError):
    """A part of the log is damaged. Nothing was changed; what is undamaged can still be read."""

    exit_code = 5


class Truncated(Corruption):
    """A file is shorter than its header says. It was not mapped, since a load after its end would kill the process.

    In a journal: records that a reader had read, or that a durable append was to flush, were removed by a rewind or a truncation.
    """


class NotAFile(Corruption, OSError):
    """A FIFO, a device, a socket or a directory has the name of a file. It was not read; move it away, or restore the file."""


class ChecksumMismatch(Corruption):
    """The item at a position is damaged; other items can be read. `position`, `path` and `offset` locate it."""

    def __init__(self, position: int, path: str, offset: int) -> None:
        super().__init__(f"item {position}, at byte {offset} of {path}, is damaged: its checksum doesn't match; continue after it")
        self.position, self.path, self.offset = position, path, offset


class TooLarge(KvspoolError, ValueError):
    """The record is larger than the log can hold. Nothing was written; make it smaller, or the log larger."""

    exit_code = 2


class Unencodable(KvspoolError, TypeError):
    """No codec takes a value of this type. Nothing was written; pass bytes, str, a dict or a `msgspec.Struct`."""

    exit_code = 2


class Undecodable(KvspoolError, ValueError):
    """The stored bytes don't match the record's codec. `record.value` still returns them."""

    exit_code = 5


class NotImportable(KvspoolError, ValueError):
    """The input of an import is not a record. The message says where, why, and how many records were imported before."""

    exit_code = 2


class NotKept(KvspoolError, ValueError):
    """A copy would lose fields that the target's format can't store. Nothing of the batch that the message names was written.

    Choose another format, or accept the loss with `lossy`.
    """

    exit_code = 2


class OtherRecords(KvspoolError):
    """The target of a copy holds records that aren't the source's, or others append to it meanwhile. Nothing more was written.

    Choose another target, or copy after those records with `append`.
    """

    exit_code = 4


class OutOfRange(KvspoolError, ValueError):
    """The sequence has not been written yet. For a requested item, `position`, `path` and `offset` say where it would be stored."""

    exit_code = 2

    def __init__(self, message: str, position: int | None = None, path: str | None = None, offset: int | None = None) -> None:
        super().__init__(message if path is None else f"{message}; it would be at byte {offset} of {path}")
        self.position, self.path, self.offset = position, path, offset


class Pruned(KvspoolError, LookupError):
    """The item was appended, but has been removed. `position`, `path` and `offset` say where it was stored."""

    exit_code = 7

    def __init__(self, message: str, position: int, path: str, offset: int) -> None:
        super().__init__(f"{message}; it was at byte {offset} of {path}")
        self.position, self.path, self.offset = position, path, offset


class Unsupported(KvspoolError, ValueError):
    """This kind of log doesn't support the operation. Nothing happened. `capability` is not in the log's `capabilities`; `instead` says
    what to use.
    """

    exit_code = 2

    def __init__(self, kind: str, capability: str, instead: str) -> None:
        super().__init__(f"a log of the kind {kind} has no {capability}: {instead}")
        self.kind, self.capability, self.instead = kind, capability, instead

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str, str]]:
        return type(self), (self.kind, self.capability, self.instead)


class UnsafeFilesystem(KvspoolError):
    """Processes don't share memory or locks on this file system, or a full disk kills them. Nothing was done; use ext4, xfs or tmpfs.

    On btrfs a journal can be used, and an existing spool can be read.
    """

    exit_code = 3


class LockTimeout(KvspoolError, TimeoutError):
    """Another process or thread holds the lock. Nothing was written; try again, or check the holder that the message names.

    A lock is never broken by force: the kernel frees the lock of a dead holder at once, so the holder is alive, or stopped.
    """

    exit_code = 6


class LogInUse(KvspoolError):
    """The log was not deleted or renamed, since a handle that appends to it, or a durable reader of it, is open. Nothing happened.

    Close the handles, and try again. `path` is the log, `what` is open, and `processes` are the ids of the visible processes with files of
    it open.
    """

    exit_code = 6

    def __init__(self, path: os.PathLike[str] | str, what: str, processes: tuple[int, ...] = (), described: str = "") -> None:
        super().__init__(f"{os.fspath(path)} is in use: {what}{described and f' in {described}'}; nothing was changed; close it first")
        self.path, self.what, self.processes, self.described = os.fspath(path), what, processes, described

    def __reduce__(self) -> tuple[type[LogInUse], tuple[str, str, tuple[int, ...], str]]:
        return type(self), (self.path, self.what, self.processes, self.described)


class SpoolFull(KvspoolError):
    """No room for the records until a durable reader moves on. Nothing was written; the message names the reader.

    Logs with the policy "block" raise it after the writer's timeout, those with "raise" at once.
    """

    exit_code = 8


class Pinned(SpoolFull):
    """No room for the records until a view of the oldest ones is closed, or its process ends. The message names the process."""


class AppendedInPart(KvspoolError):
    """A batch was interrupted after its first records were stored. They stay and can be read; don't append them again.

    `appended` holds their sequences, so `values[len(error.appended):]` are left to append. `__cause__` is the error that interrupted it.
    """

    exit_code = 6

    def __init__(self, why: str, appended: range) -> None:
        super().__init__(why)
        self.appended = appended


class QueueFull(KvspoolError, queue.Full):
    """No room in the queue: its bound is reached, or every chunk id is in use. `placed` is the number of entries of the batch that were put
    before.
    """

    exit_code = 8

    def __init__(self, why: str, placed: int = 0) -> None:
        super().__init__(why)
        self.placed = placed


class QueueEmpty(KvspoolError, queue.Empty):
    """There was no entry in the queue, or none arrived within the timeout. Nothing happened."""


class ReaderBusy(KvspoolError):
    """Another process or thread has this durable reader open. Its position was not changed; the message names the holder.

    The slot of a dead holder is free at once, so the holder is alive, or stopped.
    """

    exit_code = 6


class NoSuchReader(KvspoolError, LookupError):
    """The log has no durable reader of this name. Nothing was changed."""

    exit_code = 2


class TooManyReaders(KvspoolError):
    """Every reader slot of the log is in use. Nothing was changed; delete a reader that is no longer needed."""

    exit_code = 8


class Revoked(KvspoolError):
    """A member of a group was silent for longer than its `max_silence`, so its shards were given to others. Their positions were not moved.

    `shards`: the shards whose records, since the last commit, other members handle again. The shards that the member still has were
    committed. Continue with the loop: it returns records of the shards that the member has now.
    """

    exit_code = 6

    def __init__(self, message: str, shards: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.shards = shards


class TooManyMembers(KvspoolError):
    """A group has its largest number of members, or of shards. Nothing was changed; let a member leave, or use another group."""

    exit_code = 8


class LeaseLost(KvspoolError):
    """A task is no longer this worker's: its lease ended and another worker got it, or it was taken before a fork.

    The late call had no effect. `sequences`: of the lost tasks. Continue with other tasks; undo the effect, if it must not happen twice.
    """

    exit_code = 6

    def __init__(self, message: str, sequences: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.sequences = sequences


class TooManyWorkers(KvspoolError):
    """A task list has its largest number of workers. Nothing was changed; close a worker, or use another list."""

    exit_code = 8


class BatchChanged(KvspoolError):
    """A partly stored batch was repeated without some of its stored records. Nothing more was written.

    The program must repeat its batches with the same records. To continue anyway: `changed="append"` appends every record that isn't stored
    yet. The stored records stay, although some no longer belong to a batch.
    """

    exit_code = 2


class BatchOutOfOrder(KvspoolError, ValueError):
    """A producer has begun a later batch, and this one isn't known to be stored. Nothing was written; batch numbers must increase."""

    exit_code = 2


class TooManyPieces(KvspoolError):
    """A batch was interrupted so often, with appends of others in between, that its pieces can't be recorded. Nothing more was written."""

    exit_code = 8


class TooManyProducers(KvspoolError):
    """The log's producer table is full, and no state may be removed automatically. Nothing was written."""

    exit_code = 8


class Moved(KvspoolError):
    """The log was moved to new files by a resize. Nothing was written; the package catches this and continues there, so no caller sees
    it.
    """


class Reentered(KvspoolError, RuntimeError):
    """A signal handler or destructor used a handle for an append or flush during another one on the same handle. It wrote nothing.

    The interrupted append continues. Let the handler use its own handle, or only record the work for later.
    """


class NoEventLoop(KvspoolError, RuntimeError):
    """A log was awaited where asyncio runs no event loop, as under trio. Nothing happened; the message says what to do."""

    def __init__(self) -> None:
        super().__init__(
            "asyncio runs no event loop here, and logs are awaited in it. With anyio, use its backend asyncio: anyio.run(main). "
            "Under trio, use follow() and append() in a thread: trio.to_thread.run_sync"
        )


class Poisoned(KvspoolError):
    """A flush to disk failed, so records written since the last successful one may not be on disk.

    The kernel drops pages that it could not write, so a retry would report a false success. The log takes no more records. It can be read.
    `kvspool.repair` writes all of it to disk again and lets the log continue, if the disk works. Otherwise `kvspool.salvage` copies the
    records to a new log on a working disk.
    """

    exit_code = 5


class NotDurable(KvspoolError):
    """The records were appended and can be read, but are not known to be on disk. Don't append them again; call `sync`.

    `sequences` holds their sequences; `__cause__` is the error that interrupted the flush.
    """

    exit_code = 6

    def __init__(self, sequences: range, why: str) -> None:
        super().__init__(f"sequences {sequences[0]} to {sequences[-1]} were appended, but are not known to be on disk: {why}")
        self.sequences = self.appended = sequences


class NameNotDurable(KvspoolError, OSError):
    """The operation was done, but the last flush of the directory failed, so a crash of the machine may undo it. Don't repeat it.

    Check the disk, then flush the directory: `sync DIRECTORY`. `directory` is its path, `done` describes the operation, `errno` and
    `__cause__` say why the flush failed.
    """

    exit_code = 6

    def __init__(self, done: str, directory: str, cause: OSError) -> None:
        super().__init__(
            f"{done}, but a crash of the machine may undo it: the directory {directory} was not flushed ({cause}); "
            f"don't do it again: check the disk, then run `sync {directory}`"
        )
        self.done, self.directory, self.errno = done, directory, cause.errno


class TimeUnknown(KvspoolError, OSError):
    """The system can't read a segment that may have the latest time of its journal: an append could get an earlier time.

    Nothing was appended. Make the segment readable again, or move it away. `path` is the file, `errno` and `__cause__` say why.
    """

    def __init__(self, path: os.PathLike[str], cause: OSError) -> None:
        super().__init__(
            f"{os.fspath(path)} can't be read ({cause.strerror}), and no segment after it has a time: nothing was appended, since records "
            "would get times before those in it. Make it a readable file again, or move it away"
        )
        self.path, self.errno = os.fspath(path), cause.errno


class Unsettled(NotDurable):
    """Entries were put into a queue, or taken out of it, but that is not known to be on disk; `__cause__` says why.

    Don't put them again. `taken` holds the entries that were taken out. They return to the queue only if the machine crashes now.
    """

    def __init__(self, path: str, why: str, taken: list[bytes] | None = None) -> None:
        KvspoolError.__init__(self, f"{path}: entries were {'put' if taken is None else 'taken'}, but that may not be on disk: {why}")
        self.sequences = self.appended = range(0)
        self.taken = taken or []


class GapError(KvspoolError):
    """Records were lost before they could be read; `gap` says which and why.

    An iterator is after them: take the next record to continue. After a call that returns all records at once, the sound ones before the
    Gap are in `partial`; call again with `start=error.gap.last + 1`.
    """

    exit_code = 7

    def __init__(self, gap: Gap) -> None:
        super().__init__(str(gap))
        self.gap = gap


DO_NOT_REPEAT = "don't append those again"  # for records that are stored
AGAIN = "append the batch again: its producer leaves them out"  # for those of a producer's batch


def appended_by(error: BaseException) -> range:
    """Return the sequences of the records that an append stored before it failed with this error; an empty range if there are none."""
    found: range = getattr(error, "appended", range(0))
    return found


def say_what_is_stored(error: BaseException, appended: range, records: int, advice: str = DO_NOT_REPEAT) -> None:
    """Add to an error that ended a batch which of its records are stored; the caller then raises the error again.

    appended: their sequences. For a KvspoolError, which says that nothing was written, this raises AppendedInPart from it. Other errors get
    a note.
    """
    words = f"{len(appended)} of {records} records were appended, from sequence {appended.start} on; {advice}"
    if isinstance(error, KvspoolError) and not isinstance(error, Poisoned):
        raise AppendedInPart(f"{words}: {error}", appended) from error
    error.appended = appended  # type: ignore[attr-defined]
    error.add_note(words)
