"""The stored positions of a hub root's durable reader: of all shards, in one file.

    [root]/.hub/readers/[name].positions
    kvspool-hub-positions 1 [CRC32C of the rest, 8 hex digits]
    [["JFK.2.000", 1204, "0a1b..", 1763724000123456789], ...]

Each entry, in JSON: the shard's directory; the sequence of the next record; the log's id, in hex, empty for a journal without one; the
timestamp of the record before it, 0 if unknown.

A reader that is moved over the network has an owner, and version 2: `{"owner": "spark", "places": [...]}`. It reads only the shards in
which it has a position, so it holds back nothing elsewhere; older versions of kvspool treat it as a reader that holds back everything.

**Groups.** A member of a group stores the positions of its shards in a file of its own, a *part* with the same bytes:

    [root]/.hub/readers/[name].parts/[token, 16 hex digits].positions

They go before those in the file above. When a member releases shards, leaves or ends, its positions are merged into the file above under
the group's lock. So at most one part has a shard.

**Durability.** The file is replaced atomically: a temporary one is written, flushed and renamed, and the directory flushed. After a crash
at any instruction, of the process or the machine, it has either all old positions or all new ones.

**Trust.** The content is used if the checksum matches and each entry is possible.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from hub.client_ids import check_client
from kvspool import Record, system
from kvspool.engine.checksums import checksum
from kvspool.errors import Corruption, NotALog, UnknownVersion
from kvspool.groups.fencing import remove_unfinished
from kvspool.journal.offsets import check_name
from kvspool.record import NO_TIME
from kvspool.system import disk, documents
from shard import route
from shard.merged import Log

Key = tuple[str, int]  # a client and the index of a shard
SUFFIX = ".positions"
LARGEST = 1 << 26  # largest file in bytes: some 700,000 shards
_MAGIC = b"kvspool-hub-positions "
_PART = re.compile(r"[0-9a-f]{16}\.positions")
_HEADER = re.compile(rb"kvspool-hub-positions ([0-9]{1,9}) ([0-9a-f]{8})\n")
_VERSIONS = (1, 2)  # without an owner, and with one


class Position(NamedTuple):
    """A position in one shard.

    bits: of its client's set; sequence: of the next record; log: its id, empty for a journal without one; time: timestamp of the record
    before that, 0 if unknown.
    """

    bits: int
    sequence: int
    log: str = ""
    time: int = 0


class StoredPositions(NamedTuple):
    """The content of a file. owner: the only principal that may move the reader over the network; "" for a reader of this host."""

    places: dict[Key, Position]
    owner: str = ""


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    directory: str
    sequence: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    log: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?$")]
    time: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Owned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    owner: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    places: list[_Entry]



def pack(positions: dict[Key, Position], owner: str = "") -> bytes:
    """Return the bytes of a file."""
    entries = [
        _Entry(route.directory_name(client, one.bits, index), one.sequence, one.log, one.time)
        for (client, index), one in sorted(positions.items())
    ]
    body = msgspec.json.encode(_Owned(owner, entries) if owner else entries)
    return b"%s%d %08x\n" % (_MAGIC, 2 if owner else 1, checksum(body)) + body


def parse(data: bytes) -> StoredPositions:
    """Return the content of a file's bytes. Raises ValueError with the reason; UnknownVersion."""
    header = _HEADER.match(data)
    if header is None:
        raise ValueError("it has no valid header")
    version = int(header[1])
    if version not in _VERSIONS:
        raise UnknownVersion(f"it has version {version}, this kvspool knows {_VERSIONS[0]} and {_VERSIONS[1]}")
    body = data[header.end() :]
    if checksum(body) != int(header[2], 16):
        raise ValueError("its checksum doesn't match")
    owned = documents.from_json(body, _Owned) if version == 2 else _Owned("", documents.from_json(body, list[_Entry]))
    positions: dict[Key, Position] = {}
    for entry in owned.places:
        prefix, bits, index = route.parse_name(entry.directory) or (entry.directory, 0, 0)
        if route.directory_name(check_client(prefix), bits, index) != entry.directory or (prefix, index) in positions:
            raise ValueError(f"{entry.directory!r} is no shard, or is repeated")
        positions[prefix, index] = Position(bits, entry.sequence, entry.log, entry.time)
    return StoredPositions(positions, owned.owner)


def load(path: Path) -> StoredPositions | None:
    """Return the positions in a file and in its parts; None if there is none. Raises Corruption, UnknownVersion."""
    own = [load_alone(part) for part in parts(path)]  # first: a position only moves from there to the file
    stored = load_alone(path)
    for part in own:
        if part is not None and stored is not None:
            stored.places.update(part.places)
    return stored


