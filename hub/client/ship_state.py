"""The state of running shippers and mirrors, as other programs see it, and whether all is well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from hub.client.ship_status import MirrorStatus, ShipStatus
from kvspool.otel.status import CollectorStatus

if TYPE_CHECKING:
    from hub.client.mirror import Mirror
    from hub.client.shipper import Shipper
    from kvspool.otel.shipper import CollectorShipper

    Way = Shipper | Mirror | CollectorShipper

WayStatus = ShipStatus | MirrorStatus | CollectorStatus


class ShipState(msgspec.Struct, frozen=True):
    """The states of all shippers and mirrors of a process, and of its shippers to collectors."""

    shippers: list[ShipStatus]
    mirrors: list[MirrorStatus]
    collectors: list[CollectorStatus] = []

    @classmethod
    def of(cls, ways: Sequence[Way]) -> ShipState:
        """Return the present state."""
        found = [way.status() for way in ways]
        return cls(
            [one for one in found if isinstance(one, ShipStatus)],
            [one for one in found if isinstance(one, MirrorStatus)],
            [one for one in found if isinstance(one, CollectorStatus)],
        )

    @property
    def all(self) -> list[WayStatus]:
        """Return the states of all kinds; of a shipper, that at each hub."""
        return [*(one for shipper in self.shippers for one in shipper.by_hub), *self.mirrors, *self.collectors]

    def troubles(self) -> list[str]:
        """Return why something isn't moved, a sentence each; empty if all is well."""
        found = []
        for one in self.all:
            name, target = names(one)
            if one.state != "connected":
                where = "" if isinstance(one, MirrorStatus) else f" to {target}"
                found.append(f"{name}: not connected{where} ({one.state}){f': {one.error}' if one.error else ''}")
            found += [f"{name}: {words}" for words in failed(one)]
        return found


def names(status: WayStatus) -> tuple[str, str]:
    """Return the source and the target."""
    if isinstance(status, CollectorStatus):
        return status.log, status.endpoint
    return (status.source, status.root) if isinstance(status, MirrorStatus) else (status.client, status.hub)


def moved(status: WayStatus) -> int:
    """Return the number of moved records, repeated ones counted again."""
    return status.pulled if isinstance(status, MirrorStatus) else status.sent


def failed(status: WayStatus) -> list[str]:
    """Return the errors of logs or shards that are not moved now."""
    if isinstance(status, CollectorStatus):
        return []  # its error is that of its only log
    if isinstance(status, MirrorStatus):
        return [f"shard {one.shard} of {one.client} is not pulled: {one.error}" for one in status.shards if one.error]
    return [f"shard {one.shard} is not shipped: {one.error}" for one in status.lanes if one.error]


def notes(status: WayStatus) -> list[str]:
    """Return what a collector rejected, and its last warning."""
    if not isinstance(status, CollectorStatus):
        return []
    found = []
    if status.rejected:
        items = f", {status.rejected_items:,} items in accepted requests" if status.rejected_items else ""
        found.append(f"{status.rejected:,} records are dead letters{items}: kvspool tasks {status.log} {status.reader} --dead")
    return [*found, *([f"the collector says: {status.warning}"] if status.warning else [])]
