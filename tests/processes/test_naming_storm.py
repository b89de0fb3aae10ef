"""A slice of the storm on names; see tools/faults/naming.py."""

from __future__ import annotations

import pytest
from campaigns import campaign


@pytest.mark.parametrize("kind", ["spool", "kvj", "fixed"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_logs_that_are_deleted_and_renamed_in_a_storm_lose_no_acknowledged_record(kind: str) -> None:
    counted = campaign("naming").storm(0.6, kind, 7)
    print(counted)
    assert counted["deleted"] and counted["records"]
