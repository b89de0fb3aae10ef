"""The bytes of a group's two files; `docs/formats/group.md` has the tables.

The *group file* has a header, which never changes, and two copies of the state. A change overwrites the older copy. So a process that is
killed during a change leaves the newer one. The *members file* has a byte lock and a counter for each member.

No byte is trusted before it was checked. Positions are elsewhere: without these files no record is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from kvspool.engine.checksums import checksum, name_after, with_name
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, UnknownVersion

MAGIC = b"KVGROUP\0"
VERSION = 1
MOST_MEMBERS = 256
MOST_SHARDS = 1 << 16
LONGEST_NAME = 256  # bytes of UTF-8
PAGE = 4096
STATE_AT = PAGE  # of the first copy

# Bytes of the members file.
COUNTERS_AT = PAGE  # eight bytes for each member
LOCK = 1 << 20  # the byte that is locked while the state is changed
LIFE = LOCK + 1  # the byte of the first member, locked while it is one

ABSENT = 0  # the owner of a shard without one


class Header(NamedTuple):
    """The first bytes of a group file; the group's name follows."""

    magic: Annotated[bytes, "8s", 'the bytes "KVGROUP" and a zero']
    version: Annotated[int, "I", "1"]
    most_shards: Annotated[int, "I", "largest number of shards, 1..65536; it gives the size of a copy"]
    name_length: Annotated[int, "I", "bytes of the name, 1..256"]
    checksum: Annotated[int, "I", "CRC32C of the bytes before it, and of the name"]


class StateHead(NamedTuple):
    """The first bytes of a copy of the state; the members follow, then the shards."""

    number: Annotated[int, "Q", "of the state; that of the older copy is smaller by one"]
    members: Annotated[int, "I", "number of members, 0..256"]
    shards: Annotated[int, "I", "number of shards"]
    checksum: Annotated[int, "I", "CRC32C of this head with 0 here, and of all members and shards"]
    reserved: Annotated[int, "I", "0"]


class MemberWords(NamedTuple):
    """A member of the state, as stored."""

    slot: Annotated[int, "I", "1..256: its byte of the members file is LIFE + slot - 1"]
    reserved: Annotated[int, "I", "0"]
    token: Annotated[int, "Q", "random number that identifies the member"]
    joined: Annotated[int, "Q", "when it joined, ns since the Unix epoch"]
    silence: Annotated[int, "Q", "its `max_silence` in ms; 0: none"]
    pid: Annotated[int, "Q", "its process"]
    start: Annotated[int, "Q", "when the process started, in clock ticks since boot"]
    boot: Annotated[int, "Q", "the first 8 bytes of the boot's id"]
    namespace: Annotated[int, "Q", "inode of the pid namespace"]


class ShardWords(NamedTuple):
    """A shard of the state, as stored."""

    digest: Annotated[bytes, "16s", "BLAKE2b with 16 bytes of the shard's name"]
    owner: Annotated[int, "I", "slot of the member that owns it; 0: none"]
    target: Annotated[int, "I", "slot of the member that is to own it; 0: none"]
    former: Annotated[int, "Q", "process of a former owner, which may still hold the lock of its reader; 0: none"]
    epoch: Annotated[int, "Q", "how often it got an owner, or lost a silent one"]


HEADER, HEAD, MEMBER, SHARD = Layout(Header), Layout(StateHead), Layout(MemberWords), Layout(ShardWords)
COUNTER = struct.Struct("<Q")


class Member(NamedTuple):
    """A member of a group. silence: ms; holder: see `kvspool.system.holders`."""

    slot: int
    token: int
    joined: int
    silence: int
    holder: tuple[int, int, int, int]


class GroupShard(NamedTuple):
    """A shard of a group; see `ShardWords`."""

    digest: bytes
    owner: int = ABSENT
    target: int = ABSENT
    former: int = 0
    epoch: int = 0


class GroupState(NamedTuple):
    """The state of a group: its members in the order in which they joined, and its shards in order."""

    number: int = 0
    members: tuple[Member, ...] = ()
    shards: tuple[GroupShard, ...] = ()


