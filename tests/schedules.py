"""Places to kill or fail at: a sample of them, or all with KVSPOOL_ALL_SCHEDULES=1."""

from __future__ import annotations

import os

ALL = os.environ.get("KVSPOOL_ALL_SCHEDULES") == "1"


def some(places: range, step: int, first: int = 0) -> range:
    """Return each `step`th of the places, from the one at index `first` on; all of them if ALL."""
    return places if ALL else places[first::step]
