"""A slice of the campaign against tasks; see tools/faults/tasks.py."""

from __future__ import annotations

import pytest
from campaigns import campaign

STRIKES = 25


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "format", "lease", "is_ordered", "policy"),
    [
        ("log", "spool", None, False, "overwrite"),
        ("log", "kvj", 0.02, False, None),
        ("log", "spool", None, True, "block"),
        ("set", "kvj", None, False, None),
        ("hub", "kvj", None, True, None),
    ],
)
def test_workers_that_are_killed_and_stopped_forget_nothing_and_repeat_nothing(
    kind: str, format: str, lease: float | None, is_ordered: bool, policy: str | None
) -> None:
    counts = campaign("tasks").campaign(60, kind, format, 4, lease, is_ordered, seed=5, strikes=STRIKES, policy=policy, deliveries=20)
    print(counts)
    assert counts["killed"] + counts["killed at an opcode"] + counts["stopped"] >= STRIKES
    assert counts["records"]
    assert counts["dead"]
