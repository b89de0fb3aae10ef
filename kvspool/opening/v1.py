"""Read the spool directories of kvspool v1, the ancestor of this program. They are never written.

**Format.** A directory with pairs of files `NAME-N.sp` and `NAME-N.sr`, in the order of NAME, then of N as a number. `.sp`: `KV+SPOOL`,
frames one after the other, and then the length of the last one (u32). A frame: `tpl`, flags (bit 0: integers are big-endian; bit 1: the
lengths of strings are stored one larger), its length u32, `A(ss)` and a zero, the number of pairs u32, then each key and value: length u32,
bytes. `.sr`: u32, the offset of the next frame to be read.

The integers outside of frames are in the order of the host that wrote them; the first frame of the file tells that order.

**Not read.** Since December 2017 the same program keeps its spool in a ring of the library libshr: one file `data` in the directory, which
begins with `libshr1` and a zero. Its layout is that of a C struct; only its own program can read it.

**Limits.** Keys and values are UTF-8; others are refused. All data is checked against the size of its file before it is trusted.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.errors import NotAFile, NotALog, NotImportable
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

MAGIC = b"KV+SPOOL"
RING, RING_MAGIC = "data", b"libshr1\0"
_FRAME = b"tpl"
_SHAPE = b"A(ss)\0"
_LEAST = len(_FRAME) + 1 + 4 + len(_SHAPE) + 4
_NAME = re.compile(r"(.*)-(\d{1,20})\.sp")
_BIG, _ONE_MORE = 1, 2


class _Torn(Exception):
    """The file ends within a frame."""


def is_spool(path: Path) -> bool:
    """Return whether this is a spool directory of kvspool v1."""
    return path.is_dir() and bool(_files(path))


def is_ring(path: Path) -> bool:
    """Return whether this is a spool directory of kvspool v1 since December 2017, which can't be read here."""
    with suppress(OSError):
        return disk.read(path / RING, len(RING_MAGIC)) == RING_MAGIC
    return False


def refuse_ring(path: Path) -> None:
    """Raise NotALog, with advice, for a directory that `is_ring`."""
    if is_ring(path):
        raise NotALog(
            f"{path} is a spool of kvspool v1 since December 2017: its file {RING} is a ring of libshr, which can't be imported. "
            "Directories with NAME-N.sp, from before that, can; read this one with its own program and append the records here"
        )


def _files(path: Path) -> list[Path]:
    found = [(match[1], int(match[2]), name) for name in os.listdir(path) if (match := _NAME.fullmatch(name))]
    return [path / name for _, _, name in sorted(found)]


def records(path: Path, *, unread: bool, torn: list[str]) -> Iterator[dict[str, str]]:
    """Yield the pairs of each frame; `unread`: from the reader's position on. Files with an incomplete end are added to `torn`."""
    files = _files(path)
    if not files:
        refuse_ring(path)
        raise NotALog(f"{path} is not a spool directory of kvspool v1: it has no NAME-N.sp")
    for file in files:
        yield from _records(file, unread, torn)


def _records(path: Path, unread: bool, torn: list[str]) -> Iterator[dict[str, str]]:
    data = _content(path)
    if data[: len(MAGIC)] != MAGIC:
        raise NotImportable(f"{path} is not a file of kvspool v1: it doesn't begin with {MAGIC.decode()}")
    at, length = len(MAGIC), 0
    order = ">" if data[at : at + 3] == _FRAME and len(data) > at + 3 and data[at + 3] & _BIG else "<"
    start = _place(path, order, len(data)) if unread else at
    while at < len(data):
        if length and struct.pack(order + "I", length).startswith(data[at:]):
            if len(data) - at < 4:
                torn.append(f"{path} at byte {at}")
            break  # the length after the last frame
        try:
            pairs, length = _frame(data, at)
        except _Torn:
            torn.append(f"{path} at byte {at}")
            break
        except ValueError as error:
            raise NotImportable(f"{path}, frame at byte {at}: {error}") from error
        if at >= start:
            yield pairs
        at += length


def _content(path: Path) -> bytes:
    """Return all bytes of a file. Raises NotImportable for a FIFO or a device, which might never end."""
    try:
        file = Descriptor(os.path.realpath(path), os.O_RDONLY)
    except NotAFile as error:
        raise NotImportable(str(error)) from None
    with file as fd:
        return system.port.read(fd, system.port.status(fd).st_size, 0)


def _place(path: Path, order: str, size: int) -> int:
    """Return the position of the reader."""
    reader = path.with_suffix(".sr")
    try:
        raw = _content(reader)
    except FileNotFoundError:
        raise NotImportable(f"{reader} is missing, so the reader's position is unknown; import all") from None
    place: int = struct.unpack_from(order + "I", raw)[0] if len(raw) >= 4 else 0
    if not len(MAGIC) <= place <= size:
        raise NotImportable(f"{reader} has the position {place}, which is after the end of {path.name}; import all")
    return place


def _frame(data: bytes, at: int) -> tuple[dict[str, str], int]:
    """Return the pairs of the frame at a byte, and its length."""
    head = data[at : at + _LEAST]
    if head[:3] != _FRAME[: len(head)]:
        raise ValueError("it doesn't begin with tpl")
    if len(head) < _LEAST:
        raise _Torn
    flags = head[3]
    if flags & ~(_BIG | _ONE_MORE):
        raise ValueError(f"it has unknown flags {flags:#x}")
    order = ">" if flags & _BIG else "<"
    length: int = struct.unpack_from(order + "I", head, 4)[0]
    if length < _LEAST:
        raise ValueError(f"its stated length is {length} bytes")
    if head[8 : 8 + len(_SHAPE)] != _SHAPE:
        raise ValueError("its content is not pairs of strings")
    if length > len(data) - at:
        raise _Torn
    (count,) = struct.unpack_from(order + "I", head, _LEAST - 4)
    strings = _strings(data[at + _LEAST : at + length], order, 1 if flags & _ONE_MORE else 0)
    if len(strings) != 2 * count:
        raise ValueError(f"it states {count} pairs, and has {len(strings)} strings")
    return dict(zip(strings[::2], strings[1::2], strict=True)), length


def _strings(body: bytes, order: str, more: int) -> list[str]:
    """Return the strings of a frame, which must fill it exactly."""
    found = []
    at = 0
    while at < len(body):
        if len(body) - at < 4:
            raise ValueError("it ends within a string")
        length = struct.unpack_from(order + "I", body, at)[0] - more
        at += 4
        if not 0 <= length <= len(body) - at:
            raise ValueError(f"a string of {length} bytes exceeds it")
        found.append(body[at : at + length].decode())
        at += length
    return found
