"""A sharded log: 2^bits logs under one root, and a hash that selects one of them by key.

**Durability.** As of each log: records that `append` has returned survive the crash of any process; after `sync`, a power failure.

**Order.** Records of the same key stay in order, because they are in one shard. The order of all shards is that of `merge`.

**Limits.** 1 to 1024 shards. A batch is appended to several shards one after the other: readers may see a part of it first.
"""

from __future__ import annotations

import operator
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

import kvspool
from kvspool import LogStats, Record, system
from kvspool.engine.iteration import Iterations
from kvspool.errors import DO_NOT_REPEAT, Closed, KvspoolError, LogExists, LogNotFound, NoSuchReader, NotDurable, appended_by
from kvspool.groups.share import file_name
from kvspool.groups.single import lag_of
from kvspool.groups.stats import GroupStats, group_files, look
from kvspool.opening import logs
from kvspool.options import TIMEOUT, Isolation
from kvspool.producers import ProducerStats
from kvspool.record import Codec, listed
from kvspool.system import disk
from kvspool.system.handles import close_all
from kvspool.tasks.layout import Wanted
from kvspool.tasks.stats import TaskStats
from shard import descriptors, route
from shard.errors import AppendedToSomeShards, ConflictingShardSets, TooFewDescriptors
from shard.groups import ShardSetShare, reset
from shard.kernel.hash import Spread, group, hash_column
from shard.kernel.merge import placed
from shard.merge import Merge
from shard.merged import Log, MergedLogs, moved
from shard.place import Place
from shard.producers import ShardProducer
from shard.tasks import ShardSources
from shard.tasks import listing as task_listing
from shard.writer import ShardSetWriter

if TYPE_CHECKING:
    import pyarrow


Start = str | datetime | Mapping[int, int]
Call = Callable[[], range]
M = TypeVar("M", bound=Merge[Any])

CAPACITY = 64 << 20  # bytes, of all rings of a set by default: as much as one log, for any number of shards
GROUPS = ".groups"  # the directory of the files of a set's groups
LEAST_CAPACITY = 1 << 20  # of one ring by default
OF_SETS = frozenset(("codecs", "keys", "producers", "timestamps", "types"))  # capabilities that concern verbs of a set


class ShardRecord(Record, frozen=True, gc=False):
    """A record and its shard."""

    shard: int = 0


