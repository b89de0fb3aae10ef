"""A queue in QewQew's files: many processes and threads put entries at one end and take them at the other.

    from kvspool.queue import ChunkQueue

    queue = ChunkQueue.create("jobs", max_bytes="1GiB", exist_ok=True)
    queue.put(b"first")
    entry = queue.get(timeout=5)

Names, timeouts and the behaviour of an empty or full queue are those of `queue.Queue`. `docs/queue.md` describes the bytes and the
protocol.
"""

from kvspool.errors import QueueEmpty, QueueFull
from kvspool.queue.contents import QueueStats
from kvspool.queue.header import is_queue
from kvspool.queue.queue import ChunkQueue
from kvspool.queue.repair import QueueRepairReport, repair, verify
from kvspool.queue.scan import QueueVerifyReport

create = ChunkQueue.create
open = ChunkQueue.open

__all__ = [
    "ChunkQueue",
    "QueueEmpty",
    "QueueFull",
    "QueueRepairReport",
    "QueueStats",
    "QueueVerifyReport",
    "create",
    "is_queue",
    "open",
    "repair",
    "verify",
]
