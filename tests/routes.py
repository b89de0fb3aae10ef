"""Which functions a call enters, as a program that prints them for the twin of its environment: `python tests/routes.py DIRECTORY`.

Functions of the packages outside of the kernels are seen on both twins. Those of the kernels are seen on the interpreted one only; it marks
them. Functions that are the interpreted form of an inline C function (`machine`, `pointers`, `network`) don't count: the C form
calls none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from parking import parked

import kvspool
import shard
from kvspool.kernel import frames
from kvspool.queue import chain
from kvspool.spool import spool

ROOT = Path(__file__).resolve().parents[1]
INLINE = {"kernel/machine.py", "kernel/pointers.py", "kernel/network.py", "kernel/crc32.py"}
Route = list[str]


def room(path: str) -> str:
    """Return the room of a source: "kernel", "inline", "above" (all others of the packages), or "" outside of them."""
    if not path.startswith((f"{ROOT}/kvspool/", f"{ROOT}/shard/")):
        return ""
    if any(path.endswith(name) for name in INLINE):
        return "inline"
    inside = path.removeprefix(str(ROOT))
    return "kernel" if "/kernel/" in inside or "/build/" in inside else "above"


def route(call: Callable[[], Any]) -> tuple[Route, Route]:
    """Return the functions above the kernels that a call enters, and those of the kernels, in order."""
    above: Route = []
    below: Route = []
    rooms = [""]  # of the functions under way

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found = rooms[-1] if rooms[-1] == "inline" else room(frame.f_code.co_filename)
            name = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"
            if found == "above":
                above.append(name)
            elif found == "kernel":
                below.append(name.replace("_py.", "."))
            rooms.append(found)
        elif event == "return" and len(rooms) > 1:
            rooms.pop()

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return above, below


def calls(directory: Path) -> dict[str, Callable[[], Any]]:
    """Return calls by name, of logs that did the same before: so nothing is opened, and no log looks for its files."""
    spool.LOOK_EVERY = chain.LOOK_EVERY = 3600 * 10**9  # otherwise a slow machine checks at some calls whether the log still exists
    kinds: dict[str, dict[str, Any]] = {"spool": {"capacity": "1MiB"}, "kvj": {}, "sej": {}, "fflg": {}}
    kinds["fixed"] = {"item_bytes": 8, "items_per_blob": 1000}
    found: dict[str, Callable[[], Any]] = {}
    for kind, options in kinds.items():
        log: Any = kvspool.create(directory / kind, format=kind, **options)
        found |= {
            f"{kind}: append": lambda log=log: log.append(bytes(8)),
            f"{kind}: append, durable": lambda log=log: log.append(bytes(8), durable=True),
            f"{kind}: append_many": lambda log=log: log.append_many([bytes(8)] * 3),
            f"{kind}: append_many, durable": lambda log=log: log.append_many([bytes(8)] * 3, durable=True),
            f"{kind}: read": lambda log=log: list(log.read(0)),
            f"{kind}: read_values": lambda log=log: list(log.read_values(0)),
            f"{kind}: follow": lambda log=log: list(log.follow(0, limit=4)),
            f"{kind}: extent": lambda log=log: log.extent(),
        }
        if kind in ("spool", "kvj"):
            found[f"{kind}: append, text"] = lambda log=log: log.append("text")
            found[f"{kind}: append, with a key"] = lambda log=log: log.append(bytes(8), key=b"key", type=7)
            found[f"{kind}: append_many, with keys"] = lambda log=log: log.append_many([bytes(8)] * 3, keys=[b"a", None, b"b"])
    try:
        import pyarrow
    except ImportError:
        pass
    else:
        for kind in ("spool", "kvj"):
            log = kvspool.open(directory / kind)
            batch = pyarrow.record_batch({"value": [bytes(8)] * 3})
            found[f"{kind}: append_arrow"] = lambda log=log, batch=batch: log.append_arrow(batch)
            found[f"{kind}: read_arrow"] = lambda log=log: log.read_arrow(0)
    waiting = kvspool.create(directory / "waiting", format="kvj")
    waiting.append(bytes(8))
    following = parked(waiting, waiting)
    found["kvj: follow, waiting"] = lambda: (waiting.append(bytes(8)), next(following))
    for level in ("memory", "disk"):
        queue: Any = kvspool.queue.create(directory / f"queue-{level}", durability=level)
        queue.put_many([bytes(8)] * 1000)
        found |= {
            f"queue, {level}: put": lambda queue=queue: queue.put(bytes(8)),
            f"queue, {level}: get": lambda queue=queue: queue.get(),
            f"queue, {level}: put_many": lambda queue=queue: queue.put_many([bytes(8)] * 3),
            f"queue, {level}: get_many": lambda queue=queue: queue.get_many(3),
            f"queue, {level}: get_if": lambda queue=queue: queue.get_if(bool),
            f"queue, {level}: peek": lambda queue=queue: queue.peek(),
            f"queue, {level}: iterate": lambda queue=queue: list(queue),
        }
    shards = shard.create(directory / "shards", prefix="p", bits=1, capacity="64KiB")
    found["shards: append"] = lambda: shards.append(bytes(8), key=b"key")
    found["shards: read"] = lambda: list(shards.read())
    return found


def main(directory: Path) -> None:
    found = calls(directory)
    for call in [*found.values()] * 2:
        call()
    # The shortest of several: once in a while, by the clock, a writer looks whether its files were deleted.
    routes = {name: min((route(call) for _ in range(5)), key=lambda one: len(one[0])) for name, call in found.items()}
    print(json.dumps({"twin": frames.TWIN, "routes": routes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