def load_alone(path: Path) -> StoredPositions | None:
    """Return the content of one file; None if there is none. Raises Corruption, UnknownVersion."""
    try:
        return parse(documents.read(path, LARGEST))
    except FileNotFoundError:
        return None
    except UnknownVersion as error:
        raise UnknownVersion(f"{path}: {error}; upgrade, or delete the reader") from None
    except ValueError as error:
        raise Corruption(f"{path} has no valid positions: {error}; restore it, or delete the reader") from None


def store(path: Path, positions: dict[Key, Position], owner: str = "") -> None:
    """Replace the positions in a file; on disk on return.

    Raises NameNotDurable if the new ones are stored and only the flush of the directory failed; the system's OSError if the old ones
    remain.
    """
    disk.replace(path, pack(positions, owner), 0o600, done=f"{path} has the reader's new positions")


def parts(path: Path) -> list[Path]:
    """Return the paths of the parts of a file, which may be none."""
    directory = parts_directory(path)
    return [directory / name for name in sorted(disk.names(directory)) if _PART.fullmatch(name)]


def part_of(path: Path, token: int) -> Path:
    """Return the path of the part of a member of a group."""
    return parts_directory(path) / f"{token:016x}{SUFFIX}"


def parts_directory(path: Path) -> Path:
    """Return the directory of the parts of a file."""
    return path.with_suffix(".parts")


def make_parts(path: Path) -> None:
    """Create the directory of the parts of a file."""
    disk.make_directory(parts_directory(path))


def absorb(path: Path, tokens: Collection[int] = ()) -> None:
    """Merge all parts into their file, but those of the members with these tokens, and remove them.

    For the owner of the reader's name, or under its group's lock, when the fences of other members are closed. Raises Corruption.
    """
    kept = {part_of(path, token) for token in tokens}
    ended = [part for part in parts(path) if part not in kept]
    for part in ended:
        remove_unfinished(part)
    places = {key: place for part in ended if (stored := load_alone(part)) is not None for key, place in stored.places.items()}
    if places:
        merge(path, places)
    for part in ended:
        with suppress(FileNotFoundError):
            system.port.remove(part)


def merge(path: Path, places: Mapping[Key, Position]) -> None:
    """Store positions in a file; those in removed shards go. On disk on return. Only one process may do so at a time."""
    stored = load_alone(path) or StoredPositions({})
    merged = {**stored.places, **places}
    names = set(system.port.names(path.parents[2]))
    present = {key: one for key, one in merged.items() if route.directory_name(key[0], one.bits, key[1]) in names}
    if present != stored.places:
        store(path, present, stored.owner)


def log_id(log: Log) -> str:
    """Return the id of a log in the form of a position; of a journal, that of the present one."""
    return log.read_log_id().hex()


def why_replaced(position: Position, log: Log) -> str:
    """Return why a position can't belong to this log; "" if it can.

    A log is identified by its id. A journal may have none, now or when the position was stored. Then the time of the record before the
    position is compared, if that record still exists.
    """
    id = log_id(log)
    if position.log != id and (log.always_has_id or (position.log and id)):
        return "the log was recreated"
    if position.sequence > log.end():
        return "the log ends before the reader's position: it was recreated, or restored from an older copy"
    if position.log != id or not id:
        return _why_another_time(position, log)
    return ""


def _why_another_time(position: Position, log: Log) -> str:
    if position.time not in (0, NO_TIME):
        for item in log.read(position.sequence - 1, limit=1, on_gap="yield"):
            if isinstance(item, Record) and item.sequence == position.sequence - 1 and item.timestamp != position.time:
                return "the log was recreated: the record before the reader's position is another one"
            break
    return ""


def names(root: Path) -> list[str]:
    """Return the names of the durable readers of a hub root, sorted."""
    found = disk.names(directory_of(root))
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX) and _is_name(name.removesuffix(SUFFIX)))


def _is_name(name: str) -> bool:
    try:
        check_name(name)
    except ValueError:
        return False
    return True


def path_of(root: Path, name: str) -> Path:
    """Return the path of a reader's positions. Raises ValueError for a name that must not become a part of a path."""
    return directory_of(root) / f"{check_name(name)}{SUFFIX}"


def directory_of(root: Path) -> Path:
    """Return the directory of a hub root's readers, which may not exist."""
    return root / ".hub" / "readers"


def make_directory(root: Path) -> Path:
    """Create the directory of a hub root's readers, accessible only to its owner. Return it. Raises NotALog if another file is there."""
    directory = directory_of(root)
    for part in (directory.parent, directory):
        status = None if disk.make_directory(part) else system.port.look_up(part)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise NotALog(f"{part} is not a directory, so the hub root can't have readers; remove it")
    return directory
