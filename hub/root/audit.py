"""Look at everything under a hub root, and say what is damaged, while a hub serves it or not.

**No false alarms.** No lock is taken. What a server may be at work on is looked at again before it counts, and what was removed in the
meantime doesn't.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hub.client_ids import check_client
from hub.root import positions, retention
from hub.root.root import HubRoot
from kvspool import VerifyReport, system
from kvspool.errors import KvspoolError, LogNotFound, MissingExtra
from kvspool.journal import Journal
from kvspool.journal.verify import JournalVerifyReport
from kvspool.spool.verify import Progress
from shard import route
from shard.errors import ShardError
from shard.shardset import Log, open_shard

try:
    from hub.root.store import GENERATIONS, PRIVATE, load_generations
except ModuleNotFoundError as error:
    raise MissingExtra(f"a hub's shards are checked with the package pyarrow ({error}); pip install 'kvspool[hub]'") from error

TIMEOUT = 10.0  # seconds to wait for a lock, where a log needs one to be opened
BESIDE = (GENERATIONS, f"{GENERATIONS}.tmp", "mirror.json")  # what a hub puts into a shard's directory
AGAIN = 0.2  # seconds after which what looks wrong is looked at again
Matches = Callable[[str], bool]


class ShardReport(msgspec.Struct, frozen=True):
    """A shard. problems: what is wrong with it besides what the report of its log says, which is None where it can't be opened."""

    client: str
    shard: int
    report: VerifyReport | JournalVerifyReport | None
    problems: list[str]

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is wrong."""
        return self.report is not None and self.report.is_sound and not self.problems


class Audit:
    """One look at a root: at each shard of `paths` with `look`, and at the rest with `problems`."""

    def __init__(self, root: Path, matches: Matches = lambda client: True) -> None:
        """matches: whose shards to look at. Raises LogNotFound, NotALog."""
        with HubRoot.open(root) as opened:
            self.root = opened.path
        self._matches = matches

    def problems(self) -> list[str]:
        """Return what is wrong with the readers' places, the rules of retention, and the names of shards, in sentences."""
        found = list(self._problems())
        if found:
            system.port.sleep(AGAIN)
            again = set(self._problems())
            found = [words for words in found if words in again]
        return found

    def paths(self) -> list[tuple[str, int, Path]]:
        """Return client, index and path of each shard that is to be looked at."""
        found = []
        for client, shards in self._found():
            for bits, indexes in shards.indexes.items():
                found += [(client, index, self.root / route.directory_name(client, bits, index)) for index in indexes if index < 1 << bits]
        return sorted(found)

    def look(self, client: str, index: int, path: Path, progress: Progress) -> ShardReport | None:
        """Look at every record of a shard; None if it is gone."""
        try:
            with open_shard(path, TIMEOUT) as log:
                report = _without_ours(log.verify(progress))
                return ShardReport(client, index, report, list(_generations(path, log)) if isinstance(log, Journal) else [])
        except LogNotFound:
            return None
        except (KvspoolError, OSError) as error:
            return ShardReport(client, index, None, [str(error)]) if os.path.lexists(path) else None

    def _found(self) -> Iterator[tuple[str, route.ShardDirectories]]:
        for client, found in route.scan(self.root).items():
            try:
                check_client(client)
            except ValueError:
                continue
            if self._matches(client):
                yield client, found

    def _problems(self) -> Iterator[str]:
        for _, found in self._found():
            try:
                if not found.is_being_made:
                    found.check_complete(self.root)
            except ShardError as error:
                yield str(error)
        for name in positions.names(self.root):
            try:
                positions.load(positions.path_of(self.root, name))
            except KvspoolError as error:
                yield str(error)
        try:
            retention.load(self.root)
        except (KvspoolError, OSError) as error:
            yield str(error)
        status = system.port.look_up(self.root / PRIVATE)
        if status is not None and status.st_mode & 0o022:
            yield f"{self.root / PRIVATE} can be written by others (mode {status.st_mode & 0o777:o}); chmod 700 it"


def _generations(path: Path, log: Log) -> Iterator[str]:
    """Yield what is wrong with the table of generations of a shard."""
    try:
        found = load_generations(path / GENERATIONS)
    except KvspoolError as error:
        yield str(error)
        return
    end = log.stats().next_sequence
    if found and found[-1].base > end:
        yield f"{path / GENERATIONS} has a log that begins at sequence {found[-1].base}, but the journal ends at {end}: it has lost records"


def _without_ours(report: VerifyReport | JournalVerifyReport) -> VerifyReport | JournalVerifyReport:
    """Return a report without those names that a hub puts beside a journal."""
    if not isinstance(report, JournalVerifyReport):
        return report
    return msgspec.structs.replace(report, foreign=[name for name in report.foreign if name not in BESIDE])
