"""The connections of a query's processes to hubs: credentials, timeouts, and the hubs that were away a moment ago.

A worker keeps its connections for the next task. They are created in the process that uses them: a fork can't inherit them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hub.client.outage import Outage
from hub.errors import Unreachable
from hub.spark.options import Credentials
from kvspool import system

if TYPE_CHECKING:
    from hub.client.one_hub import OneHub

TIMEOUT = 60.0  # longest outage of a hub, in seconds
CALL = 5.0  # seconds for an answer that isn't a stream
AGAIN = 2.0  # seconds for the first answer to a repeated task: an earlier attempt has waited
STREAM = 30.0  # longest stream, in seconds
RECENT = 30.0  # seconds for which a worker asks a hub that was away after all others


@dataclass(frozen=True)
class HubEndpoint:
    """The address of a hub, for the driver or a task. timeout: longest outage, in seconds. has_others: other hubs have the same records."""

    location: str
    credentials: Credentials = Credentials()
    timeout: float = TIMEOUT
    has_others: bool = False

    @property
    def stream(self) -> float:
        """Return the seconds after which a stream is ended and continued by another one, because a broken network is not reported."""
        return min(STREAM, max(CALL, self.timeout))

    def connect(self) -> OneHub:
        """Return the hub, with the current content of the files with secrets. Raises AccessError, OSError, Unreachable."""
        from hub.client.one_hub import OneHub

        return OneHub(self.location, self.credentials.load(), CALL, has_others=self.has_others)


def is_repeated() -> bool:
    """Return whether this process runs a task that has failed before."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return task is not None and task.attemptNumber() > 0


_connections: dict[HubEndpoint, tuple[int, OneHub]] = {}  # with the process that created it
_failures: dict[HubEndpoint, tuple[float, str]] = {}  # when a hub of several was away, and why


def outage_of(endpoint: HubEndpoint, answered: float | None, why: str = "") -> Outage:
    """Return the state of a hub for a new task. One that was away a moment ago, here or for the driver (`why`), is asked last."""
    outage = Outage(endpoint.location, endpoint.timeout, answered)
    at, failure = _failures.get(endpoint, (0.0, ""))
    if at and system.port.monotonic() - at < RECENT:
        why = why or failure
    if why and endpoint.has_others:
        outage.note(Unreachable(why))
        outage.retry_at = 0.0
    return outage


def note_failure(endpoint: HubEndpoint, why: str) -> None:
    """Remember for the next tasks of this process that a hub doesn't answer; `why`: "" if it does."""
    if why:
        _failures[endpoint] = system.port.monotonic(), why
    else:
        _failures.pop(endpoint, None)


def connected(endpoint: HubEndpoint, timeout: float = CALL) -> tuple[OneHub, bool]:
    """Return the hub, and whether the connection is new; a worker process keeps it for its next task.

    timeout: seconds in which the hub has to answer over a new connection. A stream from one that says nothing would take longer. Raises
    the errors of `HubEndpoint.connect` and `OneHub.server`.
    """
    process, hub = _connections.get(endpoint, (0, None))
    if hub is not None and process == os.getpid():
        return hub, False
    hub = endpoint.connect()
    try:
        hub.server(timeout)
    except BaseException:
        hub.close()
        raise
    _connections[endpoint] = os.getpid(), hub
    return hub, True


def disconnect(endpoint: HubEndpoint) -> None:
    """Close the connection to a hub, if there is one: gRPC would wait for the backoff of earlier attempts."""
    process, hub = _connections.pop(endpoint, (0, None))
    if hub is not None and process == os.getpid():
        hub.close()


def close_connections() -> None:
    """Close the connections that this process keeps for its next task."""
    for endpoint in list(_connections):
        disconnect(endpoint)
    _failures.clear()
