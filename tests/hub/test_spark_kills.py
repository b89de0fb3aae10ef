"""A slice of `tools/faults/stream`: a stream through Spark whose parts are killed. And what retention takes from a stream is not silent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sessions import MARKS, told

import kvspool
from kvspool.engine.retention import Retention

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = MARKS
CAMPAIGN = Path(__file__).parent.parent.parent / "tools" / "faults" / "stream"
PATIENCE = 60  # seconds, against a hang


@pytest.mark.timeout(600)  # two JVMs, one after the other
def test_each_record_is_in_the_sink_once_when_the_driver_a_worker_and_the_hub_are_killed() -> None:
    words = [sys.executable, str(CAMPAIGN), "--rounds", "4", "--seed", "3", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["rounds"] == 4 and counts["violations"] == 0
    assert all(counts[f"{killed} killed"] >= 1 for killed in ("driver", "worker", "hub"))
    assert sum(count for name, count in counts.items() if name.endswith(" paused")) >= 1
    sinks = ("local", "shuffled", "hub", "table")
    assert counts["records"] >= 200 and all(counts[f"in sink {name}"] == counts["records"] for name in sinks)


def test_retention_that_passes_what_a_stream_has_not_read_is_an_error_or_a_counted_gap(spark: SparkSession, tmp_path: Path) -> None:
    found: list[int] = []

    def run(**options: str) -> None:
        frame = spark.readStream.format("kvspool").options(startingOffsets="earliest", **options).load(str(tmp_path / "events"))
        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert writer.trigger(availableNow=True).start().awaitTermination(PATIENCE)

    def take(frame: DataFrame, number: int) -> None:
        found.extend(row.offset for row in frame.select("offset").collect())

    with kvspool.create(tmp_path / "events", format="kvj", segment_bytes=4096) as log:
        log.append_many([b"v" * 50] * 100)
        run()
        log.append_many([b"v" * 50] * 900)
        assert log.trim(Retention(max_bytes=16384)).removed_records > 100
        first = log.stats().first_sequence
    with pytest.raises(Exception, match="KVSPOOL_DATA_LOSS") as failure:
        run()
    assert f"topic 'events', partition 0: offsets 100 to {first - 1}" in told(failure)
    assert found == list(range(100))
    run(failOnDataLoss="false")
    assert found == [*range(100), *range(first, 1000)]
