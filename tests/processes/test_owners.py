"""A slice of the campaign against the append lock; see tools/faults/owners.py."""

from __future__ import annotations

import pytest
from campaigns import campaign


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_owners_of_the_append_lock_that_are_killed_lose_and_double_nothing_and_stop_no_other_process() -> None:
    counts = campaign("owners").campaign(50, 10, seed=3)
    print(counts)
    assert counts["killed"] >= 50 and counts["owners"] >= 10 and counts["acknowledged"]
