"""A sharded log: 2^bits logs under one root, and a hash that selects one of them by key.

**Durability.** As of each log: records that `append` has returned survive the crash of any process; after `sync`, a power failure.

**Order.** Records of the same key stay in order, because they are in one shard. The order of all shards is that of `merge`.

**Limits.** 1 to 1024 shards. A batch is appended to several shards one after the other: readers may see a part of it first.
"""

from __future__ import annotations

import operator
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import kvspool
from kvspool import Record, Spool, SpoolStats, system
from kvspool.engine.iteration import Iterations
from kvspool.errors import DO_NOT_REPEAT, KvspoolError, LogExists, LogNotFound, NotDurable, appended_by
from kvspool.journal import Journal, JournalStats
from kvspool.opening import logs
from kvspool.options import TIMEOUT, Isolation, OnGap
from kvspool.record import Codec, listed
from kvspool.system import disk
from kvspool.system.handles import Handle, close_all
from shard import descriptors, route
from shard.errors import AppendedToSomeShards, ConflictingShardSets, TooFewDescriptors
from shard.kernel.hash import Spread, group, hash_column
from shard.kernel.merge import placed
from shard.merge import FollowingMerge, Merge
from shard.place import Place
from shard.producers import ShardProducer

if TYPE_CHECKING:
    import pyarrow

Start = str | datetime | Mapping[int, int]
M = TypeVar("M", bound=Merge)


CAPACITY = 64 << 20  # bytes, of all rings of a set by default: as much as one log, for any number of shards
LEAST_CAPACITY = 1 << 20  # of one ring by default
Log = Spool | Journal


class ShardRecord(Record, frozen=True, gc=False):
    """A record and its shard."""

    shard: int = 0


