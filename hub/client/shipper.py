"""The shipper: sends the records of a client's logs to one hub, or to several that each get a copy.

Each hub has a connection, a thread and durable readers of its own, so no hub waits for another. A record is acknowledged once `acks` hubs
have stored it. Only then may the log forget it: the durable readers of all hubs are at least at that position. A hub that was away
continues where it stopped, as it reports itself. It gets records that the log no longer has from the other hubs; see `copies_of_log`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hub.client import hubs
from hub.client.connection import SILENCE, Security
from hub.client.copies_of_log import Copies, Degraded
from hub.client.hub_shipper import COMMIT_INTERVAL, LINGER, WINDOW, HubShipper, pulse
from hub.client.ship_status import SenderStatus, ShipStatus, State
from hub.protocol.ingest import BATCH_BYTES
from kvspool.options import Isolation
from kvspool.system.handles import ClosingHandle, close_all

logger = logging.getLogger("kvspool.ship")


class Shipper(ClosingHandle):
    """Ships one log or one shard set as the client `client`. `run` ships until `stop` is called."""

    def __init__(
        self,
        source: str | os.PathLike[str],
        hub: str | Sequence[str],
        *,
        client: str,
        copies: int = 1,
        acks: int | None = None,
        degraded: Degraded = "wait",
        may_lose: bool = False,
        security: Security | Callable[[], Security] = Security(),  # noqa: B008 - it is frozen
        choose: hubs.Choice = "hash",
        isolation: Isolation | None = None,
        linger: float = LINGER,
        batch_bytes: int = BATCH_BYTES,
        window: int = WINDOW,
        silence: float = SILENCE,
    ) -> None:
        """Take the source's durable readers. Raises the errors of opening it, ReaderBusy if it is already being shipped, ValueError.

        hub: `grpc+tls://host:port` or `grpc://host:port`, or several; `copies` of them are chosen: see `hubs.chosen`. acks: number of hubs
        that have to store a record before the log may forget it; None: all of them. degraded: if fewer hubs are connected, "wait" holds the
        records, "continue" is content with the connected ones. may_lose: declare records lost that only an unreachable hub may have.
        security: may be a function that is called for each connection, so that tokens and certificates can change. With several hubs it
        must let the client read itself. isolation: "synced" ships only records on this host's disk; None: "synced" if the hub's own level
        is "disk". silence: seconds after which a hub that owes an answer counts as unreachable. If nothing was acknowledged by then, the
        network may be slow, and the next connection waits twice as long.
        """
        locations = [hub] if isinstance(hub, str) else list(hub)
        own = hubs.chosen(client, locations, choose, copies)
        acks = copies if acks is None else acks
        if not 1 <= acks <= copies:
            raise ValueError(f"acks must be from 1 to the number of copies, {copies}, not {acks}")
        if degraded not in ("wait", "continue"):
            raise ValueError(f'degraded must be "wait" or "continue", not {degraded!r}')
        secure = security if callable(security) else lambda: security
        self.client = client
        self.hub = ",".join(own)
        self._copies = None if copies == 1 else Copies(client, locations, own, acks, degraded, secure, may_lose=may_lose)
        self.hubs: list[HubShipper] = []
        try:
            for location in own:
                options = {"isolation": isolation, "linger": linger, "batch_bytes": batch_bytes, "window": window, "silence": silence}
                one = HubShipper(source, location, client=client, security=secure, copies=self._copies, **options)  # type: ignore[arg-type]
                self.hubs.append(one)
        except BaseException:
            self.close()
            raise
        if self._copies is not None:
            self._copies.begin(self.hubs)
            self._warn_of_others()

    def run(self, *, until_empty: bool = False) -> None:
        """Ship until `stop` is called from another thread or a signal handler; `until_empty`: until every hub has all available records.

        An outage of a hub is no error: the shipper retries until the hub is back. A log that can't be shipped is quarantined while the
        others continue. A deleted log is shipped again once it is recreated. The log is retried after a transient error: of a lock, of the
        system, or of a shard that is damaged at the hub. Raises the error of the first log that can't be shipped: when no log can be
        shipped any more, or, with `until_empty`, when the others are done. With several hubs: once shipping to each has ended.
        """
        # With several hubs, writers may wait for what the others have stored, also when a hub has ended with an error.
        with pulse(self.hubs, None if self._copies is None else COMMIT_INTERVAL):
            if self._copies is None:
                self.hubs[0].run(until_empty=until_empty)
            else:
                self._run_all(until_empty)

    def _run_all(self, until_empty: bool) -> None:
        """Ship to each hub in a thread. Raises the error of the first hub that has one, once all have ended."""
        with ThreadPoolExecutor(len(self.hubs), "kvspool ship") as pool:
            runs = [pool.submit(one.run, until_empty=until_empty) for one in self.hubs]
            try:
                errors = [run.exception() for run in runs]
            except BaseException:  # of a signal handler
                self.stop()
                raise
        for error in errors:
            if error is not None:
                raise error

    def stop(self) -> None:
        """Make `run` return."""
        for one in self.hubs:
            one.stop()

    def status(self) -> ShipStatus:
        """Return the shipper's current state. Can be called by other threads."""
        found = [one.status() for one in self.hubs]
        if self._copies is None:
            return found[0]
        lanes = [self._lane([one.lanes[index] for one in found]) for index in range(len(found[0].lanes))]
        return ShipStatus(
            client=self.client,
            hub=self.hub,
            state=_state([one.state for one in found]),
            behind=sum(lane.behind for lane in lanes),
            sent=sum(one.sent for one in found),
            bytes=sum(one.bytes for one in found),
            lost=sum(lane.lost for lane in lanes),
            outages=sum(one.outages for one in found),
            retry_in=max(one.retry_in for one in found),
            error="; ".join(f"{one.hub}: {one.error}" for one in found if one.error),
            lanes=lanes,
            copies=found,
            acks=self._copies.acks,
        )

    def _lane(self, of_hubs: list[SenderStatus]) -> SenderStatus:
        """Return the state of one log at all hubs."""
        assert self._copies is not None
        index = of_hubs[0].shard
        end = max(one.acknowledged + one.behind for one in of_hubs)
        safe = max(self._copies.safe(index, one.senders[index].id) for one in self.hubs)
        sent, lost = max(one.sent for one in of_hubs), max(one.lost for one in of_hubs)
        error = "; ".join(dict.fromkeys(one.error for one in of_hubs if one.error))
        return SenderStatus(index, of_hubs[0].path, sent, safe, max(0, end - safe), lost, error)

    def _warn_of_others(self) -> None:
        """Say which durable readers of other hubs hold records of the logs."""
        assert self._copies is not None
        for sender in self.hubs[0].senders:
            for reader in sender.log.readers():
                if reader.name.startswith(hubs.PREFIX) and not self._copies.is_shared(reader.name):
                    logger.warning(
                        "%s: the durable reader %s of another hub holds records. If nothing is shipped there any more: "
                        "kvspool readers %s --delete %s",
                        *(sender.path, reader.name, sender.path, reader.name),
                    )

    def close(self) -> None:
        """Close the durable readers and the logs."""
        close_all(self.hubs)


def _state(states: list[State]) -> State:
    """Return the common state of all hubs; "degraded" if only some are connected."""
    if "connected" in states:
        return "connected" if set(states) == {"connected"} else "degraded"
    return states[0]
