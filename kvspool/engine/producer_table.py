"""The file `producers` of a log: the last batch of each producer, and the location of its records.

A header, then states of 512 bytes, one for each producer. A state has two copies of 256 bytes. The sound one with the higher
generation counts, and the other one is overwritten. So no crash leaves a half-written state.

**Writing** needs the log's append lock, reading no lock.

**A batch under way.** First its state describes the records to append, and the log's word `pending` names the state. The word is reset
when the state states that all are stored. While it is set, no writer appends before it has *resolved* the state. Thus no other writer
can have appended in between, so all records appended after the first sequence belong to the batch.

**Durability.** As the page cache: a state survives a crash of any process. With `is_durable` it is flushed before the first record is
published, so that it survives a crash of the machine if one of them does.

**Recovery.** After a crash of the machine, the process that recovers the log first removes the lost records from the states: see
`restarted`. A state may name a whole batch while a later one is stored in part. This is trusted only if the later one is durable and,
where the state's other copy still locates the whole one, all of it is stored.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, NamedTuple

from kvspool import system
from kvspool.engine.checksums import checksum, sealed
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, TooManyPieces, TooManyProducers, UnknownVersion
from kvspool.system import disk, logger
from kvspool.system.descriptor import Descriptor, OpenFile

NAME = "producers"
MAGIC = b"KVSPROD1"
VERSION = 1
FREE, AT_REST, UNDER_WAY = range(3)
PIECES = 7  # of one batch that was interrupted by kills
STEP = 128  # states by which the file grows
MOST = 1 << 16
HOUR = 3600 * 10**9  # ns
EXPIRY = 7 * 24 * HOUR  # a state without use for this time may be given to another producer, unless it says otherwise
_RANGE = struct.Struct("<2Q")


class TableHeader(NamedTuple):
    """The first 512 bytes, filled up with zeros."""

    magic: Annotated[bytes, "8s", "`KVSPROD1`"]
    version: Annotated[int, "I", "1"]
    state_bytes: Annotated[int, "I", "512"]
    log_id: Annotated[bytes, "16s", "of the log; zeros in a journal that has none"]
    reserved: Annotated[bytes, "28s", "zeros"]
    crc: Annotated[int, "I", "CRC32C of the bytes before"]


class ProducerState(NamedTuple):
    """The state of one producer; 256 bytes, two copies for each."""

    generation: Annotated[int, "Q", "1, 2, 3 ...; of two sound places the one with the higher number counts"]
    id: Annotated[bytes, "16s", "BLAKE2b of the producer's name, 16 bytes of it"]
    boot_id: Annotated[bytes, "16s", "the start of the machine in which it was written"]
    batch: Annotated[int, "Q", "number of the last batch that was begun"]
    done: Annotated[int, "Q", "1 + number of the last batch that is there in full; 0: none is, or a crash took records of it"]
    rows: Annotated[int, "Q", "records of the batch"]
    updated: Annotated[int, "q", "when this was written, ns since the Unix epoch"]
    phase: Annotated[int, "B", "0 free, 1 at rest, 2 a batch is under way: of the last range only what was appended since is there"]
    is_durable: Annotated[int, "B", "1: it is on disk before the first record of the batch is published"]
    pieces: Annotated[int, "B", "how many of the ranges count"]
    name_bytes: Annotated[int, "B", "length of the name"]
    is_over: Annotated[int, "B", "1: its producer appends nothing more, so that another one may have it"]
    reserved: Annotated[int, "B", "0"]
    keep: Annotated[int, "H", "hours for which it is kept after its last batch, if that is whole; 0: seven days"]
    ranges: Annotated[bytes, "112s", "7 ranges of two words: the first sequence, and how many records of the batch lie there in a row"]
    word: Annotated[int, "Q", "of the batch, as its program gave it; another one means another batch; 0: none"]
    unused: Annotated[bytes, "8s", "zeros"]
    name: Annotated[bytes, "44s", "the beginning of the producer's name, UTF-8, for people"]
    crc: Annotated[int, "I", "CRC32C of the log id and the bytes before"]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return the ranges of the batch's records, stored or, under way, planned: first sequences and counts."""
        return [_RANGE.unpack_from(self.ranges, at * _RANGE.size) for at in range(self.pieces)]

    @property
    def stored(self) -> int:
        """Return how many records of the batch are stored, for a state at rest."""
        return sum(count for _, count in self.runs)

    @property
    def is_done(self) -> bool:
        """Return whether the last batch is stored in full."""
        return self.phase == AT_REST and self.done == self.batch + 1

    def with_runs(self, runs: list[tuple[int, int]]) -> ProducerState:
        """Return the state with other ranges. Raises TooManyPieces."""
        if len(runs) > PIECES:
            raise TooManyPieces(
                f"batch {self.batch} of producer {self.shown!r} is in {len(runs)} pieces, {PIECES} are possible: it was interrupted too "
                "often; forget the producer; its stored records stay"
            )
        return self._replace(pieces=len(runs), ranges=b"".join(_RANGE.pack(*run) for run in runs))

    def resolved(self, kept: Callable[[int, int], list[tuple[int, int]]]) -> ProducerState:
        """Return the state at rest, with only its stored records; `kept(first, count)` returns which of some records are stored."""
        runs = [part for run in self.runs for part in kept(*run) if part[1]]
        if len(runs) > PIECES:
            logger.warn("producer %s, batch %d: only %d of %d pieces are stored", self.shown, self.batch, PIECES, len(runs))
        state = self.with_runs(runs[:PIECES])._replace(phase=AT_REST)
        if state.stored == self.rows:
            return state._replace(done=self.batch + 1)
        return state._replace(done=0) if self.done == self.batch + 1 else state

    @property
    def shown(self) -> str:
        """Return the beginning of the name."""
        return self.name[: self.name_bytes].decode("utf-8", "replace")


