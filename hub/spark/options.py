"""The options of a read, batch or stream: parsed and checked in one place. Names and meanings are those of Kafka's source.

Names are case-insensitive, values are text. An unknown, wrong or contradictory option raises ValueError with its name and its valid
values; the message never repeats a token. One precedence where Kafka has several: a timestamp for all shards, then timestamps of single
shards, then offsets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hub.client import hubs
from hub.spark.naming import named
from hub.spark.offsets import EARLIEST, LARGEST, LATEST, Bound, parse_text
from hub.spark.selection import ALL, Selection
from hub.spark.shards import ShardKey
from kvspool.journal.offsets import check_name
from kvspool.options import Isolation
from shard import route

if TYPE_CHECKING:
    from hub.client.connection import Security

NANOSECONDS = 1_000_000  # per millisecond, the unit of times in Kafka's options
LATEST_TIME = LARGEST // NANOSECONDS  # a time in 2262
TOKEN = "KVSPOOL_TOKEN"  # the environment variable

NAMES = (
    "path",
    "hub",
    "token",
    "tokenFile",
    "caFile",
    "certificateFile",
    "keyFile",
    "hubTimeout",
    "localRoot",
    "subscribe",
    "subscribePattern",
    "assign",
    "prefix",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "groupId",
    "kafka.group.id",
    "isolation",
    "filterPushdown",
)
STARTING = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
ENDING = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
OF_STREAMS = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "groupId", "kafka.group.id")
SECURITY = ("token", "tokenFile", "caFile", "certificateFile", "keyFile")
OF_HUBS = (*SECURITY, "hubTimeout", "localRoot")

_REFUSED = {
    "kafka.bootstrap.servers": "there is no broker: load(path) reads logs of this host, option hub reads from hub servers",
    "includeheaders": "records have no headers; leave it out",
    "groupidprefix": "no names of consumer groups are generated; groupId names the durable reader, if you want one",
    "kafkaconsumer.polltimeoutms": "nothing is polled here; leave it out",
    "fetchoffset.numretries": "offsets are found without requests; leave it out",
    "fetchoffset.retryintervalms": "offsets are found without requests; leave it out",
    "kafkaconsumer.": "there is no consumer here; leave it out",
    "kafka.security.": "use caFile, and tokenFile or certificateFile and keyFile, with option hub",
    "kafka.sasl.": "use tokenFile, or certificateFile and keyFile, with option hub",
    "kafka.ssl.": "use caFile, and certificateFile and keyFile, with option hub",
    "kafka.": "it configures a client of Kafka, which is not used; leave it out",
}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]{1,12})\s*([a-z]*)")


@dataclass(frozen=True)
class Credentials:
    """Credentials for a hub, and trusted authorities: files, and perhaps a token. `load` reads them on the calling host."""

    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def load(self) -> Security:
        """Return the settings of a connection. Without `token` or `tokenFile`, the environment variable KVSPOOL_TOKEN is the token.

        Raises OSError, and AccessError for a token or key that other users may read.
        """
        from hub.client.connection import Security
        from hub.security.private import WatchedFile
        from hub.security.tokens import Token

        def content(path: Path | None, is_secret: bool) -> bytes | None:
            return None if path is None else WatchedFile(path, is_secret=is_secret).read()

        token = self.token if self.token_file is None else Token.read(self.token_file).reveal()
        return Security(
            token=(token or os.environ.get(TOKEN) or "").strip() or None,
            authorities=content(self.ca_file, False),
            certificate=content(self.certificate_file, False),
            key=content(self.key_file, True),
        )


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read, with their defaults.

    path: a log or a root of shards on this host. hubs: locations of hub servers, or of groups such as `h1|h2`; either these or a path.
    hub_timeout: longest outage of a
    hub, in seconds. local_root: a hub's root, for tasks on its own host. selection: of shards. starting, ending: see `Bound`.
    is_lenient_on_time: a shard without a record at or after `startingTimestamp` is read from its end, without an error. fail_on_data_loss:
    records lost before they were read fail the query. min_partitions: tasks at least; max_records: of one task. max_offsets, min_offsets,
    max_delay (seconds): of a micro-batch. reader: the durable reader that a stream moves. isolation: whether records that are not on disk
    yet count. push_filters: None if not given.
    """

    path: Path | None = None
    hubs: tuple[str, ...] = ()
    hub_timeout: float = 60.0
    local_root: Path | None = None
    credentials: Credentials = Credentials()
    selection: Selection = ALL
    starting: Bound = Bound()
    ending: Bound = Bound()
    is_lenient_on_time: bool = False
    fail_on_data_loss: bool = True
    min_partitions: int | None = None
    max_records: int | None = None
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay: float = 900.0
    reader: str | None = None
    isolation: Isolation = "appended"
    push_filters: bool | None = None
    given: frozenset[str] = frozenset()  # names, as in NAMES

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        """Return the options of a read. Raises ValueError for an option that is unknown, missing, wrong or contradicts another one."""
        options = named(given, NAMES, _REFUSED, "format kvspool")
        selection = _selection(options)
        names = frozenset(options)
        path, locations = options.get("path"), options.get("hub")
        if not path and not locations:
            raise ValueError("a path is missing: load(path), of a log or of a root of shards; or option hub, for hub servers")
        _exclude(options, "path", "hub")
        if not locations and names.intersection(OF_HUBS):
            raise ValueError(f"option {min(names.intersection(OF_HUBS))} is for hub servers; option hub is missing")
        found = cls(
            path=local_path(path) if path else None,
            hubs=_locations(locations) if locations else (),
            hub_timeout=_seconds(options, "hubTimeout", "60s"),
            local_root=local_path(options["localRoot"]) if "localRoot" in options else None,
            credentials=_credentials(options),
            selection=selection,
            starting=_bound(options, *STARTING),
            ending=_bound(options, *ENDING),
            is_lenient_on_time=choice(options, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
            fail_on_data_loss=_boolean(options, "failOnDataLoss") is not False,
            min_partitions=_positive(options, "minPartitions"),
            max_records=_positive(options, "maxRecordsPerPartition"),
            max_offsets=_positive(options, "maxOffsetsPerTrigger"),
            min_offsets=_positive(options, "minOffsetsPerTrigger"),
            max_delay=_seconds(options, "maxTriggerDelay", "15m"),
            reader=_reader(options),
            isolation=_isolation(options),
            push_filters=_boolean(options, "filterPushdown"),
            given=names,
        )
        if found.max_offsets is not None and found.min_offsets is not None and found.min_offsets > found.max_offsets:
            raise ValueError(f"option minOffsetsPerTrigger, {found.min_offsets}, is more than maxOffsetsPerTrigger, {found.max_offsets}")
        return found

    def for_batch(self) -> ReadOptions:
        """Return the options of a batch read, by default from the earliest records to the latest.

        Raises ValueError for options of streams, and for an empty range.
        """
        for name in OF_STREAMS:
            if name in self.given:
                raise ValueError(f"option {name} is for streams: spark.readStream; leave it out of a batch query")
        if _has(self.starting, LATEST):
            raise ValueError("option startingOffsets can't be latest (-1) in a batch query, which would read nothing")
        if _has(self.ending, EARLIEST):
            raise ValueError("option endingOffsets can't be earliest (-2), which would read nothing")
        return replace(self, starting=_or(self.starting, EARLIEST), ending=_or(self.ending, LATEST))

    def for_stream(self) -> ReadOptions:
        """Return the options of a stream, which by default begins at the latest records. Raises ValueError for options of batch queries."""
        for name in ENDING:
            if name in self.given:
                what = "offset" if name == "endingOffsets" else "timestamp"
                raise ValueError(f"option {name}: ending {what} not valid in streaming queries; use Trigger.AvailableNow")
        if self.push_filters:
            raise ValueError("option filterPushdown is for batch queries: Spark pushes no filters into a stream")
        return replace(self, starting=_or(self.starting, LATEST))


def _or(bound: Bound, everywhere: int) -> Bound:
    return bound if bound.is_given else Bound(everywhere=everywhere)


def _has(bound: Bound, edge: int) -> bool:
    return bound.everywhere == edge or (bound.offsets is not None and edge in bound.offsets.next.values())


def _exclude(options: Mapping[str, str], *names: str) -> None:
    both = [name for name in names if name in options]
    if len(both) > 1:
        raise ValueError(f"options {' and '.join(both)} exclude each other: give one")


def local_path(text: str) -> Path:
    """Return a path of this host; Spark may pass a file: URL. Raises ValueError."""
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    elif "://" in text:
        raise ValueError(f"path {text!r} is not on this host; format kvspool reads local paths, and hub servers with option hub")
    return Path(os.path.abspath(text))


def _locations(text: str) -> tuple[str, ...]:
    """Return the hubs of the option; a group of hubs with the same clients is `h1|h2`."""
    groups = []
    for group in text.split(","):
        names = [name.strip() for name in group.split("|")]
        groups.append([f"grpc+tls://{one.removeprefix('hub://')}" if one.startswith("hub://") else one for one in names])
    try:
        for location in (one for group in groups for one in group):
            hubs.check(location)
    except ValueError as error:
        raise ValueError(f"option hub: {error}; hubs with the same clients are separated by |, others by commas") from None
    if len({one for group in groups for one in group}) < sum(map(len, groups)):
        raise ValueError("option hub names a location twice")
    return tuple("|".join(group) for group in groups)


def _credentials(options: Mapping[str, str]) -> Credentials:
    _exclude(options, "token", "tokenFile")
    if ("certificateFile" in options) != ("keyFile" in options):
        raise ValueError("options certificateFile and keyFile go together")
    files = (Path(options[name]) if name in options else None for name in SECURITY[1:])
    return Credentials(options.get("token"), *files)


def _selection(options: Mapping[str, str]) -> Selection:
    _exclude(options, "subscribe", "subscribePattern", "assign", "prefix")
    if "prefix" in options:
        return Selection(topics=_topics("prefix", [options["prefix"]]))
    if "subscribe" in options:
        topics = [topic.strip() for topic in options["subscribe"].split(",")]
        if "" in topics:
            raise ValueError(f"option subscribe is names separated by commas, not {options['subscribe']!r}")
        return Selection(topics=_topics("subscribe", topics))
    if "subscribePattern" in options:
        try:
            re.compile(options["subscribePattern"])
        except re.error as error:
            raise ValueError(f"option subscribePattern is a regular expression, not {options['subscribePattern']!r}: {error}") from None
        return Selection(pattern=options["subscribePattern"])
    if "assign" in options:
        return Selection(shards=_assigned(options["assign"]))
    return ALL


def _topics(name: str, topics: list[str]) -> frozenset[str]:
    for topic in topics:
        try:
            route.check_prefix(topic)
        except ValueError as error:
            raise ValueError(f"option {name}: {error}") from None
    return frozenset(topics)


def _assigned(text: str) -> frozenset[ShardKey]:
    message = f'option assign is JSON such as {{"topic": [0, 1]}}, not {text!r}'
    shards: set[ShardKey] = set()
    for topic, partitions in _json(text, message).items():
        if not isinstance(partitions, list) or not all(_is_number(one, 0) for one in partitions):
            raise ValueError(message)
        shards.update(ShardKey(topic, partition) for partition in partitions)
    if not shards:
        raise ValueError(message)
    return frozenset(shards)


def _bound(options: Mapping[str, str], offsets: str, timestamp: str, timestamps: str) -> Bound:
    """Return the bound of the three options; each is checked, even if another one has precedence."""
    time = _whole(options, timestamp, 0, "ms since 1970", LATEST_TIME)
    times = parse_text(options[timestamps], f"option {timestamps}").next if timestamps in options else None
    if any(one > LATEST_TIME for one in (times or {}).values()):
        raise ValueError(f"option {timestamps} needs times in ms since 1970, not {options[timestamps]!r}")
    word = options.get(offsets, "").strip().lower()
    if word in ("earliest", "latest"):
        everywhere, places = (EARLIEST if word == "earliest" else LATEST), None
    else:
        known = f"option {offsets}, if it is neither earliest nor latest,"
        everywhere, places = None, parse_text(options[offsets], known, EARLIEST) if offsets in options else None
    return Bound(
        timestamp=None if time is None else time * NANOSECONDS,
        timestamps=None if times is None else {key: value * NANOSECONDS for key, value in times.items()},
        offsets=places,
        everywhere=everywhere,
    )


def _json(text: str, message: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(message) from None
    if not isinstance(found, dict):
        raise ValueError(message)
    return found


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _whole(options: Mapping[str, str], name: str, least: int, kind: str, most: int = LARGEST) -> int | None:
    if name not in options:
        return None
    text = options[name].strip()
    if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= most:
        raise ValueError(f"option {name} is {kind}, not {options[name]!r}")
    return int(text)


def _positive(options: Mapping[str, str], name: str) -> int | None:
    return _whole(options, name, 1, "a number, at least 1")


def _boolean(options: Mapping[str, str], name: str) -> bool | None:
    if name not in options:
        return None
    if options[name].lower() not in ("true", "false"):
        raise ValueError(f"option {name} is true or false, not {options[name]!r}")
    return options[name].lower() == "true"


def choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """Return the value of an option that is one of a few words; the first one if it is missing. Raises ValueError."""
    chosen = options.get(name, choices[0]).lower()
    if chosen not in choices:
        raise ValueError(f"option {name} is one of {', '.join(choices)}, not {options[name]!r}")
    return chosen


def _isolation(options: Mapping[str, str]) -> Literal["appended", "synced"]:
    return "synced" if choice(options, "isolation", ("appended", "synced")) == "synced" else "appended"


def _seconds(options: Mapping[str, str], name: str, default: str) -> float:
    """Return a duration in Spark's notation: a number with a unit, or of milliseconds."""
    match = _DURATION.fullmatch(options.get(name, default).strip().lower())
    unit = None if match is None else _UNITS.get(match[2] or "ms")
    if match is None or unit is None:
        raise ValueError(f"option {name} is a duration such as 30s, 15m or 1h, not {options[name]!r}")
    return int(match[1]) * unit


def _reader(options: Mapping[str, str]) -> str | None:
    names = {options[name] for name in ("groupId", "kafka.group.id") if name in options}
    if len(names) > 1:
        raise ValueError("options groupId and kafka.group.id name different readers: give one")
    for name in names:
        try:
            return check_name(name)
        except ValueError as error:
            raise ValueError(f"option groupId: {error}") from None
    return None


