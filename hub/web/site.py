"""The answers of the hub's page to browsers, Prometheus and health checks. `hub.web.page` runs it.

    /                       the page, with its style and scripts
    /api/status             status, rates and history as JSON
    /api/history?client=ID  the history of one client; empty if there is none
    /api/records?...        the newest records of a shard, with the right to read them; see `hub.web.records`
    /events                 status and rates once a second, as server-sent events
    /metrics                for Prometheus
    /healthz                200, or 503 with the reason

**Answers show a sample.** The hub is asked once a second, for any number of viewers; every answer uses its last status.

**Access.** There is no login: everyone with access to the listener may see the status, and no request changes anything. Records need the
right to read them. Other web pages in a viewer's browser have no access. A foreign Host is refused (DNS rebinding), and so is a fetch that
the browser attributes to another site. Only GET is answered. Scripts and styles are only the page's own, and data from clients is only
inserted as text.

All of it runs in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hub.protocol.recent import RecordsOf
from hub.protocol.status import HubStatus
from hub.web import metrics
from hub.web.answers import LOOPBACK, json_answer, sentence, without_port
from hub.web.history import Histories, History, RateSeries, TrafficRates
from hub.web.records import RecordBrowser

MOST_LISTENERS = 32  # concurrent event streams
STALE = 8.0  # seconds after which the last status is out of date
HEARTBEAT = 5.0  # seconds after which a stream repeats its last event
RETRY = 1000  # milliseconds after which a browser reconnects a broken stream

SCRIPTS = ("format.js", "chart.js", "records.js", "hub.js")
STATIC = {
    "/": ("hub.html", "text/html"),
    "/hub.css": ("hub.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in SCRIPTS},
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src data:",  # the icon
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
    "Connection": "close",  # a connection has one answer, so that none stays open in vain
}


class Sample(msgspec.Struct, frozen=True):
    """The hub's status at a moment, or why there was none."""

    at: float  # seconds of the monotonic clock
    status: HubStatus | None = None
    encoded: bytes = b""  # the status as JSON
    failure: str = ""  # why there is no status


class News(msgspec.Struct, frozen=True):
    """An event for browsers, each second."""

    status: msgspec.Raw  # null before the first status
    failure: str  # why the status is not the newest; empty if it is
    troubles: list[str]
    rates: TrafficRates
    clients: dict[str, TrafficRates]


class HistoryRows(msgspec.Struct, frozen=True):
    """A history as rows."""

    seconds: RateSeries
    minutes: RateSeries


class Report(News, frozen=True):
    """The answer of `/api/status`: the news, and the history."""

    history: HistoryRows
    recent: dict[str, list[float]]  # records per second of the last minute, of each client


