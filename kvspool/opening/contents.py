"""The names of a log's files, and of the hidden directories next to it, for logs of any kind; and the remains of killed deletions."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvspool.engine import claims, making
from kvspool.engine.claims import Companion, Contents
from kvspool.groups.share import LISTS, beside
from kvspool.importing import import_whole

_NOTE = frozenset((making.NOTE, f"{making.NOTE}.tmp"))


def finish(path: Path) -> None:
    """Remove the remains of killed deletions of the log at an absolute path, as far as possible."""
    if making.deleted(path):
        claims.finish(path, _every(), companions(path))


def _every() -> Contents:
    """Return the names of files of logs of any kind."""
    import_whole("kvspool.journal.claim")
    from kvspool.journal import claim as journals
    from kvspool.spool import claim as spools

    kinds = (spools.CONTENTS, journals.NESTED, journals.BARE)
    return Contents(lambda name: any(kind.is_file(name) for kind in kinds), journals.NESTED.folders)


def companions(path: Path) -> tuple[Companion, ...]:
    """Return all hidden directories that can belong to the log at a path."""
    import_whole("kvspool.journal.claim")
    from kvspool.journal import claim as journals

    return note(path), journals.companion(path)


def note(path: Path) -> Companion:
    """Return the hidden directory with the note of a copy to the log at a path."""
    return Companion(making.note_directory(path).name, Contents(_NOTE.__contains__, {}))


def lists(path: Path) -> Companion:
    """Return the hidden directory with the files of groups and task lists of the log at a path."""
    return Companion(beside(path).name, Contents(lambda name: re.fullmatch(LISTS, name) is not None, {}))


def files_of(path: Path) -> list[Path]:
    """Return the files of a log, and those next to it."""
    found = [path]
    for directory in (path, *(path.with_name(one.name) for one in companions(path))):
        for place, _, names in os.walk(directory):
            found += [Path(place) / name for name in names]
    return found
