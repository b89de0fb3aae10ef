"""Everything that can go wrong, one class each.

    KvspoolError
    |-- Closed                  the handle was closed
    |-- LogNotFound             nothing lies at the path           (also FileNotFoundError)
    |-- LogExists               something lies at the path already (also FileExistsError)
    |-- LogVanished             the log was deleted or replaced while it was open
    |-- FormatError             what lies there is not ours to read
    |   |-- NotALog             neither a log nor anything that holds logs
    |   |-- UnknownVersion      written by a newer kvspool
    |   |-- MismatchedPair      control block and data file of different logs
    |   `-- MissingExtra        it needs a package that isn't installed (also ImportError)
    |-- Unrecovered             the machine was restarted, and nobody who may write has opened the log since
    |-- Corruption              ours, but damaged
    |   |-- Truncated           a file is shorter than its header says, or than what was read of it, or was to be flushed
    |   |-- NotAFile            a FIFO, device, socket or directory has a file's name (also OSError)
    |   `-- ChecksumMismatch    an item's bytes are not those that were stored
    |-- TooLarge                the record can't be held          (also ValueError)
    |-- Unencodable             no codec takes the value          (also TypeError)
    |-- Undecodable             the value isn't what its codec says (also ValueError)
    |-- NotImportable           what is to be imported is no record (also ValueError)
    |-- NotKept                 a copy would lose keys, types, timestamps or codecs (also ValueError)
    |-- OtherRecords            the target of a copy holds records that aren't the source's
    |-- OutOfRange              no such sequence yet              (also ValueError)
    |-- Pruned                  no such item any more             (also LookupError)
    |-- Unsupported             this kind of log has no such capability (also ValueError)
    |-- UnsafeFilesystem        shared memory doesn't work there
    |-- LockTimeout             somebody else holds the lock      (also TimeoutError)
    |-- SpoolFull               no room until a durable reader moves on
    |   `-- Pinned              no room until somebody's view is closed
    |-- AppendedInPart          a batch was interrupted: the first records of it are stored, and stay
    |-- QueueFull               no room in the queue              (also queue.Full)
    |-- QueueEmpty              nothing in the queue              (also queue.Empty)
    |-- ReaderBusy              somebody else has this durable reader open
    |-- NoSuchReader            the log has no durable reader of this name (also LookupError)
    |-- TooManyReaders          every reader's slot is taken
    |-- BatchChanged            a batch that was appended in part has come again with other records
    |-- BatchOutOfOrder         a batch before the last one that was begun    (also ValueError)
    |-- TooManyPieces           a batch was interrupted too often
    |-- TooManyProducers        no account is free for one more producer
    |-- Moved                   the log lies in new files since it was resized; never leaves the package
    |-- Reentered               an append in the middle of another one, from a signal handler (also RuntimeError)
    |-- Poisoned                a flush to disk failed; the log takes no more records
    |-- NotDurable              the records were appended, but are not known to be on disk
    |   `-- Unsettled           the same of a queue's entries, put or taken
    |-- NameNotDurable          an operation was done, but a crash of the machine may undo it (also OSError)
    |-- TimeUnknown             a segment that can't be read may have the latest time of its journal (also OSError)
    `-- GapError                records were lost before they could be read

**A batch that is stored in part.** Large batches are published in pieces, so an error can come after some of them. `appended_by(error)`
returns the sequences that are stored then. An error that promises "nothing was written" is replaced by AppendedInPart, whose `__cause__` it
is. Others, such as the system's OSError, Poisoned or KeyboardInterrupt, keep their class and get a note and the attribute `appended`.

Wrong arguments raise plain ValueError and TypeError. The system's OSError (disk full, permission denied, no more descriptors) passes
through untouched, with a note that names the file. `exit_code` is what the command returns for the class.
"""

from __future__ import annotations

import os
import queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspool.gap import Gap


