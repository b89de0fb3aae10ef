"""A few seconds of what `tools/faults/network` does for hours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).parent.parent.parent / "tools" / "faults" / "network"


def test_nothing_is_lost_or_doubled_through_a_network_that_fails() -> None:
    words = [sys.executable, str(CAMPAIGN), "4", "--seed", "7", "--bytes", "1600", "--step", "200", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["cut at each byte"] >= 7 and counts["records"] > 100 and counts["violations"] == 0
