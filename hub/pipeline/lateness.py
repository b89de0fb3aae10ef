"""Rows that arrive after the watermark has passed all of their windows: marked before Spark drops them, to be counted exactly.

Spark counts dropped rows in the operator of the windows, where the rows of a task and window have already become one. The watermark of a
batch is in the checkpoint before the batch begins: Spark drops rows by that of the previous batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hub.pipeline.job import TIME, Job, seconds

if TYPE_CHECKING:
    import pyarrow as pa

    from hub.pipeline.decode import Plan

LATE = "kvspool late"  # the column of marks, and the metric with their number
_TIME = re.compile(rf"\b{TIME}\b")


class Marking(NamedTuple):
    """A task's work: decode, and mark the rows that are in no window any more. Picklable. size, slide: of the windows, in microseconds."""

    plan: Plan
    checkpoint: str
    size: int
    slide: int

    @property
    def ddl(self) -> str:
        """The columns in Spark's notation."""
        return f"{self.plan.ddl}, `{LATE}` boolean"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Decode the batches of a task of Spark."""
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        watermark = watermark_before(self.checkpoint, int(task.getLocalProperty("streaming.sql.batchId") or "0"))
        for rows in self.plan(batches):
            yield rows.append_column(LATE, self.marks(rows.column(TIME), watermark))

    def marks(self, times: pa.Array, watermark: int) -> pa.Array:
        """Return which times are late. watermark: in microseconds since 1970."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # The last window with a time begins at the multiple of `slide` before it. It is closed once the watermark reaches its end.
        open_from = (watermark - self.size) // self.slide * self.slide + self.slide
        return pc.fill_null(pc.less(times.cast(pa.int64()), open_from), False)


def marking(job: Job, plan: Plan) -> Marking | None:
    """Return how to mark the late rows of a job; None if it has no windows with a watermark over `event_time`, as it was decoded."""
    window, mark, select = job.window, job.watermark, job.select
    if window is None or mark is None or not window.size or {window.column, mark.column} != {TIME} or "://" in job.checkpoint:
        return None
    columns = () if select is None else select.columns
    if any(one.strip("` ") not in ("*", TIME) and ("*" in one or _TIME.search(one)) for one in columns):
        return None
    size, slide = (round(seconds(text) * 1e6) for text in (window.size, window.slide or window.size))
    return Marking(plan, job.checkpoint, size, slide)


def watermark_before(checkpoint: str, batch: int) -> int:
    """Return the watermark by which a batch drops rows, in microseconds; 0 if there is none."""
    try:
        lines = Path(checkpoint.removeprefix("file://"), "offsets", str(batch - 1)).read_text("utf-8").splitlines()
        return int(json.loads(lines[1])["batchWatermarkMs"]) * 1000
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0


def late_of(noted: Mapping[str, Any]) -> int:
    """Return the number of late rows in a batch's report: of the marked ones, or else as Spark counts them."""
    marked = noted.get("observedMetrics", {}).get(LATE)
    if marked is not None:
        return int(marked["rows"])
    return sum(max(0, int(operator.get("numRowsDroppedByWatermark", 0))) for operator in noted.get("stateOperators", ()))