class ShardSet(Spread, MergedLogs[int, ShardRecord, datetime | Mapping[int, int]]):
    """A handle of a sharded log. Get it from `ShardSet.create` or `ShardSet.open`. It can be shared by threads, and survives a fork.

    shards: the logs of the shards, in order; their own verbs serve for what concerns one of them, for example `shards.shards[0].verify()`.
    """

    HELPERS = frozenset(("append_at_once", "append_slowly", "find"))
    shards: list[Log]

    def __init__(self, root: Path, prefix: str, shards: list[Log]) -> None:
        """Use the open logs of a complete set, in order."""
        # Writers without keys start at different shards; otherwise all would queue for the first one.
        turn = int.from_bytes(system.port.random(2), "little") & (len(shards) - 1)
        super().__init__(shards, all(log.capacity for log in shards), turn)
        self.root = self.path = root
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
        already; TooFewDescriptors to open all of them, after they were created; FileNotFoundError without the parent of `root`; and the
        errors of `kvspool.create`.
        """
        options = {name: value for name, value in options.items() if value is not None}
        logs.check_options(options.get("format", "spool"), options, "ShardSet.create", ("prefix", "bits"))
        base = Path(os.path.abspath(root))
        names = [route.directory_name(prefix, bits, index) for index in range(1 << route.check_bits(bits))]
        if not base.is_dir():
            disk.check_parent(base)
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

    def append_slowly(
        self, shard: int, value: Any, key: bytes | str | None, type: int, timestamp: int | None, timeout: float | None, durable: bool
    ) -> Place:
        """Append a record that takes several steps, or raise for invalid arguments; see `append`."""
        log = self.shards[shard]
        try:
            return Place(shard, log.append(value, key=key, type=type, timestamp=timestamp, timeout=timeout, durable=durable))
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
        timeout: float | None = None,
        durable: bool = False,
    ) -> dict[int, range]:
        """Append a record for each value, each shard's part under one lock. Return the sequences for each shard.

        timeout: seconds to wait for each lock, and for room (default: the set's). durable: return when all are on disk, after a flush for
        each shard with a part. If one value is invalid, nothing is written. If a lock or a disk fails in between, the parts before it stay
        stored: AppendedToSomeShards lists them. The system's OSError and KeyboardInterrupt get its attribute `parts` then.
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
        calls = {shard: _prepared(self.shards[shard], *part, type, timestamp, timeout, durable) for shard, part in parts.items()}
        return {shard: written for shard, (written,) in self._append_parts([calls]).items()}

    def append_arrow(
        self,
        batch: pyarrow.RecordBatch | pyarrow.Table,
        *,
        codec: int = Codec.RAW,
        timeout: float | None = None,
        durable: bool = False,
    ) -> dict[int, list[range]]:
        """Append a record for each row without a Python object for it. Return the sequences for each shard.

        Columns: as in `append_arrow` of the shards, which are `kvspool.Spool`s or journals. timeout, durable, errors: see `append_many`.
        """
        from kvspool import arrow

        return self._append_parts([self._split(part, codec, timeout, durable) for part in arrow.parts(batch)])

    def _split(self, batch: pyarrow.RecordBatch, codec: int, timeout: float | None, durable: bool) -> dict[int, Call]:
        """Return for each shard with rows the call that appends them, after all checks."""
        laid_out = {kind: log.columns_of(batch, codec) for kind, log in {log.kind: log for log in self.shards}.items()}
        columns = laid_out[self.shards[0].kind]
        shards, rows = array("i", bytes(4 * columns.rows)), array("i", bytes(4 * columns.rows))
        ends = array("i", bytes(4 * len(self.shards)))
        if columns.rows:
            has_key = memoryview(bytes(columns.rows)) if columns.has_key is None else columns.has_key
            keys = memoryview(columns.keys)
            self._turn = hash_column(columns.key_offsets, keys, has_key, len(self.shards) - 1, self._turn, memoryview(shards))
            group(memoryview(shards), memoryview(ends), memoryview(rows))
        calls: dict[int, Call] = {}
        for shard, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if end > start:
                log = self.shards[shard]
                batch_of_log = log.prepare_columns([laid_out[log.kind]], memoryview(rows)[start:end], codec)
                calls[shard] = partial(log.append_prepared, batch_of_log, timeout, durable)
        return calls

    def _append_parts(self, batches: list[dict[int, Any]]) -> dict[int, list[range]]:
        """Call each batch's appends, one for each shard with a part of it. Return the sequences for each shard."""
        calls = [(shard, batch[shard]) for batch in batches for shard in sorted(batch)]
        done: dict[int, list[range]] = {shard: [] for shard, _ in calls}
        self._check_open()
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

    def writer(self, timeout: float | None = None) -> ShardSetWriter:
        """Return a writer for many appends; see `kvspool.Log.writer`. Raises Closed, LogVanished, PermissionError."""
        for shard in self.shards:
            shard.open_to_write()  # or raise the error of an append
        return ShardSetWriter(self, timeout)

    def producer(self, name: str) -> ShardProducer:
        """Return a producer, which appends numbered batches and stores each record once, across crashes; see `shard.producers`.

        Raises ValueError for an invalid name, Unsupported for journals of another format than kvj.
        """
        return ShardProducer(self.shards, name)

    def producers(self) -> list[list[ProducerStats]]:
        """Return the statistics of the producers of each shard, in order. Raises Closed."""
        return [shard.producers() for shard in self.shards]

    def forget_producers(self, names: Iterable[str], timeout: float | None = None) -> int:
        """Forget producers in all shards, and return how many accounts there were; see `kvspool.Log.forget_producers`."""
        wanted = list(names)
        return sum(shard.forget_producers(wanted, timeout) for shard in self.shards)

    def retire_producers(self, prefix: str, timeout: float | None = None) -> int:
        """Declare that producers with this prefix append nothing more to any shard, and return the number of their accounts; see
        `kvspool.producers.retire`.
        """
        return sum(shard.retire_producers(prefix, timeout) for shard in self.shards)

    def sync(self, timeout: float | None = None) -> dict[int, int]:
        """Write every appended record to disk. Return for each shard the sequence below which all are on disk; see `kvspool.Log.sync`."""
        with descriptors.for_logs(self.root, len(self.shards)):
            return {index: shard.sync(timeout) for index, shard in enumerate(self.shards)}

    # Reading.

    def get(self, shard: int, sequence: int) -> ShardRecord:
        """Return a record by its place: `shards.get(*place)`. Raises ValueError for a shard that isn't there; see `kvspool.Log.get`."""
        return self.placed_at(shard, self._log(shard).get(sequence))

    def view(self, shard: int, sequence: int) -> AbstractContextManager[memoryview]:
        """Return a context manager with a view of the stored bytes of a record's value; see `kvspool.Log.view`."""
        return self._log(shard).view(sequence)

    def each_log(self) -> Iterator[tuple[int, Log]]:
        return iter(enumerate(self.shards))

    def placed_at(self, key: int, record: Record) -> ShardRecord:
        return moved(ShardRecord, record, shard=key)

    def _log(self, shard: int) -> Log:
        if shard not in range(len(self.shards)):
            raise ValueError(f"there is no shard {shard}; there are 0..{len(self.shards) - 1}")
        return self.shards[shard]

    # Groups.

    def groups(self) -> list[GroupStats]:
        self._check_open()
        readers = [{one.name: one.lag for one in log.readers()} for log in self.shards]
        names = {f"{index:03x}": index for index in range(len(self.shards))}
        found = [look(path, names) for path in group_files(self.root / GROUPS) if path.name.startswith(f"{self.prefix}.")]
        lags = {one.name: lag_of(shard.get(one.name) for shard in readers) for one in found if one is not None}
        return [structs.replace(one, lag=lags[one.name]) for one in found if one is not None]

    def reset_group(self, name: str, start: Start) -> None:
        self._check_open()
        reset(self.shards, self.root, name, start)

    def _group_file(self, name: str) -> tuple[Path, int]:
        self._check_open()
        directory = self.root / GROUPS
        disk.make_directory(directory)
        return directory / f"{self.prefix}.{file_name(name)}", len(self.shards)

    def _share_of(self, name: str, start: Start, isolation: Isolation) -> ShardSetShare:
        if isinstance(start, int):
            raise ValueError(f"each shard has its own sequences: start must be a mapping such as {{0: {start}}}, not {start}")
        return ShardSetShare(self.shards, name, start, isolation, lambda index: placed(ShardRecord, index))

    # Tasks.

    def task_stats(self) -> list[TaskStats]:
        self._check_open()
        return task_listing(self.shards, str)

    def delete_tasks(self, name: str) -> None:
        self._check_open()
        if not any(one.name == name for one in self.task_stats()):
            raise NoSuchReader(f"{self.root} has no task list {name!r}")
        for log in self.shards:
            with suppress(NoSuchReader):  # it was created while shards were missing
                log.delete_tasks(name)

    def _task_path(self) -> Path:
        return self.root

    def _task_sources(self, name: str, start: Start, wanted: Wanted) -> ShardSources:
        self._check_open()
        if isinstance(start, int):
            raise ValueError(f"each shard has its own sequences: start must be a mapping such as {{0: {start}}}, not {start}")
        return ShardSources(self.root, self.shards, start, wanted, lambda index: placed(ShardRecord, index))

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

    @property
    def capabilities(self) -> frozenset[str]:
        """Return the optional capabilities of all shards that concern verbs of a set; see `kvspool.Log.capabilities`."""
        return OF_SETS.intersection(*(shard.capabilities for shard in self.shards))

    def stats(self) -> list[LogStats]:
        """Return the statistics of each shard, in order."""
        with descriptors.for_logs(self.root, len(self.shards)):
            return [shard.stats() for shard in self.shards]

    @property
    def closed(self) -> bool:
        """Return whether the handle is closed."""
        return all(shard.closed for shard in self.shards)

    def close(self) -> None:
        """Close all shards. Iterations raise Closed, at once in other threads."""
        self._iterations.end(self._closed_words())
        close_all(self.shards)

    def _check_open(self) -> None:
        if self.closed:
            raise Closed(self._closed_words())

    def _closed_words(self) -> str:
        return f"{self.root} was closed; open it again"

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
    log: kvspool.Log,
    values: list[Any],
    keys: list[bytes | str | None],
    type: int,
    timestamp: int | None,
    timeout: float | None,
    durable: bool,
) -> Call:
    """Return the call that appends records, after all checks."""
    return partial(log.append_prepared, log.prepare(values, keys, type, timestamp), timeout, durable)
