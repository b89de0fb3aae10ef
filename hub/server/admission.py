"""Admission control of one call of a shipper: rights, quotas and free space are checked for each batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hub.errors import HubFull, QuotaExceeded
from hub.security.quotas import LATER, LONGEST_DEBT, Meters, Space
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from hub.root.store import Store
    from hub.server.authentication import Standing


class Admission(Handle):
    """The guard of one call. Close it when the call ends."""

    def __init__(self, caller: Standing, meters: Meters, space: Space, store: Store) -> None:
        self._caller = caller
        self._principal = principal = caller.principal
        self._meter = meters.of(principal.name, principal.quota)
        self._space = space
        self._store = store
        self._client = ""
        self._resources = ExitStack()
        self.is_superseded = False

    def begin(self, client: str, bits: int, take_over: Callable[[], None] = lambda: None) -> None:
        """Check whether this client may write, and may have so many shards. Raises NotAllowed, QuotaExceeded and HubFull.

        take_over: ends earlier calls of this client, so that they don't count.
        """
        self._client = client
        self._check()
        take_over()
        self._space.admit(0)
        self._resources.enter_context(self._meter.shards(client, 1 << bits, self._known_shards))
        if self.is_superseded:  # meanwhile
            self.close()
            raise self.superseded()

    def supersede(self) -> None:
        """Stop counting the call, and refuse its later batches: the client has begun another one."""
        self.is_superseded = True
        self.close()

    def superseded(self) -> HubFull:
        """Return the refusal of a superseded call."""
        return HubFull(f"client {self._client} has begun another call, which ships this log now", LATER)

    def admit(self, size: int) -> float:
        """Count a batch. Return how many seconds a client that exceeds its rate has to wait before the next one.

        Raises QuotaExceeded, HubFull, NotAllowed, NotAuthenticated.
        """
        if self.is_superseded:
            raise self.superseded()
        principal = self._caller.principal
        if principal is not self._principal:
            self._principal = principal
            self._check()
        self._space.admit(size)
        self._meter.store(size)
        try:
            return min(self._meter.pace(size), LONGEST_DEBT)
        except QuotaExceeded:
            self._meter.release(size)
            raise

    def _known_shards(self) -> dict[str, int]:
        return {name: count for name, count in self._store.shard_counts().items() if self._principal.may_write(name)}

    def close(self) -> None:
        """Stop counting the call's shards."""
        self._resources.close()

    def _check(self) -> None:
        self._caller.check(self._principal.may_write(self._client), f"write {self._client}")
