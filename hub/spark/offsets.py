"""Offsets as JSON: what a user's options say, and what a query notes in its checkpoint.

    {"JFK": {"0": 23, "1": 45}}                                                    as Kafka writes them: 23 is the next to be read
    {"/logs": {"JFK": {"0": "9f3c8a21", "1": "04d1b7e6"}}, "JFK": {"0": 23, "1": 45}}     as a query notes them

A query adds the first digits of each log's id under a name that no topic has, so that a log that was deleted and made anew under a
checkpoint is noticed although its sequences may look right; a log without an id has none there. The numbers stay plain numbers, for
whoever works out a lag from a progress report. A user's JSON may have the ids, as when it was copied from such a report, or leave them out.

Keys are always in the same order: Spark compares offsets as text, and takes any other order for new records.

All functions are pure. What they get from a checkpoint or a user is checked: it may be anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hub.spark.shards import Extent, ShardKey

EARLIEST, LATEST = -2, -1
WORDS = {"earliest": EARLIEST, "latest": LATEST}
LARGEST = (1 << 63) - 1
LOGS = "/logs"  # a topic is a file's name or a part of one, so it has no slash
DIGITS = 8  # of a log's id; they are random, so one replaced log in four billion would go unnoticed

Side = Literal["starting", "ending"]
SequenceAt = Callable[[ShardKey, int], "int | None"]
Report = Callable[[str], None]  # gets a loss; raises, or returns for the query to go on without what is lost

_PARTITION = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_ID = re.compile(rf"[0-9a-f]{{{DIGITS},128}}", re.ASCII)


class Offsets(NamedTuple):
    """The next sequence of each shard, and the ids of their logs as far as they are known."""

    next: dict[ShardKey, int]
    logs: dict[ShardKey, str]


def note(ends: Mapping[ShardKey, int], extents: Mapping[ShardKey, Extent]) -> dict[str, Any]:
    """Return the JSON of offsets that a query notes. Every shard of `ends` is one of `extents`."""
    logs: dict[str, dict[str, str]] = {}
    topics: dict[str, dict[str, int]] = {}
    for key in sorted(ends):
        topics.setdefault(key.topic, {})[str(key.partition)] = ends[key]
        if extents[key].log_id:
            logs.setdefault(key.topic, {})[str(key.partition)] = extents[key].log_id[:DIGITS]
    return {LOGS: logs, **topics} if logs else {**topics}


def parse(given: object, what: str, least: int = 0) -> Offsets:
    """Return the offsets of a JSON object. what: where it comes from, for the message. least: the smallest number that has a meaning.

    Raises ValueError.
    """
    topics = dict(_object(given, what))
    noted = topics.pop(LOGS, {})
    ends = dict(_flat(topics, what))
    for key, end in ends.items():
        if not isinstance(end, int) or isinstance(end, bool) or not least <= end <= LARGEST:
            raise ValueError(f"[KVSPOOL_INVALID_OFFSETS] {what}: {name(key)} is a number {least}..2^63-1, not {_short(end)}")
    logs = dict(_flat(noted, f"{what}, {LOGS}"))
    for key, log_id in logs.items():
        if key not in ends or not isinstance(log_id, str) or not _ID.fullmatch(log_id):
            raise ValueError(f"[KVSPOOL_INVALID_OFFSETS] {what}: {_short(log_id)} is no id of a log of these offsets")
    return Offsets(dict(sorted(ends.items())), logs)


def is_same_log(noted: str, log_id: str) -> bool:
    """Return whether an id may be the noted one, of which only the first digits may be known; a log without an id can't be told apart."""
    return not noted or log_id.startswith(noted[: len(log_id)] if log_id else noted)


def name(key: ShardKey) -> str:
    """Return what messages call a shard."""
    return f"topic {key.topic!r}, partition {key.partition}"