def digest(name: str) -> bytes:
    """Return the digest of a shard's name."""
    from hashlib import blake2b  # not loaded with each log

    return blake2b(name.encode(), digest_size=16).digest()


def room(most_shards: int) -> int:
    """Return the bytes reserved for one copy of the state."""
    size = HEAD.size + MOST_MEMBERS * MEMBER.size + most_shards * SHARD.size
    return -(-size // PAGE) * PAGE


def pack_header(name: str, most_shards: int) -> bytes:
    """Return the first bytes of a group file. Raises ValueError for an invalid name."""
    return with_name(HEADER.pack(Header(MAGIC, VERSION, most_shards, len(name.encode()), 0)), name, "a group", LONGEST_NAME)


def parse_header(data: bytes) -> tuple[str, int]:
    """Return the name of a group, and its largest number of shards. Raises ValueError with the reason, UnknownVersion."""
    if len(data) < HEADER.size:
        raise ValueError(f"it has {len(data)} bytes, fewer than a header")
    header = HEADER.unpack(data)
    if header.magic != MAGIC:
        raise ValueError("it does not begin as a group file")
    if header.version != VERSION:
        raise UnknownVersion(f"it has version {header.version}, this kvspool knows {VERSION}")
    if not (1 <= header.name_length <= LONGEST_NAME and 1 <= header.most_shards <= MOST_SHARDS):
        raise ValueError("its header has impossible sizes")
    return name_after(data, HEADER.size, header.name_length), header.most_shards


def pack_state(state: GroupState) -> bytes:
    """Return the bytes of one copy of a state."""
    members = b"".join(
        MEMBER.pack(MemberWords(one.slot, 0, one.token, one.joined, one.silence, *one.holder)) for one in state.members
    )
    body = members + b"".join(SHARD.pack(ShardWords(*one)) for one in state.shards)
    head = StateHead(state.number, len(state.members), len(state.shards), 0, 0)
    return HEAD.pack(head._replace(checksum=checksum(HEAD.pack(head) + body))) + body


def parse_state(data: bytes, most_shards: int) -> GroupState:
    """Return the state in one copy. Raises ValueError with the reason."""
    if len(data) < HEAD.size:
        raise ValueError("it is too short")
    head = HEAD.unpack(data)
    if head.members > MOST_MEMBERS or head.shards > most_shards:
        raise ValueError(f"it claims {head.members} members and {head.shards} shards")
    shards_at = HEAD.size + head.members * MEMBER.size
    end = shards_at + head.shards * SHARD.size
    if len(data) < end:
        raise ValueError("it is too short for its members and shards")
    if checksum(HEAD.pack(head._replace(checksum=0)) + data[HEAD.size : end]) != head.checksum:
        raise ValueError("its checksum doesn't match")
    words = [MEMBER.unpack(data, at) for at in range(HEAD.size, shards_at, MEMBER.size)]
    members = tuple(Member(one.slot, one.token, one.joined, one.silence, one[5:]) for one in words)
    shards = tuple(GroupShard(*SHARD.unpack(data, at)) for at in range(shards_at, end, SHARD.size))
    slots = {one.slot for one in members}
    if len(slots) < len(members) or not slots <= set(range(1, MOST_MEMBERS + 1)):
        raise ValueError("its members have impossible slots")
    if any(one.owner not in slots | {ABSENT} or one.target not in slots | {ABSENT} for one in shards):
        raise ValueError("a shard belongs to a member that does not exist")
    if len({one.digest for one in shards}) < len(shards):
        raise ValueError("a shard is repeated")
    return GroupState(head.number, members, shards)


def newest(copies: Sequence[bytes], most_shards: int) -> GroupState:
    """Return the newest sound state of the copies. Raises ValueError if none is sound."""
    found: list[GroupState] = []
    reasons = []
    for copy in copies:
        try:
            found.append(parse_state(copy, most_shards))
        except ValueError as error:
            reasons.append(str(error))
    if not found:
        raise ValueError("no copy of its state is sound: " + "; ".join(reasons))
    return max(found)


def damaged(path: object, reason: object) -> Corruption:
    """Return the error of a damaged group file."""
    return Corruption(
        f"{path} is no sound group file: {reason}; stop the members of the group and remove it: positions are stored elsewhere"
    )
