"""An outage of a hub: since when and why it doesn't answer, when it is asked again, and whether that has taken too long."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime

from hub.errors import HubFull, QuotaExceeded, Unreachable
from kvspool import system
from kvspool.system.pauses import jittered

FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0  # seconds
LATER = (Unreachable, HubFull, QuotaExceeded)  # transient errors
_logger = logging.getLogger("kvspool")


class Outage:
    """The attempts to reach one hub, with growing pauses, up to a time limit. `why`: the last error; "" while the hub answers.

    A failed task of Spark is repeated, usually three times, and would wait each time. An earlier attempt of a repeated task has waited. So
    it waits only until `timeout` after the last answer to the driver, unless the hub answers. Its first connection must be a new one: an
    old connection may fail although the hub is there.
    """

    def __init__(self, location: str, timeout: float = math.inf, answered: float | None = None) -> None:
        """timeout: longest outage, in seconds. answered: when the hub last answered the driver, in seconds since 1970, for a repeated
        task.
        """
        self.location = location
        self.timeout = timeout
        self._answered: float | None = None
        self.succeeded()
        self._answered = answered

    def succeeded(self) -> None:
        """Reset the pauses, because the hub has answered."""
        self._backoff = FIRST_BACKOFF
        self._since: float | None = None
        self._answered = None
        self._error: Exception | None = None
        self._began = system.port.monotonic()
        self.retry_at = 0.0

    def begin(self) -> None:
        """Note that the hub is asked from now on. Until the first failure it was idle: that doesn't count as an outage."""
        self._began = system.port.monotonic()

    @property
    def is_away(self) -> bool:
        """Return whether the last attempt failed."""
        return self._error is not None

    @property
    def since(self) -> int:
        """Return the begin of the outage, ns since 1970; 0 without one."""
        return 0 if self._error is None else system.port.now() - int(self._waited() * 1e9)

    @property
    def why(self) -> str:
        """Return since when the hub doesn't answer, and its last error; "" without an outage."""
        error = self._error
        if error is None:
            return ""
        waited = self._waited()
        if isinstance(error, HubFull | QuotaExceeded):
            return f"it has answered for {waited:.0f} s: {error}"
        since = datetime.fromtimestamp(system.port.now() / 1e9 - waited, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"hub unreachable since {since}, for {waited:.0f} s: {error}"

    def note(self, error: Exception) -> None:
        """Note a failed attempt, and set `retry_at` for the next one."""
        now = system.port.monotonic()
        self._error = error
        if self._since is None:
            self._since = self._began
        elif self._backoff == 2 * FIRST_BACKOFF:  # the first attempt may have used an old connection
            until = "" if self.timeout == math.inf else f" for {self.timeout:g} s"
            _logger.warning("%s doesn't answer; retrying%s: %s", self.location, until, error)
        pause = min(max(jittered(self._backoff), getattr(error, "retry_after", None) or 0.0), LONGEST_BACKOFF)
        last = self._since + self.timeout + FIRST_BACKOFF  # an attempt just after the time limit, and none later
        self.retry_at = min(now + pause, max(now, last))
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def failed(self, error: Exception) -> None:
        """Note a failed attempt. Raises the error of `expired`."""
        self.note(error)
        if (found := self.expired()) is not None:
            raise found from None

    def _waited(self) -> float:
        waited = 0.0 if self._since is None else system.port.monotonic() - self._since
        if self._answered is not None:
            waited = max(waited, system.port.now() / 1e9 - self._answered)
        return waited

    def expired(self) -> Exception | None:
        """Return Unreachable if the hub has been down for too long, or its own error if it has answered with that for as long."""
        error = self._error
        if error is None or self._waited() < self.timeout:
            return None
        if isinstance(error, HubFull | QuotaExceeded):
            return type(error)(f"[KVSPOOL_HUB_REFUSES] {self.location} {self.why.removeprefix('it ')}")
        return Unreachable(
            f"[KVSPOOL_HUB_UNREACHABLE] {self.location}: {self.why}; start it, check the network, or increase the option hubTimeout"
        )

    def pause(self) -> None:
        """Wait until the next attempt is due."""
        system.port.sleep(max(0.0, self.retry_at - system.port.monotonic()))
