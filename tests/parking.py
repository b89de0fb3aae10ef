"""A follower of a journal that waits in the loops, and not in the packages above them."""

from __future__ import annotations

import threading
import time
from typing import Any

ENDLESS = 60.0  # seconds; each wait is ended by a write


def parked(log: Any, other: Any) -> Any:
    """Return a follower at the end of the log, whose last sleep was ended by a write of `other` and nothing else."""
    following = log.follow("latest", timeout=ENDLESS)

    def wake() -> None:
        while (watcher := following._waiter._watcher) is None or not watcher._users:
            time.sleep(0.001)
        other.append(b"wake-up-")

    for _ in range(10):
        thread = threading.Thread(target=wake)
        thread.start()
        assert next(following).value == b"wake-up-"
        thread.join()
        if following._waiter._sleeper is not None:
            return following
    raise AssertionError("the follower never waited in the loops")
