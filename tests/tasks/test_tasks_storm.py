"""A slice of the campaign against tasks; see tools/faults/tasks.py."""

from __future__ import annotations

import pytest
from campaigns import campaign

STRIKES = 60


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "format", "lease", "is_ordered"),
    [("log", "spool", None, False), ("log", "kvj", 0.02, False), ("log", "spool", None, True), ("set", "kvj", None, False)],
)
def test_workers_that_are_killed_and_stopped_forget_nothing_and_repeat_nothing(
    kind: str, format: str, lease: float | None, is_ordered: bool
) -> None:
    counts = campaign("tasks").campaign(60, kind, format, 4, lease, is_ordered, seed=5, strikes=STRIKES)
    print(counts)
    assert counts["killed"] + counts["stopped"] >= STRIKES // 2
    assert counts["records"]
    assert counts["dead"]
