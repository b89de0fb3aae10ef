"""A slice of `tools/faults/stream`: a stream through Spark whose parts are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import MARKS

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = MARKS
CAMPAIGN = Path(__file__).parent.parent.parent / "tools" / "faults" / "stream"


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
