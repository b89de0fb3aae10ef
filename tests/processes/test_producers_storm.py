"""A slice of the storm on producers; see tools/faults/producers.py."""

from __future__ import annotations

import pytest
from campaigns import campaign


@pytest.mark.parametrize("format", ["spool", "kvj"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_producers_that_are_killed_at_random_leave_each_record_once(format: str) -> None:
    counted = campaign("producers").storm(0.3, format, 3)
    print(counted)
    assert counted["killed"] and counted["batches"] and counted["others"]
