"""A slice of the storm on producers; see tools/faults/producers.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "tools" / "faults" / "producers.py"


@pytest.mark.parametrize("format", ["spool", "kvj"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_producers_that_are_killed_at_random_leave_each_record_once(format: str) -> None:
    spec = importlib.util.spec_from_file_location("producers_storm", _PATH)
    assert spec is not None and spec.loader is not None
    storm = importlib.util.module_from_spec(spec)
    sys.modules["producers_storm"] = storm
    spec.loader.exec_module(storm)
    counted = storm.storm(1.2, format, 3)
    print(counted)
    assert counted["killed"] and counted["batches"] and counted["others"]