class KvspoolError(Exception):
    """Base of every error that is this package's own.

    `partial` holds the sound records that a call had read before it failed, if it returns them all at once, as `read_arrow` does. It is
    None otherwise.
    """

    exit_code = 1
    partial: Any = None


class Closed(KvspoolError):
    """An operation on a closed handle. Nothing happened; open the log again."""


class LogNotFound(KvspoolError, FileNotFoundError):
    """Nothing lies at the path. Nothing happened; `kvspool.create` makes a log."""

    exit_code = 3


class LogExists(KvspoolError, FileExistsError):
    """Something lies at the path already. It was not touched; `kvspool.open` opens a log."""

    exit_code = 3


class LogVanished(KvspoolError):
    """The log's files were deleted or replaced while it was open. The handle is of no more use; open the path again."""

    exit_code = 3


class FormatError(KvspoolError):
    """What lies at the path can't be read by this version. It was not touched."""

    exit_code = 4


class NotALog(FormatError):
    """The path holds neither a log nor a directory of logs."""


class UnknownVersion(FormatError):
    """The log was written by a newer kvspool. Upgrade, and open it again."""


class MismatchedPair(FormatError):
    """`spool.ctl` and `spool.dat` belong to different logs: one was copied or restored without the other."""


class MissingExtra(FormatError, ImportError):
    """What lies there needs a package that isn't installed. Nothing was changed; the message names the extra to install."""


class Unrecovered(KvspoolError):
    """The machine was restarted since the log was written, or an older copy of its control block was restored, and you may only read it.
    Nothing was changed.

    Its control block can't be trusted before the log is recovered. Whoever may write does that by opening it once.
    """

    exit_code = 5


class Corruption(KvspoolError):
    """A part of the log is damaged. Nothing was changed; what is undamaged can still be read."""

    exit_code = 5


class Truncated(Corruption):
    """A file is shorter than its header says. It was not mapped, since a load behind its end would kill the process.

    From a journal: records that a reader has read, or a durable append was to put on disk, were taken back by a rewind, or cut.
    """


class NotAFile(Corruption, OSError):
    """A FIFO, a device, a socket or a directory has the name of a file. It was not read; move it away, or restore the file."""


class ChecksumMismatch(Corruption):
    """The item at a position is damaged; those before and behind it can be read. `position`, `path` and `offset` say where it lies."""

    def __init__(self, position: int, path: str, offset: int) -> None:
        super().__init__(f"item {position}, at byte {offset} of {path}, is damaged: its checksum is another one; read on behind it")
        self.position, self.path, self.offset = position, path, offset


class TooLarge(KvspoolError, ValueError):
    """The record is larger than the log can hold. Nothing was written; make it smaller, or the log larger."""

    exit_code = 2


class Unencodable(KvspoolError, TypeError):
    """No codec takes a value of this type. Nothing was written; pass bytes, str, a dict or a `msgspec.Struct`."""

    exit_code = 2


class Undecodable(KvspoolError, ValueError):
    """The stored bytes are not what the record's codec says. `record.value` still gives them."""

    exit_code = 5


class NotImportable(KvspoolError, ValueError):
    """What is to be imported is no record. The message says where it stands, why, and what was imported before."""

    exit_code = 2


class NotKept(KvspoolError, ValueError):
    """A copy would lose what the target's format has no room for. Nothing was written of the batch that the message speaks of.

    Choose another format, or say that the loss is meant: `lossy`.
    """

    exit_code = 2


class OtherRecords(KvspoolError):
    """The target of a copy holds records that aren't the source's, or others append to it meanwhile. Nothing more was written.

    Choose another target, or say that the copy is to stand behind them: `append`.
    """

    exit_code = 4


class OutOfRange(KvspoolError, ValueError):
    """The sequence has not been written yet. Of an item that was asked for, `position`, `path` and `offset` say where it would lie."""

    exit_code = 2

    def __init__(self, message: str, position: int | None = None, path: str | None = None, offset: int | None = None) -> None:
        super().__init__(message if path is None else f"{message}; it would lie at byte {offset} of {path}")
        self.position, self.path, self.offset = position, path, offset


