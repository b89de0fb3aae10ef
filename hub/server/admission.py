"""Admission control of one call: rights, quotas and free space are checked for each batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hub.errors import QuotaExceeded
from hub.security.quotas import LONGEST_DEBT, Meters, Space
from kvspool import system
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from hub.root.store import Store
    from hub.server.authentication import Standing
    from hub.server.proxy import ProxiedConnection

POLL = 0.5  # seconds between two checks whether a waiting caller is still connected


class Admission(Handle):
    """The guard of one call; see `ingest.IngestGuard`. Close it when the call ends."""

    def __init__(
        self,
        caller: Standing,
        connection: ProxiedConnection,
        meters: Meters,
        space: Space,
        store: Store,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """is_over: whether the caller is gone."""
        self._caller = caller
        self._principal = principal = caller.principal
        self._connection = connection
        self._meter = meters.of(principal.name, principal.quota)
        self._space = space
        self._store = store
        self._client = ""
        self._is_over = is_over
        self._resources = ExitStack()

    def begin(self, client: str, bits: int) -> None:
        """Check whether this client may write, and may have so many shards. Raises Flight's errors, QuotaExceeded and HubFull."""
        self._client = client
        self._check()
        self._resources.enter_context(self._meter.call(self._connection))
        self._space.admit(0)
        self._resources.enter_context(self._meter.shards(client, 1 << bits, self._known_shards))

    def admit(self, size: int) -> None:
        """Count a batch, and delay a client that exceeds its rate. Raises QuotaExceeded, HubFull, Flight's errors."""
        principal = self._caller.principal
        if principal is not self._principal:
            self._principal = principal
            self._check()
        self._space.admit(size)
        self._meter.store(size)
        try:
            wait = self._meter.pace(size)
        except QuotaExceeded:
            self._meter.release(size)
            raise
        pause_until = system.port.monotonic() + min(wait, LONGEST_DEBT)
        while (left := pause_until - system.port.monotonic()) > 0 and not self._is_over():
            system.port.sleep(min(left, POLL))

    def progress(self, size: int) -> None:
        """Report a processed batch to the proxy, so that its bytes no longer count as unprocessed."""
        self._connection.progress(size)

    def _known_shards(self) -> dict[str, int]:
        return {name: len(shards) for name, shards in self._store.sizes().items() if self._principal.may_write(name)}

    def close(self) -> None:
        """Stop counting the call."""
        self._resources.close()

    def _check(self) -> None:
        self._caller.check(self._principal.may_write(self._client), f"write {self._client}")