class ShardSet(Spread, Handle):
    """A handle of a sharded log. Get it from `ShardSet.create` or `ShardSet.open`. It can be shared by threads, and survives a fork."""

    HELPERS = frozenset(("append_at_once", "append_slowly", "find"))

    def __init__(self, root: Path, prefix: str, shards: list[Log]) -> None:
        """Use the open logs of a complete set, in order."""
        # Writers without keys start at different shards; otherwise all would queue for the first one.
        turn = int.from_bytes(system.port.random(2), "little") & (len(shards) - 1)
        super().__init__(shards, all(isinstance(log, Spool) for log in shards), turn)
        self.root = root
        self.prefix = prefix
        self.bits = len(shards).bit_length() - 1
        self._iterations = Iterations()

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str],
        *,
        prefix: str = "",
        bits: int,
        exist_ok: bool = False,
        timeout: float = TIMEOUT,
        **options: Any,
    ) -> ShardSet:
        """Create a set of 2^bits shards under `root` and open it; `root` is created too, but not its parent.

        prefix, bits: see `route`. options: those of `kvspool.create`, for each shard, for example `capacity` or `format="sej"`. By default
        the rings of a set have 64 MiB in all, like one log, in equal parts, but at least 1 MiB each: `default_capacity(bits)`. Their space
        is reserved on disk at once. `prefill` is False by default, because the rings of a set may be many and large. An incomplete set of
        an earlier call is completed. With `exist_ok` an existing one is opened; its shards must have the given settings, and any capacity
        if none is given.

        Raises LogExists if the set exists without `exist_ok`, or with `exist_ok` if a shard has other settings, which its text names;
        TypeError for unknown options; ValueError for a bad prefix or bits; ConflictingShardSets if the prefix has another number of shards
        already; TooFewDescriptors to open all of them, after they were created; and the errors of `kvspool.create`.
        """
        options = {name: value for name, value in options.items() if value is not None}
        logs.check_options(options.get("format", "spool"), options, "ShardSet.create", ("prefix", "bits"))
        base = Path(os.path.abspath(root))
        names = [route.directory_name(prefix, bits, index) for index in range(1 << route.check_bits(bits))]
        if not base.is_dir():
            disk.make_directory(base)
        found = route.scan(base).get(prefix)
        if found is not None:
            if found.bits != bits:
                raise ConflictingShardSets(f"{base}: prefix {prefix!r} has {found.bits} bits already, not {bits}")
            if not found.missing and not exist_ok:
                raise LogExists(f"{base} has a shard set with prefix {prefix!r} already; shard.open opens it")
        for name in names:
            with descriptors.for_logs(base, len(names)):
                _make_shard(base / name, bits, options, exist_ok)
        return cls.open(base, prefix=prefix, timeout=timeout)

    @classmethod
    def open(cls, root: str | os.PathLike[str], *, prefix: str | None = None, timeout: float = TIMEOUT) -> ShardSet:
        """Open the set with this prefix; without one, the only set under `root`.

        Raises LogNotFound, IncompleteShardSet, ConflictingShardSets, TooFewDescriptors, ValueError for a bad prefix, and the errors of
        `kvspool.open`.
        """
        base = Path(os.path.abspath(root))
        if prefix is not None:
            route.check_prefix(prefix)
        if not base.is_dir():
            raise LogNotFound(f"{base} is not a directory")
        sets = route.scan(base)
        if prefix is None:
            if len(sets) > 1:
                raise ValueError(f"{base} holds several shard sets; give a prefix: {', '.join(map(repr, sets))}")
            prefix = next(iter(sets), "")
        if prefix not in sets:
            raise LogNotFound(f"{base} has no shard set with prefix {prefix!r}; it has {', '.join(map(repr, sets)) or 'none'}")
        found = sets[prefix]
        found.check_complete(base)
        shards: list[Log] = []
        try:
            with descriptors.for_logs(base, 1 << found.bits):
                shards.extend(open_shard(path, timeout) for _, path in found.paths(base))
        except BaseException:
            close_all(shards)
            raise
        return cls(base, prefix, shards)

    # Writing.

    def append_slowly(self, shard: int, value: Any, key: bytes | str | None, type: int, timestamp: int | None, durable: bool) -> Place:
        """Append a record that takes several steps, or raise for invalid arguments; see `append`."""
        try:
            return Place(shard, self.shards[shard].append(value, key=key, type=type, timestamp=timestamp, durable=durable))
        except OSError as error:
            descriptors.explain(error, self.root, len(self.shards))
            raise

    def append_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        durable: bool = False,
    ) -> dict[int, range]:
        """Append a record for each value, each shard's part under one lock. Return the sequences for each shard.

        durable: return when all are on disk, after a flush for each shard with a part. If one value is invalid, nothing is written. If a
        lock or a disk fails in between, the parts before it stay stored: AppendedToSomeShards lists them. The system's OSError and
        KeyboardInterrupt get its attribute `parts` then.
        """
        values = values if isinstance(values, list) else listed(values)
        keys = [None] * len(values) if keys is None else listed(keys, "keys")
        if len(keys) != len(values):
            raise ValueError(f"{len(values)} values, but {len(keys)} keys")
        parts: dict[int, tuple[list[Any], list[bytes | str | None]]] = {}
        for value, key in zip(values, keys, strict=True):
            part = parts.setdefault(self.shard_of(key), ([], []))
            part[0].append(value)
            part[1].append(key)
        calls = {shard: _prepared(self.shards[shard], *part, type, timestamp, durable) for shard, part in parts.items()}
        return {shard: written for shard, (written,) in self._append_parts([calls]).items()}

    def append_arrow(self, batch: pyarrow.RecordBatch | pyarrow.Table, *, codec: int = Codec.RAW) -> dict[int, list[range]]:
        """Append a record for each row without a Python object for it. Return the sequences for each shard.

        Columns: as in `append_arrow` of the shards, which are `kvspool.Spool`s or journals. After an error: see `append_many`.
        """
        from kvspool import arrow

        return self._append_parts([self._split(part, codec) for part in arrow.parts(batch)])

    def _split(self, batch: pyarrow.RecordBatch, codec: int) -> dict[int, Any]:
        """Return for each shard with rows the call that appends them, after all checks."""
        from kvspool import arrow

        laid_out: dict[bool, Any] = {}
        for is_journal in {isinstance(log, Journal) for log in self.shards}:
            laid_out[is_journal] = arrow.JournalColumns(batch, codec) if is_journal else arrow.Columns(batch)
        columns = laid_out[isinstance(self.shards[0], Journal)]
        shards, rows = array("i", bytes(4 * columns.rows)), array("i", bytes(4 * columns.rows))
        ends = array("i", bytes(4 * len(self.shards)))
        if columns.rows:
            has_key = memoryview(bytes(columns.rows)) if columns.has_key is None else columns.has_key
            self._turn = hash_column(columns.key_offsets, columns.keys, has_key, len(self.shards) - 1, self._turn, memoryview(shards))
            group(memoryview(shards), memoryview(ends), memoryview(rows))
        starts = [0, *ends[:-1]]
        return {
            shard: _prepared_columns(self.shards[shard], laid_out, memoryview(rows)[start:end], codec)
            for shard, (start, end) in enumerate(zip(starts, ends, strict=True))
            if end > start
        }

    def _append_parts(self, batches: list[dict[int, Any]]) -> dict[int, list[range]]:
        """Call each batch's appends, one for each shard with a part of it. Return the sequences for each shard."""
        calls = [(shard, batch[shard]) for batch in batches for shard in sorted(batch)]
        done: dict[int, list[range]] = {shard: [] for shard, _ in calls}
        try:
            with descriptors.for_logs(self.root, len(self.shards)):
                for shard, call in calls:
                    done[shard].extend(map(operator.call, (call,)))  # in C: no handler's exception can separate a result from its place
            return done
        except BaseException as error:
            ended = sum(map(len, done.values()))
            if ended < len(calls):
                done[calls[ended][0]].append(appended_by(error))
            parts = {shard: stored for shard, ranges in done.items() if (stored := [one for one in ranges if one])}
            _say_what_is_stored(error, parts, set(done), is_last=ended >= len(calls) - 1)
            raise

    def producer(self, name: str) -> ShardProducer:
        """Return a producer, which appends numbered batches and stores each record once, across crashes; see `shard.producers`.

        Raises ValueError for an invalid name, and for journals of another format than kvj.
        """
        return ShardProducer(self, name)

    def sync(self, timeout: float | None = None) -> dict[int, int]:
        """Write every appended record to disk. Return for each shard the sequence below which all are on disk; see `kvspool.Log.sync`."""
        with descriptors.for_logs(self.root, len(self.shards)):
            return {index: shard.sync(timeout) for index, shard in enumerate(self.shards)}

    # Reading.

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Merge:
        """Iterate over the stored records (`ShardRecord`) of all shards, in the order of `merge`.

        start: "earliest", "latest", an aware datetime, or a sequence for each shard (the others start at their earliest record). Raises
        OutOfRange; limit, on_gap and isolation: as in `kvspool.Log.read`.
        """
        return self._fill(Merge(limit, on_gap), start, True, isolation)

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> FollowingMerge:
        """Iterate over the records from `start`, and wait for more, on one inotify descriptor for all shards; see `read`.

        Ends normally after `timeout` seconds without a record; None: never. Raises Closed as soon as any thread closes the set.
        """
        return self._fill(FollowingMerge(limit, on_gap, timeout), start, False, isolation)

    def _fill(self, merge: M, start: Start, bounded: bool, isolation: Isolation) -> M:
        if isinstance(start, int):
            raise ValueError(f"each shard has its own sequences: start must be a mapping such as {{0: {start}}}, not {start}")
        starts = start if isinstance(start, Mapping) else {}
        if any(index not in range(len(self.shards)) for index in starts):
            raise ValueError(f"start names shards {sorted(starts)}; there are 0..{len(self.shards) - 1}")
        default = "earliest" if isinstance(start, Mapping) else start
        with descriptors.for_logs(self.root, len(self.shards)):
            for index, shard in enumerate(self.shards):
                cursor = shard.cursor(starts.get(index, default), bounded=bounded, isolation=isolation)
                merge.add(index, cursor, placed(ShardRecord, index))
        return self._iterations.add(merge)

    # Maintenance.

    def stats(self) -> list[SpoolStats | JournalStats]:
        """Return the statistics of each shard, in order."""
        with descriptors.for_logs(self.root, len(self.shards)):
            return [shard.stats() for shard in self.shards]

    @property
    def closed(self) -> bool:
        """Return whether the handle is closed."""
        return all(shard.closed for shard in self.shards)

    def close(self) -> None:
        """Close all shards. Iterations raise Closed, at once in other threads."""
        self._iterations.end(f"{self.root} was closed; open it again")
        close_all(self.shards)

    def __enter__(self) -> ShardSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Merge:
        return self.read()

    def __repr__(self) -> str:
        return f"<ShardSet {self.root} prefix={self.prefix!r} bits={self.bits}{' closed' if self.closed else ''}>"


