"""A slice of the campaign against groups; see tools/faults/groups.py."""

from __future__ import annotations

import pytest
from campaigns import campaign

STRIKES = 30


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(("kind", "format", "silence"), [("set", "spool", None), ("hub", "kvj", None), ("log", "kvj", 1.0)])
def test_members_that_are_killed_and_stopped_keep_order_and_owners_and_skip_nothing(kind: str, format: str, silence: float | None) -> None:
    counts = campaign("groups").campaign(60, kind, format, 4, silence, seed=5, strikes=STRIKES)
    print(counts)
    assert counts["killed"] + counts["stopped"] >= STRIKES // 2
    assert counts["records"]
