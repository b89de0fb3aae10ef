"""The note of a copy, for a target that can't show how far the copy came: a hidden directory next to the target.

`.NAME.copy` is locked by the copy that fills NAME, so that there is only one at a time. Its file `note` is replaced whole, on disk. It
exists while the target is being created, and while sequences in the target differ from the source's, or don't exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from kvspool import system
from kvspool.engine.making import NOTE, note_directory
from kvspool.errors import LockTimeout
from kvspool.system import disk, documents
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

LARGEST = 65536  # bytes


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """source: identity of the source. is_made: the target is complete. first: sequence of the source at which the copy began. sequence: of
    the source's record that is stored, or will be stored, at the position `at` of the target: a sequence, or a chunk and a byte in it.
    since: the target's sequence at which the copy began.
    """

    source: list[str]
    is_made: bool = True
    first: int = 0
    sequence: int = 0
    at: list[int] = []
    since: int = 0


class Notes(Handle):
    """The directory of the note, locked."""

    def __init__(self, directory: Path, file: Descriptor) -> None:
        self.directory = directory
        self._file = file
        self._path = directory / NOTE

    def load(self) -> Note | None:
        """Return the note; None if there is none. Raises Corruption."""
        try:
            return documents.load(
                self._path, Note, LARGEST, "doesn't say how far a copy came", "remove the target and it, and copy again"
            )
        except FileNotFoundError:
            return None

    def store(self, note: Note) -> None:
        """Replace the note, on disk when it returns."""
        disk.replace(self._path, msgspec.json.encode(note), 0o600)

    def clear(self) -> None:
        """Remove the note: the target shows the progress."""
        for path in (self._path, self._path.with_name(f"{NOTE}.tmp")):
            with suppress(FileNotFoundError):
                system.port.remove(path)
        disk.flush_directory(self.directory)

    def close(self) -> None:
        """Release the lock for the next copy. The directory is removed with its last file."""
        with suppress(OSError):
            system.port.remove_directory(self.directory)
        self._file.close()


@contextmanager
def locked(target: Path) -> Iterator[Notes]:
    """Lock a target for this copy. Raises LockTimeout while another copy fills it, and the system's OSError."""
    notes = _locked(note_directory(target), target)
    try:
        yield notes
    finally:
        notes.close()


def _locked(directory: Path, target: Path) -> Notes:
    while True:
        disk.make_directory(directory)
        try:
            file = Descriptor(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # the previous copy has just removed it
        try:
            if not system.port.try_lock_file(file.number, shared=False):
                raise LockTimeout(f"another copy fills {target}; wait until it has finished")
            if file.is_at(directory):
                return Notes(directory, file)
        except BaseException:
            file.close()
            raise
        file.close()
