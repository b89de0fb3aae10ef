"""Offsets as JSON, in a user's options and in a query's checkpoint.

    {"JFK": {"0": 23, "1": 45}}                                                    as Kafka writes them: 23 is the next to be read
    {"/logs": {"JFK": {"0": "9f3c8a21", "1": "04d1b7e6"}}, "JFK": {"0": 23, "1": 45}}     as a query notes them

The end of a query's first micro-batch also stores, under "/from", the beginning of that batch. Spark stores only ends. To repeat the
batch, it asks a new process where the query starts, and by then "latest" and times would give another answer.

A query adds the first digits of each log's id under a name that is no topic. So a recreated log under a checkpoint is detected even if its
sequences look right; a log without an id has no entry. The numbers stay plain numbers, for programs that compute a lag from a progress
report. A user's JSON may include the ids, for example copied from such a report.

A client at hubs may have had several logs, one after the other. Then "/bases" has their ids and the sequences at which they begin, as far
as the batch needs them. So a number means the same record at every hub. "/away", in a progress report, has hubs that don't answer.

Keys are always in the same order: Spark compares offsets as text, and treats any other order as new records.

All functions are pure. They check all offsets from checkpoints and users.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hub.client import timeline
from hub.client.timeline import Table
from hub.protocol.ingest import LAST
from hub.protocol.reading import Generation
from hub.spark.shards import Extent, ShardKey
from hub.spark.shards import ShardOffsets as ShardOffsets

EARLIEST, LATEST = -2, -1
LARGEST = (1 << 63) - 1
LOGS = "/logs"  # a topic is a file name or a part of one, so it has no slash
FROM = "/from"
BASES = "/bases"
AWAY = "/away"
DIGITS = 8  # of a log's id; they are random, so one replaced log in four billion would not be detected

Side = Literal["starting", "ending"]
SequenceAt = Callable[[ShardKey, int], "int | None"]
Report = Callable[[str], None]  # gets a loss; raises, or returns if the query may continue without the lost records

NOWHERE: Mapping[ShardKey, int] = {}
_PARTITION = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_LOG = re.compile("[0-9a-f]{32}")
_ID = re.compile(rf"[0-9a-f]{{{DIGITS},128}}", re.ASCII)


def note(ends: Mapping[ShardKey, int], extents: Mapping[ShardKey, Extent], starts: Mapping[ShardKey, int] = NOWHERE) -> dict[str, Any]:
    """Return the JSON of a query's offsets. Every shard of `ends` is in `extents`. starts: where the batch begins that ends there."""
    logs: dict[str, dict[str, str]] = {}
    bases: dict[str, dict[str, dict[str, int]]] = {}
    topics: dict[str, dict[str, int]] = {}
    for key in sorted(ends):
        extent, end = extents[key], ends[key]
        topics.setdefault(key.topic, {})[str(key.partition)] = end
        if extent.log_id:
            logs.setdefault(key.topic, {})[str(key.partition)] = extent.log_id[:DIGITS]
        needed = timeline.noted(extent.logs, min(starts.get(key, end), end), end)
        if needed:
            bases.setdefault(key.topic, {})[str(key.partition)] = {one.log: one.base for one in needed}
    return {**({LOGS: logs} if logs else {}), **({BASES: bases} if bases else {}), **topics}