def go_on(noted: Offsets, extents: Mapping[ShardKey, Extent], report: Report) -> dict[ShardKey, int]:
    """Return where a query goes on in each shard that it knows. What is lost is reported; if `report` returns, it goes on behind that.

    A shard that is gone is left out; a log that was replaced is read from its first record; one that has shrunk, from its end.
    """
    places = {}
    for key, at in noted.next.items():
        extent = extents.get(key)
        if extent is None:
            report(
                f"[KVSPOOL_PARTITIONS_DELETED] {name(key)} is gone; offset {at} was to be read next. What was appended behind it, "
                "if anything, is lost"
            )
        elif not is_same_log(noted.logs.get(key, ""), extent.log_id):
            report(
                f"[KVSPOOL_LOG_REPLACED] {name(key)}: another log has taken the place of the one of which offset {at} was to be read next "
                "(START_OFFSET_RESET); the offsets of the new log have nothing to do with those of the old one"
            )
            places[key] = extent.first
        elif at > extent.end:
            report(
                f"[KVSPOOL_OFFSET_CHANGED] {name(key)}: offset {at} was to be read next, but the log ends at {extent.end} "
                "(PARTITION_OFFSET_CHANGED); some records may have been missed"
            )
            places[key] = extent.end
        elif at < extent.first:
            report(f"[KVSPOOL_DATA_LOSS] {name(key)}: offsets {at} to {extent.first - 1} are gone, and were not read")
            places[key] = extent.first
        else:
            places[key] = at
    return places


@dataclass(frozen=True)
class Edge:
    """Where a query starts, or ends, as one of its options says: `at` is EARLIEST or LATEST for all shards, offsets of each one, a time for
    all, or a time of each one (ms since 1970, as Kafka has it).

    or_latest: whether a shard without a record of that time starts at its end; otherwise that is an error.
    """

    option: str
    at: int | Offsets
    kind: Literal["word", "offsets", "timestamp", "timestamps"] = "word"
    or_latest: bool = False

    def sequences(self, extents: Mapping[ShardKey, Extent], sequence_at: SequenceAt, report: Report) -> dict[ShardKey, int]:
        """Return the sequence of each shard. Raises ValueError for shards that the option leaves out or that there are not, and for a time
        that no record has; reports an offset that is gone, or not there yet, or of another log."""
        if self.kind in ("offsets", "timestamps"):
            self._check_shards(extents)
        return {key: self._sequence(key, extent, sequence_at, report) for key, extent in sorted(extents.items())}

    def _check_shards(self, extents: Mapping[ShardKey, Extent]) -> None:
        assert isinstance(self.at, Offsets)
        unknown, missing = sorted(self.at.next.keys() - extents.keys()), sorted(extents.keys() - self.at.next.keys())
        if unknown or missing:
            code = "OFFSETS" if self.kind == "offsets" else "TIMESTAMPS"
            found = "; ".join(
                f"{word}: {_few(keys)}" for word, keys in (("there is no such shard", unknown), ("missing", missing)) if keys
            )
            hint = " Use -1 for latest, -2 for earliest." if self.kind == "offsets" else ""
            raise ValueError(
                f"[KVSPOOL_{code}_DO_NOT_MATCH] {self.option} must name every shard that is read, and no other; {found}.{hint}"
            )

    def _sequence(self, key: ShardKey, extent: Extent, sequence_at: SequenceAt, report: Report) -> int:
        at = self.at if isinstance(self.at, int) else self.at.next[key]
        if self.kind in ("timestamp", "timestamps"):
            return self._of_time(key, at, extent, sequence_at)
        if at in (EARLIEST, LATEST):
            return extent.first if at == EARLIEST else extent.end
        assert isinstance(self.at, Offsets)
        return self._of_offset(Offsets({key: at}, self.at.logs), extent, report)

    def _of_offset(self, asked: Offsets, extent: Extent, report: Report) -> int:
        (key, at), = asked.next.items()  # fmt: skip
        if self.option.startswith("ending") and at < extent.first and is_same_log(asked.logs.get(key, ""), extent.log_id):
            return at  # what is gone is missed at the start of the range, if at all

        def named(loss: str) -> None:
            report(f"{loss}; option {self.option} asks for offset {at}")

        return go_on(asked, {key: extent}, named)[key]

    def _of_time(self, key: ShardKey, at: int, extent: Extent, sequence_at: SequenceAt) -> int:
        found = sequence_at(key, at * 1_000_000)
        if found is None and not self.or_latest:
            raise ValueError(
                f"[KVSPOOL_NO_OFFSET_AT_TIMESTAMP] {self.option}: {name(key)} has no record of timestamp {at} or later; "
                "option startingOffsetsByTimestampStrategy=latest starts at its end"
            )
        # Records come and go after the look at the extents.
        return extent.end if found is None else max(extent.first, min(found, extent.end))