HEADER = Layout(TableHeader)
STATE = Layout(ProducerState)
BLOCK = 512  # the header, and each state
PLACE = 256

_GLANCE = struct.Struct("<Q32x2Q8xqB3xBxH176x")  # the fields for `claim`: generation, batch, done, updated, state, is_over, keep

assert STATE.size == _GLANCE.size == PLACE
assert HEADER.size == 64


class ProducerTable(OpenFile):
    """The open file of one log, for reading, or for the owner of the append lock."""

    def __init__(self, path: Path, log_id: bytes, file: Descriptor) -> None:
        """Take over the descriptor of a checked file."""
        self.path = path
        self._log_id = log_id
        self._file = file
        self._size = system.port.status(file.number).st_size

    @classmethod
    def open(cls, directory: Path, log_id: bytes, *, to_read: bool = False) -> ProducerTable | None:
        """Open the producer table in a log's directory; None if there is none. to_read: open it read-only.

        Raises Corruption for a file that isn't this log's, UnknownVersion, or the system's OSError.
        """
        try:
            return cls._checked(directory / NAME, log_id, os.O_RDONLY if to_read else os.O_RDWR)
        except FileNotFoundError:
            return None

    @classmethod
    def make(cls, directory: Path, log_id: bytes, mode: int) -> ProducerTable:
        """Under the append lock: open the producer table, or create one with the permission bits `mode`, on disk when this returns."""
        found = cls.open(directory, log_id)
        if found is not None:
            return found
        data = sealed(HEADER.pack(TableHeader(MAGIC, VERSION, BLOCK, log_id, b"", 0)))
        disk.replace(directory / NAME, data.ljust(BLOCK * (1 + STEP), b"\0"), mode, rights=mode)
        return cls._checked(directory / NAME, log_id, os.O_RDWR)

    @classmethod
    def _checked(cls, path: Path, log_id: bytes, flags: int) -> ProducerTable:
        file = Descriptor(path, flags)
        try:
            fd = file.number
            raw = system.port.read(fd, HEADER.size, 0)
            if len(raw) < HEADER.size or raw[: len(MAGIC)] != MAGIC:
                raise Corruption(f"{path} is not a list of producers: remove it; the state of their batches is lost")
            header = HEADER.unpack(raw)
            if header.version != VERSION:
                raise UnknownVersion(f"{path} has version {header.version}; this kvspool supports version {VERSION}: upgrade to open it")
            if header.crc != checksum(raw[:-4]) or header.state_bytes != BLOCK or header.log_id != log_id.ljust(16, b"\0"):
                raise Corruption(f"{path} is damaged, or of another log: remove it; the state of producers' batches is lost")
            return cls(path, log_id, file)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Release the descriptor."""
        self._file.close()

    def __enter__(self) -> ProducerTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return max(0, min(MOST, self._size // BLOCK - 1))

    def read(self, number: int) -> ProducerState | None:
        """Return a state; None for a free or unsound one."""
        state = self._newest(system.port.read(self.fd, BLOCK, BLOCK * (1 + number))) if 0 <= number < len(self) else None
        return None if state is None or state.phase == FREE else state

    def earlier(self, number: int) -> ProducerState | None:
        """Return the previous copy of a state; None if it is not sound."""
        places = self._places(system.port.read(self.fd, BLOCK, BLOCK * (1 + number)))
        sound = [place for place in places if place is not None]
        return min(sound, key=lambda place: place.generation) if len(sound) == 2 else None

    def states(self) -> Iterator[tuple[int, ProducerState]]:
        """Yield the numbers and states of all producers."""
        data = system.port.read(self.fd, BLOCK * len(self), BLOCK)
        for number in range(len(data) // BLOCK):
            state = self._newest(data[number * BLOCK : (number + 1) * BLOCK])
            if state is not None and state.phase != FREE:
                yield number, state

    def damaged(self) -> int:
        """Return how many states are not empty and not sound."""
        data = system.port.read(self.fd, BLOCK * len(self), BLOCK)
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        return sum(any(block) and self._newest(block) is None for block in blocks)

    def find(self, id: bytes, hint: int = -1) -> tuple[int, ProducerState] | None:
        """Return the number and the state of a producer. hint: its last known number."""
        state = self.read(hint)
        if state is not None and state.id == id:
            return hint, state
        data = system.port.read(self.fd, BLOCK * len(self), BLOCK)
        at = data.find(id)
        while at >= 0:
            number = at // BLOCK
            state = self._newest(data[number * BLOCK : (number + 1) * BLOCK])
            if state is not None and state.id == id and state.phase != FREE:
                return number, state
            at = data.find(id, at + 1)
        return None

    def named(self, prefix: bytes) -> Iterator[tuple[int, ProducerState]]:
        """Yield the numbers and states of the producers with this prefix of the name; at most 44 bytes of UTF-8."""
        data = system.port.read(self.fd, BLOCK * len(self), BLOCK)
        at = data.find(prefix)
        while at >= 0:
            number = at // BLOCK
            state = self._newest(data[number * BLOCK : (number + 1) * BLOCK])
            if state is not None and state.phase != FREE and state.name[: state.name_bytes].startswith(prefix):
                yield number, state
            at = data.find(prefix, (number + 1) * BLOCK)

    def claim(self) -> int:
        """Return the number of a state for a new producer: a free one, or one that has been over for an hour. If there is none, the list
        grows. If it can't grow: one that is over, or that is done and wasn't used for its keeping time. Of several, the least recently used
        one. Raises TooManyProducers.
        """
        free = self._free_at_end()
        if free >= 0:
            return free
        data = system.port.read(self.fd, BLOCK * len(self), BLOCK)
        for number, generation in self._claimable(data):
            state = self._newest(data[number * BLOCK : (number + 1) * BLOCK])
            if state is None or state.generation == generation:
                return number
        return self._grown() if len(self) < MOST else self._damaged_one()

    def _free_at_end(self) -> int:
        """Return the number of a state at the end that was never used, -1 if there is none: of tens of thousands, few are read."""
        first = max(0, len(self) - STEP)
        data = system.port.read(self.fd, BLOCK * (len(self) - first), BLOCK * (1 + first))
        used = len(data.rstrip(b"\0"))
        number = first + -(-used // BLOCK)
        return number if number < len(self) else -1

    def _claimable(self, data: bytes) -> list[tuple[int, int]]:
        """Return the numbers of states that seem to be available, the best ones first, with the generations on which that is based.

        The caller holds the append lock, so thousands of states are only scanned: no checksum is verified.
        """
        now, is_full = system.port.now(), len(self) == MOST
        places = _GLANCE.iter_unpack(data[: len(data) // BLOCK * BLOCK])
        found = []
        # The two copies of each state in turn; the greater tuple has the higher generation.
        for number, (generation, batch, done, updated, phase, is_over, keep) in enumerate(map(max, places, places)):
            is_gone = is_over or (done == batch + 1 and updated < now - (keep * HOUR or EXPIRY))
            if phase == FREE:
                found.append((-1, number, generation))
            elif phase == AT_REST and is_gone and (is_full or (is_over and updated < now - HOUR)):
                found.append((updated, number, generation))
        return [one[1:] for one in sorted(found)]

    def _grown(self) -> int:
        """Make room for more states; return the number of the first one."""
        number = len(self)
        size = BLOCK * (1 + min(MOST, number + STEP))
        system.port.allocate(self.fd, size)
        self._size = size
        return number

    def _damaged_one(self) -> int:
        """Return the number of an unsound state. Raises TooManyProducers."""
        for number in range(len(self)):
            if self.read(number) is None:
                return number
        raise TooManyProducers(
            f"{self.path.parent} has {MOST} producers; each was used within {EXPIRY // HOUR // 24} days, or is one of a task of a "
            "batch job of Spark, or has an incomplete batch; forget unused ones: `kvspool producers --forget`"
        )

    def store(self, number: int, state: ProducerState, *, is_used: bool = True) -> None:
        """Replace a state, under the append lock. is_used: by its producer; otherwise it keeps its time."""
        at = BLOCK * (1 + number)
        places = self._places(system.port.read(self.fd, BLOCK, at))
        newest = max((place.generation for place in places if place is not None), default=0)
        which = 1 if places[0] is not None and places[0].generation == newest else 0
        updated = system.port.now() if is_used else state.updated
        raw = STATE.pack(state._replace(generation=newest + 1, boot_id=system.port.boot_id(), updated=updated))
        system.port.write(self.fd, sealed(raw, self._log_id), at + which * PLACE)

    def copy_to(self, directory: Path) -> None:
        """Copy the list to another directory of the log, on disk when this returns."""
        data = system.port.read(self.fd, BLOCK * (1 + len(self)), 0)
        status = system.port.status(self.fd)
        disk.replace(directory / NAME, data, 0o600, rights=status.st_mode & 0o777)

    def flush(self) -> None:
        """Flush the file to disk."""
        system.port.flush_data(self.fd)

    def _newest(self, block: bytes) -> ProducerState | None:
        sound = [place for place in self._places(block) if place is not None]
        return max(sound, key=lambda place: place.generation, default=None)

    def _places(self, block: bytes) -> list[ProducerState | None]:
        return [self._parsed(block[at : at + PLACE]) for at in (0, PLACE)]

    def _parsed(self, raw: bytes) -> ProducerState | None:
        """Return the state in `raw`, None if it is not sound."""
        if len(raw) < PLACE or not any(raw[:8]):
            return None
        state = STATE.unpack(raw)
        if state.crc != checksum(self._log_id, raw[:-4]) or state.generation >= (1 << 64) - 1:
            return None
        is_possible = state.phase <= UNDER_WAY and state.pieces <= PIECES and state.name_bytes <= len(state.name)
        return state if is_possible and state.batch < 1 << 63 else None


def new_state(id: bytes, name: str, keep: int = 0) -> ProducerState:
    """Return the state of a producer that has appended nothing. keep: see `ProducerState`."""
    shown = name.encode()[:44]
    return ProducerState(0, id, b"", 0, 0, 0, 0, AT_REST, 0, 0, len(shown), 0, 0, keep, b"", 0, b"", shown, 0)


def resolve(directory: Path, log_id: bytes, number: int, next_sequence: int) -> None:
    """Under the append lock, if the word `pending` names a state: note how much of its batch was appended. Then reset the word.

    Raises the system's OSError. A missing or damaged table has no information about the batch; that is only logged.
    """
    try:
        table = ProducerTable.open(directory, log_id)
    except (Corruption, UnknownVersion) as error:
        logger.warn("%s; a batch that was being appended is not accounted for", error)
        return
    if table is None:
        logger.warn("%s no longer has a list of producers; a batch that was being appended is not accounted for", directory)
        return
    with table:
        state = table.read(number)
        if state is None or state.phase != UNDER_WAY:
            return
        table.store(number, state.resolved(before(next_sequence)), is_used=False)
        table.flush()  # before others append: after a power failure their records must not count as the rest of the batch


def before(end: int) -> Callable[[int, int], list[tuple[int, int]]]:
    """Return a function that tells which of some records are stored in a log whose next sequence is `end`; see `ProducerState.resolved`."""
    return lambda first, count: [(first, max(0, min(end - first, count)))]


def restarted(directory: Path, log_id: bytes, kept: Callable[[int, int], list[tuple[int, int]]], *, is_forced: bool = False) -> None:
    """Remove from all states the records that the log has lost in a crash of the machine; on disk when this returns.

    Called during recovery of the log, under its locks and before any append, so that lost records never count as stored. kept: returns
    which of `count` records from `first` on are stored, as ranges. is_forced: also for states written since.
    """
    try:
        table = ProducerTable.open(directory, log_id)
    except (Corruption, UnknownVersion) as error:
        logger.warn("%s", error)
        return
    if table is None:
        return
    with table:
        boot_id = system.port.boot_id()
        for number, state in list(table.states()):
            if state.boot_id != boot_id or is_forced:
                table.store(number, _after_loss(state, table.earlier(number), kept), is_used=False)
        table.flush()


def problems(directory: Path, log_id: bytes) -> list[str]:
    """Return the faults of the list of producers in a log's directory, in words; nothing if there is none."""
    try:
        table = ProducerTable.open(directory, log_id, to_read=True)
    except (Corruption, UnknownVersion, OSError) as error:
        return [f"the list of producers can't be read: {error}"]
    if table is None:
        return []
    with table:
        damaged = table.damaged()
    words = f"{damaged} of the producers' states are damaged: if their last batches are repeated, they are appended again"
    return [words] if damaged else []


def _after_loss(state: ProducerState, earlier: ProducerState | None, kept: Callable[[int, int], list[tuple[int, int]]]) -> ProducerState:
    resolved = state.resolved(kept)
    if not resolved.done or resolved.is_done:
        return resolved
    # It states that the previous batch is stored in full. If records of this one may be lost, those of that one may be, too.
    is_kept = bool(state.is_durable)
    if is_kept and earlier is not None and earlier.id == state.id and earlier.phase == AT_REST and earlier.done == state.done:
        is_kept = earlier.resolved(kept).done == state.done  # a batch that was not durable, before one that is
    return resolved if is_kept else resolved._replace(done=0)