class Pruned(KvspoolError, LookupError):
    """The item was appended once, and is gone. `position`, `path` and `offset` say where it lay."""

    exit_code = 7

    def __init__(self, message: str, position: int, path: str, offset: int) -> None:
        super().__init__(f"{message}; it lay at byte {offset} of {path}")
        self.position, self.path, self.offset = position, path, offset


class Unsupported(KvspoolError, ValueError):
    """This kind of log can't do that. Nothing happened. `capability` is not in the log's `capabilities`; `instead` says what to use."""

    exit_code = 2

    def __init__(self, kind: str, capability: str, instead: str) -> None:
        super().__init__(f"a log of the kind {kind} has no {capability}: {instead}")
        self.kind, self.capability, self.instead = kind, capability, instead

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str, str]]:
        return type(self), (self.kind, self.capability, self.instead)


class UnsafeFilesystem(KvspoolError):
    """Processes don't share memory or locks there, or a full disk kills them. Nothing was done; use ext4, xfs or tmpfs.

    On btrfs a journal can be used, and a spool that is there already can be read.
    """

    exit_code = 3


class LockTimeout(KvspoolError, TimeoutError):
    """Somebody else holds the lock. Nothing was written; try again, or look at the holder that the message names.

    A lock is never broken: a dead holder's is freed by the kernel at once, so the holder lives, or is stopped.
    """

    exit_code = 6


class SpoolFull(KvspoolError):
    """No room for the records until a durable reader moves on. Nothing was written; the message names the reader.

    Logs with the policy "block" raise it after the writer's timeout, those with "raise" at once.
    """

    exit_code = 8


class Pinned(SpoolFull):
    """No room for the records until a view of the oldest ones is closed, or the process that has it open dies. The message says where."""


class AppendedInPart(KvspoolError):
    """A batch was interrupted after its first records were stored. They stay and can be read; don't append them again.

    `appended` holds their sequences, so `values[len(error.appended):]` are left to append. `__cause__` is the error that came in between.
    """

    exit_code = 6

    def __init__(self, why: str, appended: range) -> None:
        super().__init__(why)
        self.appended = appended


class QueueFull(KvspoolError, queue.Full):
    """No room in the queue: its bound is reached, or every chunk id is taken. `placed` says how many entries of a batch were put before."""

    exit_code = 8

    def __init__(self, why: str, placed: int = 0) -> None:
        super().__init__(why)
        self.placed = placed


class QueueEmpty(KvspoolError, queue.Empty):
    """There was no entry in the queue, or none came within the timeout. Nothing happened."""


class ReaderBusy(KvspoolError):
    """Somebody else has this durable reader open. Its place was not touched; the message names the holder.

    The slot of a dead holder is free at once, so the holder lives, or is stopped.
    """

    exit_code = 6


class NoSuchReader(KvspoolError, LookupError):
    """The log has no durable reader of this name. Nothing was changed."""

    exit_code = 2


class TooManyReaders(KvspoolError):
    """Every reader's slot of the log is taken. Nothing was changed; delete a reader that is no longer needed."""

    exit_code = 8


class BatchChanged(KvspoolError):
    """A batch of which a part is stored has come again, and records of that part are not in it. Nothing more was written.

    What makes the batches has to make the same ones again. To go on all the same: `changed="append"` appends every record that isn't there
    yet, and what is there stays, though it belongs to no batch any more.
    """

    exit_code = 2


class BatchOutOfOrder(KvspoolError, ValueError):
    """A producer has begun a later batch, and this one isn't known to be there. Nothing was written; the numbers of batches only go up."""

    exit_code = 2


class TooManyPieces(KvspoolError):
    """A batch was interrupted so often, with others appending in between, that its pieces can't be remembered. Nothing more was written."""

    exit_code = 8


class TooManyProducers(KvspoolError):
    """The log remembers as many producers as it can, and none of them may be forgotten by itself. Nothing was written."""

    exit_code = 8


