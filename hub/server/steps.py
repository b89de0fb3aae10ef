"""The steps of a client's way through a hub, and when each was last completed, by any client.

A hub with many clients completes them late, and one that is stuck never. So the hub's probe, which waits like any other client, can tell
one from the other.
"""

from __future__ import annotations

import math
from enum import StrEnum

from kvspool import system
from kvspool.system.handles import Handle


class Step(StrEnum):
    """A step, as what a hub has not done if no client completes it."""

    CONNECT = "authenticated no connection"
    LIST = "listed nothing"
    OPEN = "opened no call of a shipper"
    STORE = "stored no record"


class Steps(Handle):
    """When each step was last completed. Its methods can be called by several threads."""

    def __init__(self) -> None:
        self._completed = dict.fromkeys(Step, -math.inf)

    def complete(self, step: Step) -> None:
        """Note that a client has completed a step."""
        self._completed[step] = system.port.monotonic()

    def last(self, step: Step) -> float:
        """Return when a step was last completed, in seconds of the monotonic clock; minus infinity: never."""
        return self._completed[step]
