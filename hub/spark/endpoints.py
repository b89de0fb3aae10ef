"""The connections of a query's processes to hubs: credentials, timeouts and retries.

A worker keeps its connections for the next task. They are created in the process that uses them: a fork can't inherit them.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from hub.errors import HubFull, QuotaExceeded, Unreachable
from hub.spark.options import Credentials
from kvspool import system

if TYPE_CHECKING:
    from hub.client.remote import RemoteHub

TIMEOUT = 60.0  # longest outage of a hub, in seconds
CALL = 5.0  # seconds for an answer that isn't a stream
STREAM = 30.0  # longest stream, in seconds
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0  # seconds
LATER = (Unreachable, HubFull, QuotaExceeded)  # transient errors
_logger = logging.getLogger("kvspool")


@dataclass(frozen=True)
class HubEndpoint:
    """The address of a hub, for the driver or a task. timeout: longest outage, in seconds."""

    location: str
    credentials: Credentials = Credentials()
    timeout: float = TIMEOUT

    @property
    def stream(self) -> float:
        """Return the seconds after which a stream is ended and continued by another one, because a broken network is not reported."""
        return min(STREAM, max(CALL, self.timeout))

    def connect(self) -> RemoteHub:
        """Return the hub, with the current content of the files with secrets. Raises AccessError, OSError, Unreachable."""
        from hub.client.remote import RemoteHub

        return RemoteHub(self.location, security=self.credentials.load(), timeout=CALL)


class Backoff:
    """Pauses between attempts, up to a time limit.

    A failed task is repeated, usually three times, and would wait each time. An earlier attempt of a
    repeated task has waited. So it waits only until `timeout` after the last answer to the driver, unless the hub answers.
    """

    def __init__(self, endpoint: HubEndpoint, answered: float | None = None) -> None:
        """answered: when the hub last answered the driver, in seconds since 1970, for a repeated task."""
        self._endpoint = endpoint
        self.succeeded()
        self._answered: float | None = answered

    def succeeded(self) -> None:
        """Reset the pauses, because the hub has answered."""
        self._backoff = FIRST_BACKOFF
        self._since: float | None = None
        self._answered = None
        self._began = system.port.monotonic()
        self.retry_at = 0.0

    def begin(self) -> None:
        """Note that the hub is asked from now on. Until the first failure it was idle: that doesn't count as an outage."""
        self._began = system.port.monotonic()

    def failed(self, error: Exception) -> None:
        """Note a failed attempt, and set `retry_at` for the next one.

        Raises Unreachable if the hub has been down for too long, or this error again if the hub has answered with it for as long.
        """
        from hub.client.connection import jittered

        now = system.port.monotonic()
        if self._since is None:
            self._since = self._began
        elif self._backoff == 2 * FIRST_BACKOFF:  # the first attempt may have used an old connection
            _logger.warning("%s doesn't answer; retrying for %g s: %s", self._endpoint.location, self._endpoint.timeout, error)
        waited = now - self._since
        if self._answered is not None and self._backoff > FIRST_BACKOFF:  # the first attempt may have used an old connection
            waited = max(waited, system.port.now() / 1e9 - self._answered)
        if waited >= self._endpoint.timeout:
            raise self._given_up(error, waited) from None
        self.retry_at = now + min(max(jittered(self._backoff), getattr(error, "retry_after", None) or 0.0), LONGEST_BACKOFF)
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)

    def _given_up(self, error: Exception, seconds: float) -> Exception:
        if isinstance(error, HubFull | QuotaExceeded):
            return type(error)(f"[KVSPOOL_HUB_REFUSES] {self._endpoint.location} has answered for {seconds:.0f} s: {error}")
        since = datetime.fromtimestamp(system.port.now() / 1e9 - seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        words = f"[KVSPOOL_HUB_UNREACHABLE] {self._endpoint.location}: hub unreachable since {since}, for {seconds:.0f} s: {error}"
        return Unreachable(f"{words}; start it, check the network, or increase the option hubTimeout")

    def pause(self) -> None:
        """Wait until the next attempt is due."""
        system.port.sleep(max(0.0, self.retry_at - system.port.monotonic()))


def is_repeated() -> bool:
    """Return whether this process runs a task that has failed before."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return task is not None and task.attemptNumber() > 0


_connections: dict[HubEndpoint, tuple[int, RemoteHub]] = {}  # with the process that created it


def connected(endpoint: HubEndpoint) -> tuple[RemoteHub, bool]:
    """Return the hub, and whether the connection is new; a worker process keeps it for its next task."""
    process, hub = _connections.get(endpoint, (0, None))
    if hub is not None and process == os.getpid():
        return hub, False
    _connections[endpoint] = os.getpid(), endpoint.connect()
    return _connections[endpoint][1], True


def disconnect(endpoint: HubEndpoint) -> None:
    """Close the connection to a hub, if there is one: gRPC would wait for the backoff of earlier attempts."""
    process, hub = _connections.pop(endpoint, (0, None))
    if hub is not None and process == os.getpid():
        hub.close()


def close_connections() -> None:
    """Close the connections that this process keeps for its next task."""
    for endpoint in list(_connections):
        disconnect(endpoint)
