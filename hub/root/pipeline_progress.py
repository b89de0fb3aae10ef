"""How far a pipeline is, in a small file: written by the pipeline, read by `kvspool pipeline status` and by a hub for its page.

    .[sink]/progress.json                    always
    [hub root]/.hub/pipelines/[name].json    besides, if the source is a hub root of this host

Whoever reads one takes it for hostile until it is checked: it lies in a folder that others may write to.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from kvspool import disk, documents, system

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LARGEST = 1 << 20  # bytes of such a file
MOST = 100  # pipelines of a hub root that are shown
MOST_LOOKED_AT = 10 * MOST  # files of a hub root
SILENT = 30.0  # seconds without a word after which one that runs is taken for dead
_SUFFIX = ".json"

State = Literal["starting", "running", "stopped", "done", "failed"]


class ShardProgress(msgspec.Struct, frozen=True):
    """A shard of the source: the next sequence to be read, and where it ends as far as the query knows; -1 if it doesn't."""

    topic: str
    partition: int
    next: int
    end: int

    @property
    def lag(self) -> int:
        """Records that are left; -1 if that isn't known."""
        return max(0, self.end - self.next) if self.end >= 0 else -1


class PipelineProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline at a moment. Times are ns since 1970, durations ms; rate is records a second of the last batch that had any."""

    name: str
    job: str
    sink: str
    state: State
    pid: int
    started: int
    updated: int
    batch: int = -1
    batch_ended: int = 0  # when the last batch did; 0 before the first
    records: int = 0  # read since it started
    batch_records: int = 0  # of the last batch
    bad: int = 0  # that could not be decoded, since it started
    late: int = 0  # rows that came behind the watermark and are in no window, since it started; as Spark counts them
    rate: float = 0.0
    lag: int = -1
    durations: dict[str, int] = {}
    shards: tuple[ShardProgress, ...] = ()
    error: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it says that it works."""
        return self.state in ("starting", "running")

    def is_silent(self, now: int) -> bool:
        """Return whether it should have said something by now, and hasn't: its process is gone or hangs."""
        return self.is_live and now - self.updated > SILENT * 1e9


def write(path: Path, progress: PipelineProgress) -> None:
    """Replace the file: who reads it finds the old words or the new ones. Raises the system's OSError."""
    disk.replace(path, msgspec.json.encode(progress), 0o600)


def read(path: Path) -> PipelineProgress:
    """Return what a file says. Raises ValueError for what no pipeline wrote, and the system's OSError."""
    try:
        return check(documents.from_json(documents.read(path, LARGEST), PipelineProgress))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check(progress: PipelineProgress) -> PipelineProgress:
    """Return it, or raise ValueError for figures that can't be."""
    numbers = [progress.started, progress.updated, progress.batch_ended, progress.records, progress.batch_records]
    numbers += [progress.bad, progress.late]
    if not NAME.fullmatch(progress.name):
        raise ValueError(f"{progress.name[:100]!r} is no name of a pipeline")
    if min(numbers) < 0 or max(numbers) >= 1 << 63 or not (math.isfinite(progress.rate) and progress.rate >= 0):
        raise ValueError("it has a figure that can't be")
    mostly_known = [progress.batch, progress.lag]  # or -1
    for shard in progress.shards:
        mostly_known += [shard.partition, shard.next, shard.end]
    numbers = [number + 1 for number in mostly_known] + list(progress.durations.values())
    if min(numbers) < 0 or max(numbers) >= 1 << 63:
        raise ValueError("it has a figure that can't be")
    return progress


def path_in(root: Path, name: str) -> Path:
    """Return where a pipeline's progress lies in the hub root that it reads."""
    return directory_of(root) / f"{name}{_SUFFIX}"


def directory_of(root: Path) -> Path:
    """Return where the progress of pipelines lies in a hub root."""
    return root / ".hub" / "pipelines"


def make_directory(root: Path) -> None:
    """Make that directory, with rights for its owner alone. Raises the system's OSError."""
    for part in (directory_of(root).parent, directory_of(root)):
        with suppress(FileExistsError):
            system.port.make_directory(part)


def all_of(root: Path) -> list[PipelineProgress]:
    """Return the progress of the pipelines that read a hub root, up to `MOST`, by their names; what no pipeline wrote is left out.

    Of so many files as no root has, some are not looked at.
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
