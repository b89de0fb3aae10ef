"""Removes the oldest segments of a hub's clients, by the rules of `hub.root.retention`; readers of removed records get a Gap.

Only whole segments are removed, and never the last one of a shard. It has the end of the hub's records, so a client continues exactly
there. The bytes of a client are those of all its shards. While there are too many, the segment whose newest record is the oldest is
removed, in any shard. A segment that is held back stays, and no other is removed instead.

The floor of each shard is always held back. Without `force` in the rules, so are all records that a durable reader has yet to read. That is
a reader of the shard's own journal, or of the hub root.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec

from hub.root.catalogue import Catalogue
from hub.root.holds import RetentionHolds
from hub.root.retention import HubRetention, RetentionFile
from kvspool import system
from kvspool.engine import sizes
from kvspool.engine.retention import TrimPlan, TrimReport
from kvspool.errors import KvspoolError, LogNotFound
from kvspool.journal import Retention
from kvspool.journal.trim import AT_ONCE
from shard import route
from shard.merged import Log
from shard.shardset import open_shard

INTERVAL = 10.0  # seconds between two checks of all clients
WORK = 0.05  # seconds of one round of the keeper after which no other client is begun
TIMEOUT = 10.0  # seconds to wait for a shard's append lock
_logger = logging.getLogger("kvspool.hub")


class ShardTrim(msgspec.Struct, frozen=True):
    """The result for a shard, or the plan."""

    client: str
    shard: int
    report: TrimReport


class Trimmer:
    """Trims the shards of one root. Use it in one thread at a time."""

    def __init__(self, root: Path, catalogue: Catalogue | None = None) -> None:
        """catalogue: that of the root, if the caller has one."""
        self.root = root
        self._catalogue = catalogue
        self._holds = RetentionHolds(root)

    def trim(self, client: str, rules: Retention, *, dry_run: bool = False, most: int | None = None) -> list[ShardTrim]:
        """Apply rules to a client's shards; on disk on return. A spool frees space automatically, and is ignored.

        most: segments to remove at once per shard. Raises as `Journal.trim` and opening a shard: the shards before stay trimmed.
        """
        found = route.scan(self.root).get(client) if self._catalogue is None else self._catalogue.client(client)
        paths = {} if found is None else dict(found.paths(self.root))
        plans = {index: plan for index, path in paths.items() if (plan := _plan(path)) is not None}
        limits, words, before = msgspec.structs.replace(rules, max_bytes=None), "", dict.fromkeys(plans, 0)
        if rules.max_bytes is not None:
            used = sum(one.bytes for plan in plans.values() for one in plan.segments)
            words = f"{client} has {sizes.show(used)}, but {sizes.show(rules.max_bytes)} is the limit"
            before = beginnings(plans, rules.max_bytes)
        done = []
        for index in plans:
            report = self._trim(client, index, paths[index], limits, before[index], dry_run, most)
            if report is not None:
                done.append(ShardTrim(client, index, _explained(report, before[index], words)))
        return done

    def _trim(
        self, client: str, index: int, path: Path, limits: Retention, before: int, dry_run: bool, most: int | None
    ) -> TrimReport | None:
        with _journal(path) as journal:
            if journal is None:
                return None
            readers = partial(self._readers, client, index, journal)
            trim = partial(journal.trim, limits, before=before, most=most, timeout=TIMEOUT, elsewhere=readers)
            would = trim(dry_run=True)
            return trim() if would.removed_segments and not dry_run else msgspec.structs.replace(would, dry_run=dry_run)

    def _readers(self, client: str, index: int, journal: Log) -> dict[str, int]:
        return {f"hub:{name}": sequence for name, sequence in self._holds.places(client, index, journal).items()}


def _plan(path: Path) -> TrimPlan | None:
    """Return the segments of a shard; None if it is no journal."""
    with _journal(path) as journal:
        return None if journal is None else journal.trim(Retention(), before=0, dry_run=True).plan


@contextmanager
def _journal(path: Path) -> Iterator[Log | None]:
    """Open a shard inside the `with` block; None if it was removed, or is no journal."""
    try:
        log = open_shard(path, TIMEOUT)
    except LogNotFound:
        yield None
        return
    with log:
        yield log if "trim" in log.capabilities else None


def beginnings(plans: dict[int, TrimPlan], most: int) -> dict[int, int]:
    """Return the sequence up to which to trim each shard, so that all of them together keep at most `most` bytes."""
    total = sum(one.bytes for plan in plans.values() for one in plan.segments)
    before = dict.fromkeys(plans, 0)
    sealed = []
    for index, plan in plans.items():
        newest = accumulate((one.newest for one in plan.segments[:-1]), max)  # times may go back; segments are removed in order
        sealed += [(time, index, one.base + one.records, one.bytes) for time, one in zip(newest, plan.segments, strict=False)]
    for _, index, end, size in sorted(sealed):
        if total <= most:
            break
        before[index] = end
        total -= size
    return before


def _explained(report: TrimReport, before: int, words: str) -> TrimReport:
    """Return a report with the reason, if a segment is removed because of the client's bytes."""
    segments = [
        msgspec.structs.replace(one, why=words) if one.goes and one.base + one.records <= before else one for one in report.plan.segments
    ]
    return msgspec.structs.replace(report, plan=msgspec.structs.replace(report.plan, segments=segments))


