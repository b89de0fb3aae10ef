"""Check everything under a hub root for damage, with or without a running hub.

**No false alarms.** No lock is taken. Apparent damage that a running server may cause is checked again before it counts, and removed files
don't count.
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
from kvspool.options import Progress
from shard import route
from shard.errors import ShardError
from shard.merged import Log
from shard.shardset import open_shard

try:
    from hub.root.store import GENERATIONS, PRIVATE, load_generations
except ModuleNotFoundError as error:
    raise MissingExtra.of("hub", "a hub's shards are checked with the package pyarrow", error) from error

TIMEOUT = 10.0  # seconds to wait for a lock, if a log needs one to be opened
OF_THE_HUB = (GENERATIONS, f"{GENERATIONS}.tmp", "mirror.json")  # a hub's own files in a shard's directory
AGAIN = 0.2  # seconds until apparent damage is checked again
Matches = Callable[[str], bool]


class ShardReport(msgspec.Struct, frozen=True):
    """A shard. problems: those other than in the report of its log, which is None if the log can't be opened."""

    client: str
    shard: int
    report: VerifyReport | None
    problems: list[str]

    @property
    def is_sound(self) -> bool:
        """Return whether there is no damage."""
        return self.report is not None and self.report.is_sound and not self.problems


class Audit:
    """One check of a root: of each shard of `paths` with `look`, and of the rest with `problems`."""

    def __init__(self, root: Path, matches: Matches = lambda client: True) -> None:
        """matches: selects the clients. Raises LogNotFound, NotALog."""
        with HubRoot.open(root) as opened:
            self.root = opened.path
        self._matches = matches

    def problems(self) -> list[str]:
        """Return the problems of the readers' positions, the retention rules, and the names of shards, as sentences."""
        found = list(self._problems())
        if found:
            system.port.sleep(AGAIN)
            again = set(self._problems())
            found = [words for words in found if words in again]
        return found

    def paths(self) -> list[tuple[str, int, Path]]:
        """Return client, index and path of each selected shard."""
        found = []
        for client, shards in self._found():
            for bits, indexes in shards.indexes.items():
                found += [(client, index, self.root / route.directory_name(client, bits, index)) for index in indexes if index < 1 << bits]
        return sorted(found)

    def look(self, client: str, index: int, path: Path, progress: Progress) -> ShardReport | None:
        """Check every record of a shard; None if it was removed."""
        try:
            with open_shard(path, TIMEOUT) as log:
                report = _without_ours(log.verify(progress))
                return ShardReport(client, index, report, list(_generations(path, log)))
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
    """Yield the problems of a shard's table of generations."""
    try:
        found = load_generations(path / GENERATIONS)
    except KvspoolError as error:
        yield str(error)
        return
    end = log.end()
    if found and found[-1].base > end:
        yield f"{path / GENERATIONS} has a log that begins at sequence {found[-1].base}, but the journal ends at {end}: it has lost records"


def _without_ours(report: VerifyReport) -> VerifyReport:
    """Return a report without the names of a hub's own files next to a journal."""
    return msgspec.structs.replace(report, foreign=[name for name in report.foreign if name not in OF_THE_HUB])