class Moved(KvspoolError):
    """The log lies in new files since it was resized. Nothing was written; who catches it goes on there, so no caller ever sees it."""


class Reentered(KvspoolError, RuntimeError):
    """A signal handler or destructor used a handle for an append or flush in the middle of another one. Nothing was written by it.

    The interrupted append goes on. Let the handler use a handle of its own, or only leave a note for later.
    """


class Poisoned(KvspoolError):
    """A flush to disk failed, so what was written since the last good one may not be on disk.

    The kernel forgets the pages that it could not write; a retry would report success that never was.
    The log takes no more records. It can be read; `kvspool.repair` writes all of it to disk anew and lets it go on, if the disk can;
    otherwise `kvspool.salvage` copies what it holds to a new log on a sound one.
    """

    exit_code = 5


class NotDurable(KvspoolError):
    """The records were appended and can be read, but are not known to be on disk. Don't append them again; call `sync`.

    `sequences` says which they are; `__cause__` is the error that came in between.
    """

    exit_code = 6

    def __init__(self, sequences: range, why: str) -> None:
        super().__init__(f"sequences {sequences[0]} to {sequences[-1]} were appended, but are not known to be on disk: {why}")
        self.sequences = self.appended = sequences


class NameNotDurable(KvspoolError, OSError):
    """The operation was done, but the last flush of the directory failed, so a crash of the machine may undo it. Don't do it again.

    Check the disk, then flush the directory: `sync DIRECTORY`. `directory` is its path, `done` says what was done, `errno` and `__cause__`
    why the flush failed.
    """

    exit_code = 6

    def __init__(self, done: str, directory: str, cause: OSError) -> None:
        super().__init__(
            f"{done}, but a crash of the machine may undo it: the directory {directory} was not flushed ({cause}); "
            f"don't do it again: check the disk, then run `sync {directory}`"
        )
        self.done, self.directory, self.errno = done, directory, cause.errno


class TimeUnknown(KvspoolError, OSError):
    """The system doesn't read a segment that may have the latest time of its journal: an append could get an earlier time.

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

    Don't put them again. `taken` holds the entries that were taken out: they are yours, and come again only if the machine dies now.
    """

    def __init__(self, path: str, why: str, taken: list[bytes] | None = None) -> None:
        KvspoolError.__init__(self, f"{path}: entries were {'put' if taken is None else 'taken'}, but that may not be on disk: {why}")
        self.sequences = self.appended = range(0)
        self.taken = taken or []


class GapError(KvspoolError):
    """Records were lost before they could be read; `gap` says which and why.

    An iterator is after them: take the next record to go on. After a call that returns all records at once, the sound ones before the
    Gap are in `partial`; call again with `start=error.gap.last + 1`.
    """

    exit_code = 7

    def __init__(self, gap: Gap) -> None:
        super().__init__(str(gap))
        self.gap = gap


DO_NOT_REPEAT = "don't append those again"  # what to do about records that are stored
AGAIN = "append the batch again: its producer leaves them out"  # and about those of a producer's batch


def appended_by(error: BaseException) -> range:
    """Return the sequences of the records that an append stored before it failed with this error; an empty range if there are none."""
    found: range = getattr(error, "appended", range(0))
    return found


def say_what_is_stored(error: BaseException, appended: range, records: int, advice: str = DO_NOT_REPEAT) -> None:
    """Say which records are stored of a batch that an error ended after the sequences `appended`; the caller then raises the error again.

    Raises AppendedInPart in place of a KvspoolError that says that nothing was written. Other errors get a note.
    """
    words = f"{len(appended)} of {records} records were appended, from sequence {appended.start} on; {advice}"
    if isinstance(error, KvspoolError) and not isinstance(error, Poisoned):
        raise AppendedInPart(f"{words}: {error}", appended) from error
    error.appended = appended  # type: ignore[attr-defined]
    error.add_note(words)