class Keeper:
    """Applies the rules of a root to all its clients repeatedly, a few at a time. `round` is called from time to time, by one thread.

    `error`: the error of the last pass; empty for none. `removed` counts bytes.
    """

    def __init__(
        self,
        root: Path,
        used: Callable[[], dict[str, int]],
        catalogue: Catalogue | None = None,
        has_sealed: Callable[[str], bool] = lambda client: True,
    ) -> None:
        """used: returns the stored bytes of each client, as far as known. has_sealed: whether a client may have more than the last
        segment of each shard, which is never removed; other clients are passed without a look at their files.
        """
        self.error = ""
        self.removed = 0
        self._used = used
        self._has_sealed = has_sealed
        self._trimmer = Trimmer(root, catalogue)
        self._file = RetentionFile(root)
        self._rules = HubRetention()
        self._waiting: deque[str] = deque()
        self._errors: dict[str, str] = {}  # by client; "" for the file
        self._begins_at = 0.0

    def round(self) -> None:
        """Check some clients, and trim them if necessary."""
        began = system.port.monotonic()
        if not self._waiting and began >= self._begins_at:
            self._begins_at = began + INTERVAL
            self._begin()
        while self._waiting and system.port.monotonic() - began < WORK:
            client = self._waiting.popleft()
            with self._noting(client):
                if self._trim(client):
                    self._waiting.append(client)
        self.error = next(iter(self._errors.values()), "")

    def _begin(self) -> None:
        """Begin a pass over all clients that might be trimmed."""
        with self._noting(""):
            self._rules = self._file.load()
        used = self._used()
        self._errors = {client: words for client, words in self._errors.items() if not client or client in used}
        may_go = (client for client, size in used.items() if _may_go(self._rules.of(client), size))
        self._waiting.extend(client for client in may_go if self._has_sealed(client))

    def _trim(self, client: str) -> bool:
        """Trim a client. Return whether more is to be done at once."""
        rules = self._rules.of(client)
        if rules is None:
            return False
        done = self._trimmer.trim(client, rules, most=AT_ONCE)
        for one in done:
            if one.report.removed_segments:
                size = sizes.show(one.report.removed_bytes)
                self.removed += one.report.removed_bytes
                _logger.info("%s shard %d: trimmed to sequence %d, %s", client, one.shard, one.report.first_sequence, size)
            for reader in one.report.left_behind:
                _logger.warning("%s shard %d: %s loses %d to %d", client, one.shard, reader.name, reader.first, reader.last)
        return any(one.report.removed_segments >= AT_ONCE for one in done)

    @contextmanager
    def _noting(self, client: str) -> Iterator[None]:
        """Store an error inside the `with` block, and log it once."""
        try:
            yield
        except (KvspoolError, OSError, ValueError) as error:
            words = f"retention{f' of {client}' if client else ''} failed: {error}"
            if self._errors.get(client) != words:
                _logger.error("%s", words)
            self._errors[client] = words
        else:
            self._errors.pop(client, None)


def _may_go(rules: Retention | None, used: int) -> bool:
    """Return whether a client with so many stored bytes might be trimmed."""
    if rules is None or not rules.has_limit:
        return False
    return rules.max_age is not None or rules.by_consumers or (rules.max_bytes is not None and used > rules.max_bytes)
