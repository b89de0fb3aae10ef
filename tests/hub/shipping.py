"""Helpers of the tests of the hub over the network: the contents of a log, and batches as a client sends them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

import pyarrow as pa

import kvspool
from hub.client.shipper import Shipper
from hub.root import columns
from hub.root.columns import SequencedBatch
from hub.root.store import Shard, Store
from kvspool import Gap, Record
from kvspool.record import Codec, plain

LOG, OTHER = b"a" * 16, b"b" * 16  # ids of logs
PATIENCE = 30.0  # seconds after which a test gives up


class Row(NamedTuple):
    """A record without its sequence."""

    value: bytes
    key: bytes | None = None
    type: int = 0
    timestamp: int = 1
    codec: int = Codec.RAW


def batch(*rows: Row) -> pa.RecordBatch:
    """Return a record batch as a shipper sends it."""
    columns_of = {name: [getattr(row, name) for row in rows] for name in Row._fields}
    times = pa.array(columns_of["timestamp"], pa.int64()).cast(columns.SCHEMA.field("timestamp").type)
    arrays = [times, *(pa.array(columns_of[field.name], field.type) for field in columns.SCHEMA if field.name != "timestamp")]
    return pa.RecordBatch.from_arrays(arrays, schema=columns.SCHEMA)


def numbered(first: int, end: int, text: str = "record") -> SequencedBatch:
    """Return records whose values say which ones they are."""
    return SequencedBatch(first, batch(*(Row(b"%s %d" % (text.encode(), number), b"key", 1, number) for number in range(first, end))))


def row_of(record: Record) -> Row:
    """Return a record as the wire has it."""
    codec = Codec.MSGPACK if record.codec == Codec.KEYED else record.codec
    return Row(plain(record), record.key, record.type, record.timestamp, codec)


def contents(log: Any) -> dict[int, Row]:
    """Return everything that a log holds, by sequence."""
    found: dict[int, Row] = {}
    for item in log.read(on_gap="yield"):
        if not isinstance(item, Gap):
            assert item.sequence not in found
            found[item.sequence] = row_of(item)
    return found


def gaps(log: Any) -> list[tuple[int, int]]:
    """Return the Gaps of a log."""
    return [(item.first, item.last) for item in log.read(0, on_gap="yield") if isinstance(item, Gap)]


def stored(path: Path) -> dict[int, Row]:
    """Return everything that a log under a path holds, by sequence."""
    with kvspool.open(path) as log:
        return contents(log)


@contextmanager
def shard_of(root: Path, client: str = "client", index: int = 0, bits: int = 0) -> Iterator[Shard]:
    """Open one shard of a store of its own; it is made if it is missing."""
    root.mkdir(exist_ok=True)
    with Store(root) as store:
        store.enter(client, bits)
        yield store.take(client, bits, index)
        store.give_back(client, index)


@contextmanager
def shipping(source: Path, hub: str, client: str = "client", **options: Any) -> Iterator[Shipper]:
    """Ship in a thread inside the `with` block."""
    errors: list[BaseException] = []
    with Shipper(source, hub, client=client, **options) as shipper:

        def run() -> None:
            try:
                shipper.run()
            except Exception as error:
                errors.append(error)

        thread = Thread(target=run)
        thread.start()
        try:
            yield shipper
        finally:
            shipper.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()
    if errors:
        raise errors[0]


def eventually(holds: Callable[[], Any]) -> None:
    """Wait until something holds."""
    deadline = monotonic() + PATIENCE
    while not holds():
        assert monotonic() < deadline, "it never came true"
        sleep(0.005)


def size_of(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    return sum(os.stat(os.path.join(where, name)).st_size for where, _, names in os.walk(folder) for name in names)
