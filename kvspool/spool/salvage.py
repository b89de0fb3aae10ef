"""Copy every sound record out of a damaged pair into a new log.

It needs spool.dat, and the log's id from the header of either file; nothing else has to be sound. Dropped records that are not overwritten
yet are copied, too. **Keyed values** are copied unchanged, after the keys themselves, which get the same indexes in the new log. If the key
table has lost a key of a value, the value is stored as raw bytes: a new key of that index must not change its meaning. Durable readers are
not copied, since sequences are new.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvspool import keyed, system
from kvspool.engine.checksums import checksum
from kvspool.engine.moving import Mover, Target
from kvspool.engine.rows import SPOOL, Rows, columns_of
from kvspool.errors import Corruption, LogNotFound, NotALog
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import FrameReader, FrameScanner
from kvspool.record import STRUCTURED, Codec, Record
from kvspool.spool import creation, format
from kvspool.spool.appending import RowBatch
from kvspool.spool.keys import KeyTable
from kvspool.spool.spool import Spool
from kvspool.system import filesystems
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

BATCH = 256  # records copied at once


class SalvageReport(msgspec.Struct, frozen=True):
    """The records found in a damaged pair and copied.

    records, bytes: of the new log, bytes of keys and values. first_sequence, last_sequence: their previous numbers; in the new log they are
    numbered from 0. missing: numbers between those that no sound record has, including restarts of the machine. undecodable: keyed values
    with lost keys, stored as raw bytes. damage: the faults of the files.
    """

    source: str
    target: str
    records: int
    bytes: int
    first_sequence: int
    last_sequence: int
    missing: int
    undecodable: int
    damage: list[str]


class _Found(NamedTuple):
    """The sound parts of the two headers and the key table."""

    log_id: bytes
    capacity: int
    codec: int
    policy: int
    reader_expiry: int
    keys: keyed.Keys


def salvage(
    path: str | os.PathLike[str], target: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
) -> SalvageReport:
    """Create a new log at `target` with every sound record in the files of the log at `path`, which must not be in use.

    The new log has the size of the found records, rounded up to a power of two, and at most that of the old one. Order, timestamp, type,
    key, value and codec stay; sequences are new, from 0. `path` is only read. progress: called as `progress(done, all)` from time to time,
    with records. Raises LogNotFound, NotALog, Corruption (no id is left), LogExists, UnsafeFilesystem, or the system's OSError. All copied
    records are on disk when the call returns.
    """
    source, goal = Path(os.path.abspath(path)), Path(os.path.abspath(target))
    damage: list[str] = []
    file = _open(source / format.DATA_FILE)
    try:
        fd = file.number
        status = system.port.status(fd)
        size = (status.st_size - format.DATA_START) // 8 * 8
        found = _headers(source, fd, size, damage)
        filesystems.refuse_unsafe(goal.parent)
        with _ring(fd, min(size, found.capacity), found.log_id) as ring:
            capacity = _capacity(ring, max(found.capacity, size))
            made = creation.create(
                goal,
                capacity=capacity,
                codec=found.codec,
                mode=status.st_mode & 0o666 | 0o600,
                policy=found.policy,
                reader_expiry=found.reader_expiry,
                touched=creation.touchable(capacity),
            )
            with Spool(made, is_new=True) as log:
                if made.key_table is not None:
                    made.key_table.add(list(found.keys.names.values()), lambda: system.port.flush_data(made.control_fd))
                frames = _SoundFrames(ring, found.keys)
                mover = Mover(_NewSpool(log), SPOOL)
                total = sum(run.frames for run in ring.runs)
                mover.move(frames.batches(), None if progress is None else lambda: progress(mover.records, total))
                log.sync()
    finally:
        file.close()
    if progress is not None:
        progress(mover.records, total)
    missing = frames.last - frames.first + 1 - mover.records
    return SalvageReport(
        str(source), str(goal), mover.records, mover.bytes, frames.first, frames.last, missing, frames.undecodable, damage
    )


def _open(path: Path) -> Descriptor:
    try:
        return Descriptor(path, os.O_RDONLY)
    except FileNotFoundError:
        if not os.path.lexists(path.parent):
            raise LogNotFound(f"{path.parent} does not exist") from None
        raise NotALog(f"{path.parent} has no {path.name}, which contains the records") from None


def _headers(source: Path, fd: int, size: int, damage: list[str]) -> _Found:
    """Return the known properties of the log; faults are added to `damage`. Raises Corruption if no header is sound."""
    data = _header(system.port.read(fd, format.DATA_HEADER.size, 0), format.DATA_HEADER, format.DATA_MAGIC)
    if data is None:
        damage.append(f"{format.DATA_FILE}: its header is damaged")
    block = _control_block(source / format.CONTROL_FILE, damage)
    control = _header(block[: format.HEADER.size], format.HEADER, format.CONTROL_MAGIC)
    if control is None and block:
        damage.append(f"{format.CONTROL_FILE}: its header is damaged")
    if data is None and control is None:
        raise Corruption(f"{source}: neither header contains the log's id; without it records can't be distinguished from garbage")
    log_id = (data or control).log_id
    if control is not None and control.log_id != log_id:
        damage.append(f"{format.CONTROL_FILE} belongs to another log")
        control, block = None, b""
    capacity = (data or control).capacity
    if size < capacity:
        damage.append(f"{format.DATA_FILE} is {capacity - size} bytes too short")
    keys = _keys(block, log_id)
    if control is None or control.codec not in STRUCTURED.values() or control.policy >= len(format.POLICIES):
        return _Found(log_id, capacity, Codec.KEYED if keys.names else Codec.JSON, 0, 0, keys)
    return _Found(log_id, capacity, control.codec, control.policy, control.reader_expiry, keys)


def _control_block(path: Path, damage: list[str]) -> bytes:
    """Return the part of spool.ctl before the index, as far as it exists."""
    try:
        file = Descriptor(path, os.O_RDONLY)
    except OSError as error:
        damage.append(f"{path.name} can't be read: {error.strerror or error}")
        return b""
    with file as fd:
        return system.port.read(fd, format.INDEX_AT, 0)


def _header(raw: bytes, layout: Any, magic: bytes) -> Any:
    """Return a header; None if it is not sound."""
    if raw[: len(magic)] == magic and len(raw) == layout.size and checksum(raw[:-4]) == int.from_bytes(raw[-4:], "little"):
        return layout.unpack(raw)
    return None


def _keys(block: bytes, log_id: bytes) -> keyed.Keys:
    """Return the keys whose entries are sound."""
    region = bytearray(format.INDEX_AT - format.KEYS_AT)
    found = block[format.KEYS_AT :]
    region[: len(found)] = found
    return KeyTable(memoryview(region), log_id).keys


class _NewSpool(Target, Handle):
    """The new log. Its rows are appended unchanged: it has the key table of the old one."""

    format = "spool"
    room = SPOOL

    def __init__(self, log: Spool) -> None:
        super().__init__(log.path)
        self._log = log
        self.most = log.capacity // 8

    def append(self, rows: Rows, at: int | None = None) -> range:
        return self._log.append_prepared(RowBatch(rows))

    def close(self) -> None:
        """Do nothing: the log is the caller's."""


