"""The settings of a journal whose format can't store them: a small JSON file of kvspool next to the segments.

A journal created by another program has none; then the defaults apply, or the options of `open`.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import msgspec

from kvspool import system
from kvspool.engine.retention import Retention
from kvspool.errors import UnknownVersion
from kvspool.options import Durability
from kvspool.record import PORTABLE, STRUCTURED
from kvspool.system import disk, documents

NAME = "kvspool.json"
LARGEST = 65536  # bytes
CODECS = tuple(name for name in STRUCTURED if name in PORTABLE)
FAULT = "doesn't contain the settings of the journal"
ADVICE = "remove it to open with the defaults"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """format: its name. limits: options of its class, by name. codec: of values that are neither bytes nor str. durability, sync_interval
    (seconds): of handles that aren't opened with others. retention: applied by the writer that begins a segment. first_sequence: of the
    first record ever. id: 16 random bytes in hex that identify this journal; none if it was created without.
    """

    format: str
    limits: dict[str, int] = {}
    codec: str = "json"
    durability: Durability = "memory"
    sync_interval: float | None = None
    retention: Retention | None = None
    first_sequence: Annotated[int, msgspec.Meta(ge=0)] = 0
    id: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""

    def __post_init__(self) -> None:
        if self.sync_interval is not None and not 0 < self.sync_interval < float("inf"):
            raise ValueError(f"sync_interval is a number of seconds, not {self.sync_interval}")


def new_id() -> str:
    """Return an id that no other journal has."""
    return system.port.random(16).hex()


def load(directory: Path) -> Settings | None:
    """Return the settings in a directory; None if there are none. Raises Corruption; UnknownVersion for an unknown codec."""
    try:
        found = documents.load(directory / NAME, Settings, LARGEST, FAULT, ADVICE)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    if found is not None and found.codec not in CODECS:
        known = f"this kvspool knows {', '.join(CODECS)}"
        raise UnknownVersion(f"{directory / NAME}: written by a newer kvspool, with the codec {found.codec!r}; {known}; upgrade it")
    return found


def store(directory: Path, settings: Settings, mode: int) -> None:
    """Write the settings into a directory, on disk, whole or not at all."""
    disk.replace(directory / NAME, msgspec.json.encode(settings), mode)