def default_capacity(bits: int) -> int:
    """Return the default size of each ring in a set of 2^bits shards, in bytes."""
    return max(LEAST_CAPACITY, CAPACITY >> bits)


def _make_shard(path: Path, bits: int, options: dict[str, Any], exist_ok: bool) -> None:
    """Create the log of one shard, unless it exists: from an earlier call, or because another process has just created it."""
    is_spool = options.get("format", "spool") == "spool"
    defaults = {"prefill": False, "capacity": default_capacity(bits)} if is_spool else {}
    try:
        kvspool.create(path, **{**defaults, **options}).close()
    except LogExists:
        if exist_ok:  # of any capacity if none is given
            kvspool.create(path, **options, exist_ok=True).close()


def open_shard(path: Path, timeout: float) -> Log:
    """Open the log of one shard. Raises as `kvspool.open`."""
    return logs.open_store(path, timeout=timeout)


def _say_what_is_stored(error: BaseException, parts: dict[int, list[range]], shards: set[int], *, is_last: bool) -> None:
    """Note in an error which `parts` of a batch for `shards` are stored; see `kvspool.errors.say_what_is_stored`."""
    if not parts:
        return
    words = f"records of this batch were appended to {len(parts)} of {len(shards)} shards: {sorted(parts)}"
    says_more = isinstance(error, TooFewDescriptors) or (is_last and isinstance(error, NotDurable))
    if isinstance(error, KvspoolError) and not says_more:
        raise AppendedToSomeShards(f"{words}; {DO_NOT_REPEAT}: {error}", parts) from error
    error.parts = parts  # type: ignore[attr-defined]
    error.add_note(words)


def _prepared(
    log: Log, values: list[Any], keys: list[bytes | str | None], type: int, timestamp: int | None, durable: bool
) -> Callable[[], range]:
    """Return the call that appends records, after all checks."""
    return partial(log.append_prepared, log.prepare(values, keys, type, timestamp), durable=durable)  # type: ignore[arg-type]


def _prepared_columns(log: Log, laid_out: dict[bool, Any], rows: memoryview, codec: int) -> Callable[[], range]:
    """Return the call that appends these rows of a record batch, after all checks."""
    if isinstance(log, Journal):
        return partial(log.append_prepared, log.prepare_columns([laid_out[True]], rows))
    log.check_columns([laid_out[False]], codec)
    return partial(log.append_columns, [laid_out[False]], rows, codec)