class _SoundFrames:
    """The sound frames of a ring. first, last: their sequences so far; undecodable: keyed values with lost keys, now raw bytes."""

    def __init__(self, ring: _Ring, keys: keyed.Keys) -> None:
        self._ring = ring
        self._keys = keys
        self.first = self.undecodable = 0
        self.last = -1

    def batches(self) -> Iterator[Rows]:
        """Yield the records in the order of their sequences, without second copies."""
        batch: list[Record] = []
        for sequence, timestamp, type, key, value, codec in self._ring.frames():
            if sequence <= self.last:
                continue  # a second copy
            if batch and (sequence != self.last + 1 or len(batch) == BATCH):
                yield columns_of(batch)
                batch = []
            if codec == Codec.KEYED and not self._is_decodable(value):
                codec = Codec.RAW
                self.undecodable += 1
            self.first = sequence if self.last < 0 else self.first
            self.last = sequence
            batch.append(Record(sequence, timestamp, type, key, value, codec))
        if batch:
            yield columns_of(batch)

    def _is_decodable(self, value: bytes) -> bool:
        try:
            keyed.unpack(value, self._keys)
        except (ValueError, RecursionError):
            return False
        return True


class _Run(NamedTuple):
    """Consecutive frames: their first and last sequence, the position of the first one, the end, and their number."""

    first: int
    last: int
    start: int
    end: int
    frames: int


class _Ring(NamedTuple):
    """The mapped ring of the damaged log, and its sound frames, in the order of the sequences."""

    memory: memoryview
    seed: int
    runs: list[_Run]

    def frames(self) -> Iterator[tuple[int, int, int, bytes | None, bytes, int]]:
        """Yield sequence, timestamp, type, key, value and codec of each sound frame; runs of only second copies are left out."""
        last = -1
        reader = FrameReader(self.memory, memoryview(bytes(format.control_bytes(len(self.memory)))), self.seed, 0, 0)
        try:
            for run in self.runs:
                if run.last > last:
                    reader.position, reader.sequence = run.start, run.first
                    while items := reader.fetch(run.end, BATCH, lambda *fields: fields):
                        yield from items
                    last = run.last
        finally:
            reader.close()


@contextmanager
def _ring(fd: int, size: int, log_id: bytes) -> Iterator[_Ring]:
    """Map the ring in `fd` during the `with` block."""
    seed = format.frame_seed(log_id)
    if size <= 0:
        yield _Ring(memoryview(b""), seed, [])
        return
    mapping = system.port.map(fd, format.DATA_START + size, writable=False)
    memory = memoryview(mapping)[format.DATA_START :]
    none = memoryview(bytes(format.control_bytes(size)))
    try:
        yield _Ring(memory, seed, sorted(_runs(FrameScanner(memory, none, seed), size)))
    finally:
        memory.release()
        mapping.close()


def _capacity(ring: _Ring, most: int) -> int:
    """Return the capacity of a ring for all frames of another one of up to `most` bytes."""
    most = -(-max(most, format.LEAST_CAPACITY) // format.PAGE) * format.PAGE
    wanted = _power_of_two(max(sum(run.end - run.start for run in ring.runs), format.LEAST_CAPACITY))
    # A frame takes at most a quarter of its ring, so only runs longer than that can have one that needs a larger ring.
    long = ring._replace(runs=[run for run in ring.runs if 4 * (run.end - run.start) > wanted])
    if wanted < most and long.runs:
        # The size of a frame is that of the header, the key and the value, rounded up to 8 bytes.
        largest = max((len(key or b"") + len(value) + frames.HEADER + 8 for _, _, _, key, value, _ in long.frames()), default=0)
        wanted = max(wanted, _power_of_two(4 * largest))
    return min(wanted, most)


def _power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _runs(scanner: FrameScanner, size: int) -> Iterator[_Run]:
    """Yield the runs of sound frames in the ring."""
    position = 0
    while scanner.next_run(position, size, 0, frames.NOTHING):
        if scanner.frames:
            yield _Run(scanner.first, scanner.last, scanner.start, scanner.position, scanner.frames)
        position = scanner.position if scanner.frames else scanner.start + frames.HEADER
    scanner.close()