def is_same_place(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two JSON objects of a query have the same offsets in the same logs."""
    ours, theirs = ({name: value for name, value in which.items() if name not in (FROM, BASES)} for which in (one, other))
    return ours == theirs


def parse(given: object, what: str, least: int = 0) -> ShardOffsets:
    """Return the offsets of a JSON object. what: its origin, for messages. least: the smallest valid number.

    Raises ValueError.
    """
    topics = dict(_object(given, what))
    noted, bases = topics.pop(LOGS, {}), topics.pop(BASES, {})
    for name_of_none in (FROM, AWAY):
        topics.pop(name_of_none, None)
    ends = dict(_flat(topics, what))
    for key, end in ends.items():
        if not isinstance(end, int) or isinstance(end, bool) or not least <= end <= LARGEST:
            raise ValueError(f"[KVSPOOL_INVALID_OFFSETS] {what}: {name(key)} is a number {least}..2^63-1, not {_short(end)}")
    logs = dict(_flat(noted, f"{what}, {LOGS}"))
    for key, log_id in logs.items():
        if key not in ends or not isinstance(log_id, str) or not _ID.fullmatch(log_id):
            raise ValueError(f"[KVSPOOL_INVALID_OFFSETS] {what}: {_short(log_id)} is no id of a log of these offsets")
    tables = {key: _table(key, given, ends, what) for key, given in _flat(bases, f"{what}, {BASES}")}
    return ShardOffsets(dict(sorted(ends.items())), logs, tables)


def _table(key: ShardKey, given: object, ends: Mapping[ShardKey, int], what: str) -> Table:
    """Return the logs of a shard. Raises ValueError."""
    found = _object(given, f"{what}, {BASES}").items()
    bases = [base for _, base in found]
    is_sound = key in ends and bases and all(isinstance(base, int) and not isinstance(base, bool) and abs(base) < LAST for base in bases)
    if not is_sound or bases != sorted(bases) or not all(_LOG.fullmatch(log) for log, _ in found):
        raise ValueError(f"[KVSPOOL_INVALID_OFFSETS] {what}: {name(key)} has no table of logs: {_short(given)}")
    return tuple(Generation(log, base) for log, base in found)


def begin_of(start: Mapping[str, Any], end: Mapping[str, Any]) -> Any:
    """Return the offsets at which a micro-batch begins that Spark describes as from `start` to `end`."""
    return start if FROM in start else end.get(FROM, start)


def is_same_log(noted: str, log_id: str) -> bool:
    """Return whether an id may be the noted one, of which perhaps only the first digits are known; a log without an id always matches."""
    return not noted or log_id.startswith(noted[: len(log_id)] if log_id else noted)


def is_in_log(noted: ShardOffsets, key: ShardKey, extent: Extent) -> bool:
    """Return whether a noted offset is in a log that the shard has: in one of several, or in the first one."""
    table = noted.bases.get(key)
    if not table:
        return is_same_log(noted.logs.get(key, ""), extent.log_id)
    ours = [one for one in table if one.base <= noted.next[key]] or list(table[:1])
    return ours[-1] in extent.logs


def name(key: ShardKey) -> str:
    """Return the name of a shard in messages."""
    return f"topic {key.topic!r}, partition {key.partition}"


def go_on(noted: ShardOffsets, extents: Mapping[ShardKey, Extent], report: Report) -> dict[ShardKey, int]:
    """Return where a query continues in each known shard. A loss is reported; if `report` returns, the query continues after it.

    A removed shard is omitted; a replaced log is read from its first record; a shortened one from its end.
    """
    places = {}
    for key, at in noted.next.items():
        extent = extents.get(key)
        if extent is not None and extent.late:
            report(f"[KVSPOOL_DATA_LOSS] {name(key)}: {extent.late}")
        if extent is None:
            report(
                f"[KVSPOOL_PARTITIONS_DELETED] {name(key)} was removed; offset {at} was to be read next. Records after it, "
                "if any, are lost"
            )
        elif not is_in_log(noted, key, extent):
            report(
                f"[KVSPOOL_LOG_REPLACED] {name(key)}: another log has replaced the one in which offset {at} was to be read next "
                "(START_OFFSET_RESET); the offsets of the new log are unrelated to those of the old one"
            )
            places[key] = extent.first
        elif at > extent.end:
            report(
                f"[KVSPOOL_OFFSET_CHANGED] {name(key)}: offset {at} was to be read next, but the log ends at {extent.end} "
                "(PARTITION_OFFSET_CHANGED); some records may have been missed"
            )
            places[key] = extent.end
        elif at < extent.first:
            report(f"[KVSPOOL_DATA_LOSS] {name(key)}: offsets {at} to {extent.first - 1} are lost, and were not read")
            places[key] = extent.first
        else:
            places[key] = at
    return places


def spans(start: ShardOffsets, end: ShardOffsets, extents: Mapping[ShardKey, Extent], report: Report) -> dict[ShardKey, tuple[int, int]]:
    """Return for each shard the first and the end sequence of a micro-batch: the offsets noted before it and for it.

    So a repeated batch reads the same records. Records lost since then are reported; if `report` returns, they are skipped.

    A shard in `end` alone was new: it is noted at its first sequence, and read from there by the next batch.
    """
    places = go_on(start._replace(next={key: at for key, at in start.next.items() if key in end.next}), extents, report)
    found = {}
    for key, at in places.items():
        stop, extent = end.next[key], extents[key]
        if not is_in_log(end, key, extent):
            report(
                f"[KVSPOOL_LOG_REPLACED] {name(key)}: another log has replaced the one in which offsets {at} to {stop - 1} were "
                "to be read"
            )
        elif stop > extent.end:
            report(
                f"[KVSPOOL_OFFSET_CHANGED] {name(key)}: offsets up to {stop - 1} were to be read, but the log ends at {extent.end} "
                "(PARTITION_OFFSET_CHANGED); some records may have been missed"
            )
            found[key] = (at, max(at, extent.end))
        else:
            found[key] = (at, max(at, stop))
    return found


@dataclass(frozen=True)
class Bound:
    """The start or end of a query, as its options say: the first of these that isn't None.

    Times are ns since 1970. An offset may be EARLIEST or LATEST, as may `everywhere`, which applies to all shards.
    """

    timestamp: int | None = None
    timestamps: Mapping[ShardKey, int] | None = None
    offsets: ShardOffsets | None = None
    everywhere: int | None = None

    @property
    def is_given(self) -> bool:
        """Return whether any option was given."""
        return any(one is not None for one in (self.timestamp, self.timestamps, self.offsets, self.everywhere))

    def sequences(
        self, side: Side, extents: Mapping[ShardKey, Extent], sequence_at: SequenceAt, report: Report, *, is_lenient_on_time: bool = False
    ) -> dict[ShardKey, int]:
        """Return the sequence of each shard.

        is_lenient_on_time: a shard without a record at or after a time starts at its end, without an error; a query always ends there.

        Raises ValueError if the option omits a shard or names one that doesn't exist, and for a time without a record. Reports an offset
        that is lost, not written yet, or of another log.
        """
        if self.timestamp is not None or self.timestamps is not None:
            is_lenient = is_lenient_on_time or side == "ending"
            return self._of_times(side, extents, sequence_at, is_lenient)
        if self.offsets is not None:
            _check_shards(f"{side}Offsets", self.offsets.next, extents)
            return {key: self._of_offset(side, key, self.offsets, extent, report) for key, extent in sorted(extents.items())}
        assert self.everywhere in (EARLIEST, LATEST)
        return {key: _at_edge(self.everywhere, extent) for key, extent in sorted(extents.items())}

    def _of_times(
        self, side: Side, extents: Mapping[ShardKey, Extent], sequence_at: SequenceAt, is_lenient: bool
    ) -> dict[ShardKey, int]:
        times = self.timestamps
        if self.timestamp is not None:
            times = dict.fromkeys(extents, self.timestamp)
        assert times is not None
        _check_shards(f"{side}OffsetsByTimestamp", times, extents)
        found = {}
        for key, extent in sorted(extents.items()):
            at = sequence_at(key, times[key])
            if at is None and not is_lenient:
                raise ValueError(
                    f"[KVSPOOL_NO_OFFSET_AT_TIMESTAMP] {name(key)} has no record of time {times[key] // 1_000_000} ms or later; option "
                    "startingOffsetsByTimestampStrategy=latest starts at its end"
                )
            # Records are added and removed after the look at the extents.
            found[key] = extent.end if at is None else max(extent.first, min(at, extent.end))
        return found

    def _of_offset(self, side: Side, key: ShardKey, asked: ShardOffsets, extent: Extent, report: Report) -> int:
        at = asked.next[key]
        if at in (EARLIEST, LATEST):
            return _at_edge(at, extent)
        if side == "ending" and at < extent.first and is_in_log(asked, key, extent):
            report(f"[KVSPOOL_DATA_LOSS] {name(key)}: all records before offset {at}, where option endingOffsets ends, are lost")
            return extent.first  # nothing is left to read

        def named(loss: str) -> None:
            report(f"{loss}; option {side}Offsets asks for offset {at}")

        return go_on(asked._replace(next={key: at}), {key: extent}, named)[key]


def ranges(starts: Mapping[ShardKey, int], ends: Mapping[ShardKey, int]) -> dict[ShardKey, tuple[int, int]]:
    """Return the first and the end sequence of each shard for a batch query.

    Raises ValueError if the end is before the start.
    """
    for key, at in starts.items():
        if at > ends[key]:
            raise ValueError(
                f"[KVSPOOL_START_OFFSET_GREATER_THAN_END_OFFSET] {name(key)}: the start is at offset {at}, and the end at {ends[key]}"
            )
    return {key: (at, ends[key]) for key, at in starts.items()}


def _at_edge(which: int | None, extent: Extent) -> int:
    return extent.first if which == EARLIEST else extent.end


def _check_shards(option: str, named: Mapping[ShardKey, int], extents: Mapping[ShardKey, Extent]) -> None:
    unknown, missing = sorted(named.keys() - extents.keys()), sorted(extents.keys() - named.keys())
    if unknown or missing:
        code = "TIMESTAMPS" if option.endswith("ByTimestamp") else "OFFSETS"
        lists = (("there is no such shard", unknown), ("missing", missing))
        found = "; ".join(f"{word}: {_few(keys)}" for word, keys in lists if keys)
        hint = "; -1 is latest, -2 earliest" if code == "OFFSETS" else ""
        raise ValueError(f"[KVSPOOL_{code}_DO_NOT_MATCH] option {option} must name exactly the shards that are read; {found}{hint}")


def parse_text(text: str, what: str, least: int = 0) -> ShardOffsets:
    """Return the offsets of a user's JSON; see `parse`. Raises ValueError, also for a repeated name."""
    try:
        given = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"[KVSPOOL_INVALID_OFFSETS] {what} is JSON like {{\"topic\": {{\"0\": 23, \"1\": 45}}}}, not {_short(text)}: {error}"
        ) from None
    return parse(given, what, least)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated")
    return found


def _flat(topics: object, what: str) -> Iterable[tuple[ShardKey, Any]]:
    for topic, partitions in _object(topics, what).items():
        for partition, value in _object(partitions, f"{what}, {_short(topic)}").items():
            if not _PARTITION.fullmatch(partition):
                raise ValueError(f"[KVSPOOL_INVALID_OFFSETS] {what}: a partition is the number of a shard as text, not {_short(partition)}")
            yield ShardKey(topic, int(partition)), value


def _object(given: object, what: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError(f'[KVSPOOL_INVALID_OFFSETS] {what} is an object like {{"topic": {{"0": 23, "1": 45}}}}, not {_short(given)}')
    return given


def _few(keys: list[ShardKey]) -> str:
    shown = ", ".join(name(key) for key in keys[:5])
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."
