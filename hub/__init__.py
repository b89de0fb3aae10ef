"""The shards of many clients under one root, read as one. `hub.spark` gives them to Spark.

    import hub

    with hub.open("root") as root:
        for record in root.follow(timeout=5):
            print(record.client, record.shard, record.sequence, record.data)

`HubServer`, `LogPosition`, `Mirror`, `RemoteHub`, `Security` and `Shipper` need the extra `hub`. They are imported when they are used.
"""

from typing import TYPE_CHECKING

from hub.errors import HubError, ShardReplaced
from hub.root.reader import HubLag, HubReader, HubReaderStats, ShardLag
from hub.root.records import HubRecord
from hub.root.root import ClientStats, HubRoot, HubStats

if TYPE_CHECKING:
    from hub.client.connection import Security
    from hub.client.mirror import Mirror
    from hub.client.remote import RemoteHub
    from hub.client.shipper import Shipper
    from hub.client.timeline import LogPosition
    from hub.server.server import HubServer

open = HubRoot.open
create = HubRoot.create

__all__ = [
    "ClientStats",
    "HubError",
    "HubLag",
    "HubReader",
    "HubReaderStats",
    "HubRecord",
    "HubRoot",
    "HubServer",
    "HubStats",
    "LogPosition",
    "Mirror",
    "RemoteHub",
    "Security",
    "ShardLag",
    "ShardReplaced",
    "Shipper",
    "create",
    "open",
]

_PLACES = {
    "HubServer": "hub.server.server",
    "LogPosition": "hub.client.timeline",
    "Mirror": "hub.client.mirror",
    "RemoteHub": "hub.client.remote",
    "Security": "hub.client.connection",
    "Shipper": "hub.client.shipper",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvspool.errors import MissingExtra
    from kvspool.importing import import_whole

    try:
        module = import_whole(_PLACES[name])
    except ModuleNotFoundError as error:
        raise MissingExtra.of("hub", f"{name} needs a package that isn't installed", error) from error
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
