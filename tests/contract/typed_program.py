"""A user's program for a log of any kind, which passes `mypy --strict` and pyright in strict mode, and runs.

`tests/test_typing.py` checks its types, `test_contract_surface.py` runs it. By hand: `npm i pyright`, and `pyright` with the type checking
mode "strict".
"""

from __future__ import annotations

import asyncio
import io
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import kvspool
from kvspool import Log, Reader, Unsupported


def fill(log: Log) -> range:
    with log.writer(timeout=1) as writer:
        first: int = writer.append(b"four")
        writer.append_many([b"five", b"six."])
    key = b"k" if "keys" in log.capabilities else None
    log.append(b"four", key=key, type=1 if "types" in log.capabilities else 0, timeout=2.5, durable=True)
    if "producers" in log.capabilities:
        log.producer("one").append_many([b"four"], batch=0)
        print([one.name for one in log.producers()])
    return range(first, log.append_many([b"four", "four"], keys=None if key is None else ["k", None]).stop)


def look(log: Log) -> None:
    recently = datetime.now(timezone.utc) - timedelta(hours=1)
    for record in log.read(start=recently if "timestamps" in log.capabilities else "earliest", limit=10, on_gap="skip"):
        print(record.sequence, record.data, record.key, record.time if record.timestamp > 0 else None)
    for value in log.read_values():
        print(len(value))
    for record in log.follow("earliest", timeout=0.01, spin=0.001):
        print(record.key)
    print(len(log), log.get(0).value, [one.sequence for one in log.last(3)])
    with log.view(1) as view:
        print(view.nbytes)
    stats = log.stats()
    print(stats.records, stats.first_sequence, stats.next_sequence, stats.used, stats.durability)
    print(log.verify().is_sound, log.kind, sorted(log.capabilities), log.path.name, log.log_id.hex(), log.closed)
    try:
        print(log.resize("1MiB").capacity)
    except Unsupported as error:
        print(error.kind, error.capability, error.instead)
    try:
        print(log.trim(before=0, dry_run=True).removed_records)
    except Unsupported as error:
        print(error)
    print(log.export(io.BytesIO()).records)


async def follow(log: Log) -> None:
    async with log.follow_async("earliest", timeout=0.01) as following:
        async for record in following:
            print(record.sequence)


def consume(log: Log) -> int:
    reader: Reader
    with log.reader("billing", start="earliest", isolation="appended") as reader:
        for record in reader.read(limit=3):
            print(record.data)
        reader.seek(1)
        reader.rewind()
        for record in reader.follow(timeout=0.01, spin=0.001):
            print(record.data)
        print(reader.lag().records, [one.name for one in log.readers() if one.lag is not None])
        return reader.commit()


def main(path: Path) -> int:
    """Use the log at a path, resize it if its kind allows that, and copy it."""
    with kvspool.open(path) as log:
        print(fill(log))
        look(log)
        asyncio.run(follow(log))
        consumed = consume(log)
        print(log.sync(), log.repair())
        try:
            print(log.resize("1MiB").capacity)
        except Unsupported as error:
            print(error.instead)
    print(kvspool.copy(path, path.with_name("copy"), format="kvj", lossy=True).records)
    return consumed


if __name__ == "__main__":
    main(Path(sys.argv[1]))