class Site:
    """The routes; `app` is the ASGI application."""

    def __init__(self, names: Iterable[str], records_of: RecordsOf | None = None) -> None:
        """names: without ports, under which browsers reach the page, besides those of the loopback. records_of: None shows no records."""
        self._sample = Sample(-math.inf, failure="the hub has not been asked yet")
        self._said = self._sample  # the last one with a status
        self._histories = Histories()
        self._event = b""
        self._listeners: set[asyncio.Event] = set()  # each is set when there is an event to send, or at the end
        self._is_closed = False
        self._records = RecordBrowser(records_of)
        self.app: ASGIApp = RequestGuard(Starlette(routes=self._routes()), names)

    def _routes(self) -> list[Route]:
        static = [Route(path, _static(name, media_type)) for path, (name, media_type) in STATIC.items()]
        return [
            *static,
            Route("/api/status", self._status),
            Route("/api/history", self._history),
            Route("/api/records", self._records.answer),
            Route("/events", self._events),
            Route("/metrics", self._metrics),
            Route("/healthz", self._healthz),
        ]

    @property
    def listeners(self) -> int:
        """The number of open event streams."""
        return len(self._listeners)

    def take(self, sample: Sample) -> None:
        """Show a sample from now on, and send it to all listeners."""
        self._sample = sample
        if sample.status is not None:
            self._said = sample
            self._histories.add(sample.at, sample.status)
        self._encode()
        self._wake()

    def close(self) -> None:
        """End all event streams."""
        self._is_closed = True
        self._wake()

    def _encode(self) -> None:
        self._event = b"data: " + msgspec.json.encode(self._news()) + b"\n\n"

    def _wake(self) -> None:
        for listener in self._listeners:
            listener.set()

    def _news(self) -> News:
        return News(
            msgspec.Raw(self._said.encoded or b"null"),
            self._silence(),
            self._said.status.troubles() if self._said.status else [],
            self._histories.hub_rates,
            self._histories.client_rates,
        )

    # Answers.

    async def _status(self, request: Request) -> Response:
        news = msgspec.structs.asdict(self._news())
        history = self._histories.hub
        rows = HistoryRows(history.seconds.rows(), history.minutes.rows())
        return json_answer(Report(**news, history=rows, recent=self._histories.recent()))

    async def _history(self, request: Request) -> Response:
        name = request.query_params.get("client", "")
        clients = self._said.status.clients if self._said.status else []
        if not any(client.client == name for client in clients):
            return sentence(404, "there is no client of this name")
        history = self._histories.client(name) or History()  # empty for a new one, or one beyond the limit
        return json_answer(HistoryRows(history.seconds.rows(), history.minutes.rows()))

    async def _events(self, request: Request) -> Response:
        if len(self._listeners) >= MOST_LISTENERS:
            return sentence(503, f"{MOST_LISTENERS} pages are already open; close one")
        return EventStream(self)

    async def _metrics(self, request: Request) -> Response:
        if reason := self._silence():
            return sentence(503, reason)
        assert self._said.status is not None
        return Response(metrics.exposition(self._said.status), media_type=metrics.CONTENT_TYPE)

    async def _healthz(self, request: Request) -> Response:
        troubles = self._said.status.troubles() if self._said.status else []
        reason = self._silence() or "; ".join(troubles)
        return sentence(503, reason) if reason else sentence(200, "ok")

    def _silence(self) -> str:
        """Return why the last status is invalid; "" if it is valid."""
        if self._sample.failure:
            return self._sample.failure
        age = time.monotonic() - self._sample.at
        return f"the hub has sent no status for {age:.0f} s" if age > STALE else ""

    async def stream(self, head: Message, receive: Receive, send: Send) -> None:
        """Send a head, and each sample as an event, the present one first, until the browser disconnects or the site is closed."""
        news = asyncio.Event()
        self._listeners.add(news)  # before any wait: they were counted just now
        going = asyncio.create_task(_wait_until_gone(receive, news))
        try:
            await send(head)
            await _send(send, b"retry: %d\n\n" % RETRY)
            while not going.done() and not self._is_closed:
                await _send(send, self._event)
                await self._wait(news)
            await send({"type": "http.response.body"})
        finally:
            self._listeners.discard(news)
            going.cancel()

    async def _wait(self, news: asyncio.Event) -> None:
        """Wait for the next sample, at most for a heartbeat, so that the stream is never silent."""
        try:
            async with asyncio.timeout(HEARTBEAT):
                await news.wait()
        except TimeoutError:
            self._encode()
        news.clear()


class EventStream(Response):
    """An unbounded answer: server-sent events."""

    def __init__(self, site: Site) -> None:
        """site: the source of the samples."""
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser disconnects."""
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._site.stream(head, receive, send)


class RequestGuard:
    """Wraps an application: refuses requests of other sites, and adds the same headers to every answer."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """names: of the application, in addition to those of the loopback."""
        self._app = app
        self._names = {*LOOPBACK, *(_host_name(name) for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request; other protocols are refused."""
        if scope["type"] != "http":
            raise RuntimeError(f"the page speaks HTTP only, not {scope['type']}")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or without_port(hosts[0]) not in self._names:
            return sentence(421, "this page has no such name; `kvspool hub serve --help` shows how to add one")
        if scope["method"] != "GET":
            return sentence(405, "only GET is supported", {"Allow": "GET"})
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/":
            return sentence(403, "only the hub's own page may request this")
        return None


def _static(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("hub.web").joinpath("static", name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer


def _host_name(name: str) -> str:
    """Return a name in the form that browsers send: in lower case, an IPv6 address in brackets."""
    return f"[{name}]".lower() if ":" in name and not name.startswith("[") else name.lower()


async def _wait_until_gone(receive: Receive, news: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    news.set()


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
