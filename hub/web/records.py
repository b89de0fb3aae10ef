"""The newest records of a shard on the hub's page.

    /api/records?client=ID&shard=N                  the newest ones
    /api/records?client=ID&shard=N&before=SEQUENCE  those below a sequence

The right to read is that of a hub's readers. The header `Authorization: Bearer TOKEN` has a token of the access file, and its principal may
read the client. A hub without authentication needs none. The page has no TLS, so records and tokens are for browsers on the hub's host
only, also through `ssh -L`; other addresses are refused.

A read may block, so it runs in a thread, one at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress

from starlette.requests import Request
from starlette.responses import Response

from hub.errors import HubError, NotAllowed, NotAuthenticated, NotFound
from hub.protocol.recent import RecordsOf
from hub.web.answers import LOOPBACK, json_answer, sentence, without_port
from kvspool.errors import KvspoolError

WAIT = 5.0  # seconds for earlier reads
CODES = {NotAuthenticated: 401, NotAllowed: 403, NotFound: 404}


class RecordBrowser:
    """The answers to requests for records."""

    def __init__(self, records_of: RecordsOf | None) -> None:
        """records_of: None refuses all requests."""
        self._records_of = records_of
        self._turn = asyncio.Semaphore(1)

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        if self._records_of is None:
            return sentence(404, "this page shows no records")
        if not _is_of_this_host(request):
            return sentence(403, "records are shown only to browsers on the hub's host: use ssh -L, and open the page at localhost")
        try:
            client, shard, before = _place(request)
        except ValueError as error:
            return sentence(400, str(error))
        try:
            async with asyncio.timeout(WAIT):
                await self._turn.acquire()
        except TimeoutError:
            return sentence(503, "other records are being read; try again")
        where = f"{request.client.host} port {request.client.port}" if request.client else "unknown"
        shown = request.headers.getlist("authorization")
        reading = asyncio.create_task(asyncio.to_thread(self._records_of, shown, client, shard, before, where))
        reading.add_done_callback(lambda _: self._turn.release())  # also if the browser is gone before that
        try:
            return json_answer(await asyncio.shield(reading))
        except (KvspoolError, OSError) as error:
            code = next((code for kind, code in CODES.items() if isinstance(error, kind)), 502 if isinstance(error, HubError) else 500)
            return sentence(code, str(error).encode(errors="backslashreplace").decode())


def _is_of_this_host(request: Request) -> bool:
    """Return whether a browser on this host sent a request, and not through a proxy under another name."""
    try:
        is_near = request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        is_near = False
    return is_near and without_port(request.headers["host"]) in LOOPBACK


def _place(request: Request) -> tuple[str, int, int | None]:
    """Return the client, the shard and the sequence of a request. Raises ValueError."""
    query = request.query_params
    numbers = {name: query[name] for name in ("shard", "before") if name in query}
    if bad := [name for name, text in numbers.items() if not (text.isascii() and text.isdigit() and len(text) <= 19)]:
        raise ValueError(f"{bad[0]} is a number")
    if "client" not in query or "shard" not in numbers:
        raise ValueError("name a client and a shard: /api/records?client=ID&shard=N")
    return query["client"], int(numbers["shard"]), int(numbers["before"]) if "before" in numbers else None
