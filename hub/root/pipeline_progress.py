"""The progress of a pipeline in a small file: written by the pipeline, read by `kvspool pipeline status` and by a hub for its page.

    .[sink]/progress.json                    always
    [hub root]/.hub/pipelines/[name].json    as well, if the source is a hub root of this host

Readers treat it as hostile until it is checked: it is in a folder that other users may write to.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from kvspool import system
from kvspool.system import disk, documents

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LARGEST = 1 << 20  # bytes of such a file
MOST = 100  # pipelines shown per hub root
MOST_LOOKED_AT = 10 * MOST  # files examined per hub root
SILENT = 30.0  # seconds without an update after which a running pipeline counts as dead
_SUFFIX = ".json"

State = Literal["starting", "running", "stopped", "done", "failed"]


class ShardProgress(msgspec.Struct, frozen=True):
    """A shard of the source: the next sequence to read, and its end as far as the query knows; -1 if it doesn't."""

    topic: str
    partition: int
    next: int
    end: int

    @property
    def lag(self) -> int:
        """Unread records; -1 if unknown."""
        return max(0, self.end - self.next) if self.end >= 0 else -1


class PipelineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline's progress. Times are ns since 1970, durations ms; rate: records per second of the last batch with records.

    away: the hubs of its source that don't answer, each with since when.
    """

    name: str
    job: str
    sink: str
    state: State
    pid: int
    started: int
    updated: int
    batch: int = -1
    batch_ended: int = 0  # time of the last batch's end; 0 before the first
    records: int = 0  # read since the start
    batch_records: int = 0  # of the last batch
    bad: int = 0  # could not be decoded, since the start
    late: int = 0  # rows later than the watermark, in no window, since the start; as Spark counts them
    rate: float = 0.0
    lag: int = -1
    durations: dict[str, int] = {}
    shards: tuple[ShardProgress, ...] = ()
    away: dict[str, str] = {}
    error: str = ""

    @property
    def is_live(self) -> bool:
        """Whether the file says that it is running."""
        return self.state in ("starting", "running")

    def is_silent(self, now: int) -> bool:
        """Return whether an update is overdue: its process has ended or hangs."""
        return self.is_live and now - self.updated > SILENT * 1e9


def write(path: Path, progress: PipelineProgress) -> None:
    """Replace the file atomically. Raises the system's OSError."""
    disk.replace(path, msgspec.json.encode(progress), 0o600)


def read(path: Path) -> PipelineProgress:
    """Return the content of a file. Raises ValueError for a file that no pipeline wrote, and the system's OSError."""
    try:
        return check(documents.from_json(documents.read(path, LARGEST), PipelineProgress))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check(progress: PipelineProgress) -> PipelineProgress:
    """Return the progress. Raises ValueError for impossible values."""
    numbers = [progress.started, progress.updated, progress.batch_ended, progress.records, progress.batch_records]
    numbers += [progress.bad, progress.late]
    if not NAME.fullmatch(progress.name):
        raise ValueError(f"{progress.name[:100]!r} is no name of a pipeline")
    if min(numbers) < 0 or max(numbers) >= 1 << 63 or not (math.isfinite(progress.rate) and progress.rate >= 0):
        raise ValueError("it has an impossible number")
    mostly_known = [progress.batch, progress.lag]  # or -1
    for shard in progress.shards:
        mostly_known += [shard.partition, shard.next, shard.end]
    numbers = [number + 1 for number in mostly_known] + list(progress.durations.values())
    if min(numbers) < 0 or max(numbers) >= 1 << 63:
        raise ValueError("it has an impossible number")
    return progress


def path_in(root: Path, name: str) -> Path:
    """Return the path of a pipeline's progress in the hub root that it reads."""
    return directory_of(root) / f"{name}{_SUFFIX}"


def directory_of(root: Path) -> Path:
    """Return the directory with the progress of pipelines in a hub root."""
    return root / ".hub" / "pipelines"


def make_directory(root: Path) -> None:
    """Create that directory, accessible only to its owner. Raises the system's OSError."""
    for part in (directory_of(root).parent, directory_of(root)):
        with suppress(FileExistsError):
            system.port.make_directory(part)


def all_of(root: Path) -> list[PipelineProgress]:
    """Return the progress of the pipelines that read a hub root, up to `MOST`, by name; files of other programs are ignored.

    If there are impossibly many files, some are ignored.
    """
    try:
        names = system.port.names(directory_of(root))
    except OSError:
        return []
    stems = sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    found: list[PipelineProgress] = []
    for stem in [stem for stem in stems if NAME.fullmatch(stem)][:MOST_LOOKED_AT]:
        with suppress(OSError, ValueError):
            progress = read(path_in(root, stem))
            if progress.name == stem and len(found) < MOST:
                found.append(progress)
    return found
