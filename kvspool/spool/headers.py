"""The headers of the two files: sealed with a checksum when written, checked when read."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from kvspool.engine.checksums import checksum
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, FormatError, NotALog, Truncated, UnknownVersion
from kvspool.spool import format

H = TypeVar("H", format.ControlHeader, format.DataHeader)


def checked(layout: Layout[H], raw: bytes, path: Path, magic: bytes) -> H:
    """Check and return the header in `raw`, of which no byte was trusted before."""
    if len(raw) < len(magic) or raw[: len(magic)] != magic:
        raise NotALog(f"{path} is not a file of a spool: it doesn't begin with {magic.decode()}")
    if len(raw) < layout.size:
        raise Truncated(f"{path} has {len(raw)} bytes, less than its header")
    record = layout.unpack(raw)
    if record.version != format.VERSION:
        known = f"this kvspool reads version {format.VERSION}"
        raise UnknownVersion(f"{path} has format version {record.version}; {known}: {_way_out(record.version)}")
    if checksum(raw[: layout.size - 4]) != record.crc:
        raise Corruption(f"{path}: the checksum of its header doesn't match")
    return record


def _way_out(version: int) -> str:
    if version > format.VERSION:
        return "upgrade kvspool to open the log"
    return "export the log with the older kvspool that wrote it (kvspool export), and import it into a new one (kvspool import)"


def check_capacity(capacity: int, data_start: int, path: Path) -> None:
    if not format.LEAST_CAPACITY <= capacity <= format.MOST_CAPACITY or capacity % format.PAGE or data_start != format.DATA_START:
        raise FormatError(f"{path}: a ring of {capacity} bytes at {data_start} is not possible in this version")
