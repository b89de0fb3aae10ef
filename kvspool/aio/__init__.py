"""Logs in an event loop: appends and flushes that can be awaited, so that a slow disk or a full log never blocks the loop.

log = kvspool.aio.AsyncLog(kvspool.open("events"))
sequence = await log.append({"user": 7}, durable=True)
"""

from kvspool.aio.appending import AsyncLog

__all__ = ["AsyncLog"]
