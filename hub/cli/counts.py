"""The statistics of a hub for its operator: read from its root, or from the page of a running server.

Times are ns since 1970, sizes bytes. Values that only a running server knows are None if read from a root.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from hub.errors import Malformed, Unreachable
from hub.protocol.status import HubStatus
from hub.root.root import ClientStats, HubRoot
from kvspool import KvspoolError

PATIENCE = 10.0  # seconds for a server's answer
LARGEST = 1 << 26  # largest answer, in bytes


class ShardCounts(msgspec.Struct, frozen=True):
    """A shard.

    generations: logs shipped to it, None if unreadable; lost: sequences that its client has declared lost since the server started; behind:
    records that only the client has; behind_is_estimate: it is silent, so that they are estimated from its last report and rate.
    """

    index: int
    generations: int | None
    first_sequence: int
    next_sequence: int
    records: int
    used: int
    last_timestamp: int
    lost: int | None = None
    behind: int | None = None
    behind_is_estimate: bool = False


class ClientCounts(msgspec.Struct, frozen=True):
    """A client. quota_bytes: limit of its stored bytes; 0 for none."""

    client: str
    bits: int
    shards: list[ShardCounts]
    connections: int | None = None
    quota_bytes: int | None = None

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def used(self) -> int:
        return sum(shard.used for shard in self.shards)

    @property
    def generations(self) -> int | None:
        """The largest number of logs shipped to one of its shards."""
        return max((shard.generations for shard in self.shards if shard.generations is not None), default=None)

    @property
    def lost(self) -> int | None:
        known = [shard.lost for shard in self.shards if shard.lost is not None]
        return sum(known) if known else None

    @property
    def behind(self) -> int | None:
        known = [shard.behind for shard in self.shards if shard.behind is not None]
        return sum(known) if known else None

    @property
    def behind_is_estimate(self) -> bool:
        return any(shard.behind_is_estimate for shard in self.shards)

    @property
    def last_timestamp(self) -> int:
        return max((shard.last_timestamp for shard in self.shards), default=0)


class ReaderCounts(msgspec.Struct, frozen=True):
    """A durable reader. lag: uncommitted records; None if its positions can't be read."""

    name: str
    lag: int | None


class HubCounts(msgspec.Struct, frozen=True):
    """A hub. source: origin of the statistics; troubles: failures of the server and damaged shards, a sentence each."""

    source: str
    clients: list[ClientCounts]
    readers: list[ReaderCounts]
    troubles: list[str] = []


class _Report(msgspec.Struct):
    """The required part of `/api/status`."""

    status: HubStatus | None
    failure: str = ""
    troubles: list[str] = []


def of_root(path: Path) -> HubCounts:
    """Read the statistics of a hub root, with or without a running server. Damaged shards are troubles."""
    troubles: list[str] = []
    with HubRoot.open(path) as root:
        clients = [_client(one) for one in root.stats(troubles).clients]
        readers = [ReaderCounts(one.name, None if one.lag is None else one.lag.records) for one in root.readers()]
    return HubCounts(str(path), clients, readers, troubles)


def of_page(url: str) -> HubCounts:
    """Ask a running server for its statistics. url: of its page. Raises Unreachable, and Malformed for an answer of another program."""
    url = url.rstrip("/")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/api/status", timeout=PATIENCE) as answer:
            data = answer.read(LARGEST + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:  # HTTPException: another protocol, as at the port for clients
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        words = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise Unreachable(f"{url} doesn't answer: {words}; is that the page printed by kvspool hub serve?") from None
    try:
        report = msgspec.json.decode(data[:LARGEST], type=_Report)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed(f"{url} is no page of a hub, or one of another version: {error}") from None
    if report.status is None:
        raise Unreachable(f"{url}: the hub has no status: {report.failure}")
    return _of_status(url, report.status, report.troubles)


def _of_status(source: str, status: HubStatus, troubles: list[str]) -> HubCounts:
    clients = [
        ClientCounts(
            one.client,
            one.bits,
            [
                ShardCounts(
                    shard.index,
                    shard.generation + 1,
                    shard.first_sequence,
                    shard.next_sequence,
                    shard.records,
                    shard.used,
                    shard.last_timestamp,
                    shard.lost,
                    None if shard.behind < 0 else shard.behind,
                    shard.behind_is_estimate,
                )
                for shard in one.shards
            ],
            one.connections,
            one.quota_bytes,
        )
        for one in status.clients
    ]
    return HubCounts(source, clients, [ReaderCounts(one.name, one.lag) for one in status.readers], troubles)


def _client(stats: ClientStats) -> ClientCounts:
    return ClientCounts(stats.client, stats.bits, [_shard(one) for one in stats.shards])


def _shard(stats: Any) -> ShardCounts:
    path = Path(stats.path)
    index = int(path.name[-3:], 16) if "." in path.name else 0
    return ShardCounts(
        index, generations(path), stats.first_sequence, stats.next_sequence, stats.records, stats.used, stats.last_timestamp
    )


def generations(shard: Path) -> int | None:
    """Return how many logs were shipped to a shard; None if that can't be read, or the extra `hub` is missing."""
    try:
        from hub.root.store import GENERATIONS, load_generations

        return len(load_generations(shard / GENERATIONS))
    except (ImportError, KvspoolError, OSError):
        return None