def edge(side: Side, given: Mapping[str, str], *, default: int, streaming: bool) -> Edge:
    """Return where a query starts or ends. given: the options by their names in small letters; others are ignored. The order of
    precedence is Kafka's: a time for all shards, times of each one, offsets.

    Raises ValueError for an option that is wrong, or has no meaning in such a query.
    """
    if side == "ending" and streaming:
        refuse_ending(given)
    offsets, by_time, time = f"{side}Offsets", f"{side}OffsetsByTimestamp", f"{side}Timestamp"
    or_latest = side == "ending" or _strategy(given) == "latest"
    if (text := given.get(time.lower())) is not None:
        return Edge(time, _milliseconds(text.strip(), time), "timestamp", or_latest)
    if (text := given.get(by_time.lower())) is not None:
        times = parse(_loaded(text, by_time), by_time)
        for key, at in times.next.items():
            _milliseconds(str(at), f"{by_time}, {name(key)}")
        return Edge(by_time, times, "timestamps", or_latest)
    if (text := given.get(offsets.lower())) is None:
        return Edge(offsets, default)
    return _of_offsets(side, offsets, text.strip(), streaming)


def refuse_ending(given: Mapping[str, str]) -> None:
    """Raise ValueError for an option that says where a stream ends."""
    for option, what in (("endingOffsets", "offset"), ("endingOffsetsByTimestamp", "timestamp"), ("endingTimestamp", "timestamp")):
        if option.lower() in given:
            raise ValueError(f"[KVSPOOL_INVALID_OPTION] ending {what} not valid in streaming queries: option {option}")


def ranges(
    start: Edge, end: Edge, extents: Mapping[ShardKey, Extent], sequence_at: SequenceAt, report: Report
) -> dict[ShardKey, tuple[int, int]]:
    """Return the first and the end sequence of what a batch query reads of each shard; see `Edge.sequences`.

    Raises ValueError too where the end lies before the start.
    """
    starts, ends = start.sequences(extents, sequence_at, report), end.sequences(extents, sequence_at, report)
    for key, at in starts.items():
        if at > ends[key]:
            raise ValueError(
                f"[KVSPOOL_START_OFFSET_GREATER_THAN_END_OFFSET] {name(key)}: {start.option} gives {at}, and {end.option} {ends[key]}"
            )
    return {key: (at, ends[key]) for key, at in starts.items()}


def _of_offsets(side: Side, option: str, text: str, streaming: bool) -> Edge:
    wrong = LATEST if side == "starting" and not streaming else EARLIEST if side == "ending" else None
    word = next((word for word, sentinel in WORDS.items() if sentinel == wrong), "")
    if text.lower() in WORDS:
        if text.lower() == word:
            raise ValueError(f"[KVSPOOL_INVALID_OPTION] {side} offset can't be {word} for batch queries: option {option}")
        return Edge(option, WORDS[text.lower()])
    offsets = parse(_loaded(text, option), option, least=EARLIEST)
    for key, at in offsets.next.items():
        if at == wrong:
            raise ValueError(f"[KVSPOOL_INVALID_OPTION] {option}: {name(key)} can't be {word} ({wrong}) for batch queries")
    return Edge(option, offsets, "offsets")


def _strategy(given: Mapping[str, str]) -> str:
    option = "startingOffsetsByTimestampStrategy"
    strategy = given.get(option.lower(), "error").strip().lower()
    if strategy not in ("error", "latest"):
        raise ValueError(f"[KVSPOOL_INVALID_OPTION] option {option} is error or latest, not {_short(strategy)}")
    return strategy


def _milliseconds(text: str, option: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) or int(text) > LARGEST // 1_000_000:
        raise ValueError(f"[KVSPOOL_INVALID_OPTION] {option} is a time in milliseconds since 1970, not {_short(text)}")
    return int(text)


def _loaded(text: str, option: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"[KVSPOOL_INVALID_OFFSETS] {option} is JSON like {{\"topic\": {{\"0\": 23, \"1\": -2}}}}, not {_short(text)}: {error}"
        ) from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
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
