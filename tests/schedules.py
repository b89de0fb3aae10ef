"""Whether tests that take a sample of places to kill or fail at take all of them."""

from __future__ import annotations

import os

ALL = os.environ.get("KVSPOOL_ALL_SCHEDULES") == "1"
