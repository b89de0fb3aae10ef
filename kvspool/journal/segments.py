"""The segments of a journal: a directory of files in the order of the sequences in their names.

Segments are read with `pread` and never mapped: another process may cut or remove one at any moment, and a load after the end of a file
kills the process. At most `OPEN` descriptors are kept, however many segments there are.

**Archives.** If the format allows it, a sealed segment may be compressed, under its name with `.zst`; see `segment.Archived`. If both forms
exist, the uncompressed one counts: a conversion was interrupted. Each conversion creates one form before it removes the other. So a lookup
of one, then the other, then the first again finds the segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.errors import Corruption, LogVanished, UnknownVersion
from kvspool.journal import control, seekable
from kvspool.journal.segment import ARCHIVE, Archived
from kvspool.journal.segment import Segment as Segment

if TYPE_CHECKING:
    from kvspool.journal.format import Format

OPEN = 8  # descriptors that one handle keeps for reading


class Segments:
    """The directory, for one handle; not to be shared between threads. A forked child may share the descriptors: nothing depends on their
    offsets. most_open: descriptors that are kept. refuse: raises LogVanished if another journal is at the path now; called after each open.
    """

    def __init__(self, path: Path, format: Format, most_open: int = OPEN, refuse: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.refuse = refuse
        self._most_open = most_open
        self.format = format
        self.directory = format.segments_in(path)
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._names: dict[int, str] = {}  # of segments with names other than ours

    def bases(self) -> list[int]:
        """Return the first sequences of all segments, in order; other names are ignored. Raises LogVanished."""
        if not self.format.has_other_names:
            found = self._listed()
            if self.format.has_archives:
                found |= self._listed()  # a listing may miss a segment during a conversion; the next one finds it in the other form
            return sorted(found)
        names = self._all_names()
        named: dict[int, str] = {}
        for name in sorted(names):
            base = self.format.base_of(name)
            if base is not None and (base not in named or name == self.format.name_of(base)):
                named[base] = name
        self._names = {base: name for base, name in named.items() if name != self.format.name_of(base)}
        return sorted(named)

    def _listed(self) -> set[int]:
        found = (self.base_of(name) for name in self._all_names())
        return {base for base in found if base is not None}

    def _all_names(self) -> list[str]:
        try:
            return system.port.names(self.directory)
        except FileNotFoundError:
            raise LogVanished(f"{self.directory} was deleted or renamed while it was open; open it again if it exists") from None

    def base_of(self, name: str) -> int | None:
        """Return the first sequence of the segment with this name, or its archive; None if it is not a segment."""
        return self.format.base_of(name.removesuffix(ARCHIVE) if self.format.has_archives else name)

    def path_of(self, base: int) -> Path:
        """Return the path of the segment that begins at a sequence, existing or not: its archive if nothing else exists."""
        plain, archive = self.plain_path(base), self.archive_path(base)
        if self.format.has_archives and system.port.look_up(plain) is None and system.port.look_up(archive) is not None:
            return archive
        return plain

    def size_of(self, base: int) -> int:
        """Return the bytes of a segment; of an archive those that it was made from, or its own if its table is damaged; 0 if it is gone."""
        for path in self._paths(base):
            status = system.port.look_up(path)
            if status is None:
                continue
            if path.suffix != ARCHIVE:
                return min(status.st_size, self.format.most_bytes)
            try:
                return seekable.size_of(path)
            except Corruption:
                return status.st_size
            except FileNotFoundError:  # its segment was restored, or both were removed
                continue
        return 0

    def plain_path(self, base: int) -> Path:
        """Return the path at which the segment that begins at a sequence is written."""
        name = self._names.get(base) or self.format.name_of(base)
        if name is None:
            raise ValueError(f"no segment of {self.path} begins at sequence {base}")
        return self.directory / name

    def renamed(self, base: int, name: str) -> Path:
        """Rename a segment to our name for it; return its new path."""
        path = self.directory / name
        system.port.rename(self.path_of(base), path)
        self._names.pop(base)
        return path

    def archive_path(self, base: int) -> Path:
        """Return the path of the archive of a segment, if there is one."""
        plain = self.plain_path(base)
        return plain.with_name(plain.name + ARCHIVE)

    def index_path(self, base: int) -> Path:
        """Return the path of the sparse index of a segment, if there is one."""
        return self.format.sidecar(self.path) / "index" / f"{base:016x}.idx"

    def _paths(self, base: int) -> tuple[Path, ...]:
        """Return the names to try, in order: one of the two forms exists at any moment, but perhaps not when it is tried."""
        plain = self.plain_path(base)
        return (plain, self.archive_path(base), plain) if self.format.has_archives else (plain,)

    def exists(self, base: int) -> bool:
        """Return whether there is a segment that begins at this sequence: checks only its names, however many segments there are."""
        if self.format.name_of(base) is None:
            return False
        return any(system.port.look_up(path) is not None for path in self._paths(base)) or bool(self._names and base in self.bases())

    def remove(self, base: int) -> None:
        """Remove a segment, in each form; under the append lock. A crash meanwhile leaves the form that counts, or none."""
        if self.format.has_archives:
            with suppress(FileNotFoundError):
                system.port.remove(self.archive_path(base))
        with suppress(FileNotFoundError):
            system.port.remove(self.plain_path(base))

    def remove_index(self, base: int) -> None:
        """Remove the sparse index of a removed segment; a leftover is never read."""
        with suppress(OSError):
            system.port.remove(self.index_path(base))

    def get(self, base: int) -> Segment | None:
        """Return an open segment; None if it doesn't exist (any more). It stays open until others are requested.

        Raises Corruption for an archive whose table is damaged, MissingExtra, and the errors of `refuse`.
        """
        segment = self._open.pop(base, None)
        if segment is not None and segment.is_gone():
            segment.close()
            segment = None
        if segment is None:
            segment = self._opened(base)
            if segment is None:
                return None
            try:
                self.refuse()
            except BaseException:
                segment.close()
                raise
        self._open[base] = segment
        if len(self._open) > self._most_open:
            self._open.popitem(last=False)[1].close()
        return segment

    def _opened(self, base: int) -> Segment | None:
        for path in self._paths(base):
            with suppress(FileNotFoundError):
                return Archived(path, base) if path.suffix == ARCHIVE else Segment(path, base, most=self.format.most_bytes)
        with suppress(FileNotFoundError, LogVanished):
            if self.format.has_other_names and base in self.bases():
                return Segment(self.plain_path(base), base)
        return None

    def holding(self, sequence: int, bases: list[int]) -> int | None:
        """Return the base of the segment of `bases` that a sequence belongs to; None if all of them begin later."""
        at = bisect_right(bases, sequence)
        return bases[at - 1] if at else None

    def lost_end(self, base: int, sequence: int) -> int:
        """Return the sequence after the records of the last segments if their files are gone, according to the writers of this boot of the
        machine. base: of the last present segment; sequence: of the record after it, which is returned if no record is missing.
        """
        if not self.format.begins_anywhere:
            return sequence
        page = control.look(self.format.lock_file(self.path))
        if page.base <= base or page.next_sequence <= sequence or self.exists(page.base) or self.bases()[-1:] != [base]:
            return sequence  # a file is created before the page has records of it, and only the oldest ones are removed
        return page.next_sequence

    def begin_of(self, segment: Segment) -> int:
        """Return where the first frame of a segment begins; 0 if its header is incomplete. Raises Corruption."""
        if not segment.begin:
            try:
                segment.begin = self.format.begin_of(segment)
            except (Corruption, UnknownVersion) as error:
                if isinstance(segment, Archived) and segment.is_damaged(0):
                    return self.format.header_bytes  # its frames may be sound after the damage
                raise type(error)(f"{segment.path}: {error}") from None
        return segment.begin

    def close(self) -> None:
        """Release the descriptors. Two threads may do it at once, so nothing is taken out of the dict."""
        opened, self._open = self._open, OrderedDict()
        for segment in opened.values():
            segment.close()
