"""A service that streams a log to browsers as server-sent events.

    pip install uvicorn starlette
    kvspool create events && uvicorn examples.sse:app
    curl -N http://127.0.0.1:8000/events

The id of an event is the sequence of its record. A browser that connects again sends the last one in the header Last-Event-ID, and gets the
records after it. Records that were overwritten meanwhile are reported by an event of the type `gap`.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import kvspool
from kvspool.aio import AsyncLog
from kvspool.options import Start

PATH = os.environ.get("EVENTS", "events")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    """Open the log while the service runs."""
    async with AsyncLog(kvspool.create(PATH, exist_ok=True)) as log:
        app.state.log = log
        yield


async def append(request: Request) -> JSONResponse:
    """Append the JSON of the request; it is on disk when the answer arrives."""
    sequence = await request.app.state.log.append(await request.json(), durable=True)
    return JSONResponse({"sequence": sequence}, status_code=201)


async def events(request: Request) -> StreamingResponse:
    """Stream the records after the browser's last event, then new ones."""
    last = request.headers.get("last-event-id", "")
    start = int(last) + 1 if last.isdigit() else "latest"
    return StreamingResponse(stream(request.app.state.log, start), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def stream(log: AsyncLog, start: Start) -> AsyncIterator[str]:
    """Yield the events of the records from `start` on."""
    async with log.follow(start=start, on_gap="yield") as records:
        async for item in records:
            if isinstance(item, kvspool.Gap):
                yield f"event: gap\nid: {item.last}\ndata: {item.count}\n\n"
            else:
                yield f"id: {item.sequence}\ndata: {json.dumps(item.data, default=str)}\n\n"


app = Starlette(routes=[Route("/events", events), Route("/events", append, methods=["POST"])], lifespan=lifespan)
