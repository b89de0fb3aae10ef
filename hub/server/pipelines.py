"""The pipelines that read a hub root, as its server knows them from their progress files in the root."""

from __future__ import annotations

from pathlib import Path

from hub.protocol.status import PipelineStatus
from hub.root import pipeline_progress
from hub.root.pipeline_progress import PipelineProgress
from kvspool import system
from kvspool.system.pauses import Interval

INTERVAL = 1.0  # seconds between two checks
LONGEST_ERROR = 500  # characters


class Pipelines:
    """`statuses` is the result of the last check. `look` is called by one thread."""

    def __init__(self, root: Path) -> None:
        self.statuses: list[PipelineStatus] = []
        self._root = root
        self._interval = Interval(INTERVAL)

    def look(self) -> None:
        """Read the files, unless the last check was a moment ago. Files that no pipeline wrote are ignored."""
        if not self._interval.is_over():
            return
        now = system.port.now()
        self.statuses = [_status(one, now) for one in pipeline_progress.all_of(self._root)]


def _status(found: PipelineProgress, now: int) -> PipelineStatus:
    return PipelineStatus(
        name=found.name,
        state="silent" if found.is_silent(now) else found.state,
        records=found.records,
        rate=found.rate,
        lag=found.lag,
        bad=found.bad,
        late=found.late,
        batch=found.batch,
        batch_seconds=max(0, found.durations.get("triggerExecution", 0)) / 1000,
        batch_ended=min(found.batch_ended, now),
        updated=min(found.updated, now),
        error=found.error[:LONGEST_ERROR],
    )
