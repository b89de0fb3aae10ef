"""A slice of the campaign against the append lock; see tools/faults/owners.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "tools" / "faults" / "owners.py"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_owners_of_the_append_lock_that_are_killed_lose_and_double_nothing_and_stop_no_other_process() -> None:
    spec = importlib.util.spec_from_file_location("owners_campaign", _PATH)
    assert spec is not None and spec.loader is not None
    campaign = importlib.util.module_from_spec(spec)
    sys.modules["owners_campaign"] = campaign
    spec.loader.exec_module(campaign)
    counts = campaign.campaign(100, 10, seed=3)
    print(counts)
    assert counts["killed"] >= 100 and counts["owners"] >= 10 and counts["acknowledged"]
