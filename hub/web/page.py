"""The hub's web page: a separate listener, with its own threads, that shows a hub's status.

    with HubPage(server.status, ("127.0.0.1", 8816)) as page:
        print(page.url)

One thread asks the hub for its status each second; another serves (`hub.web.site`). A hub whose status fails, or doesn't arrive, is shown
as such, and is unhealthy. Viewers cost the hub only that one question per second. Connections are counted and limited. A connection
without a request, or that doesn't read its answer, is cut. Needs the extra `hub`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import msgspec

from hub.protocol.recent import RecordsOf
from hub.protocol.status import HubStatus
from kvspool.errors import Closed, MissingExtra
from kvspool.system.handles import Handle

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from hub.web.site import Sample, Site
except ModuleNotFoundError as error:
    raise MissingExtra.of("hub", "the hub's page needs a package that isn't installed", error) from error

PATIENCE = 30.0  # seconds for a connection's request and answer, or for reading an event
MOST_CONNECTIONS = 64  # at once; each has one answer
STOP = 2.0  # seconds that stopping waits for the hub's last answer, and for requests in progress
LONGEST_SENTENCE = 500  # characters of a failure
WILDCARDS = ("", "0.0.0.0", "::")

_logger = logging.getLogger("kvspool")
_connection_logger = logging.getLogger("kvspool.page")
_connection_logger.addFilter(lambda line: line.levelno != logging.WARNING)  # of bad requests: strangers could fill the log


class HubPage(Handle):
    """The page of one hub. `start` and `close` it, or use it in a `with` statement; it can't be restarted."""

    def __init__(
        self,
        status: Callable[[], HubStatus],
        listen: tuple[str, int] = ("127.0.0.1", 0),
        names: Iterable[str] = (),
        records: RecordsOf | None = None,
    ) -> None:
        """status: returns the hub's status. listen: a host and a port, 0 for any free one.

        `status` is called from one of the page's threads, once a second. `names` are other names or addresses under which browsers reach
        the page, without a port. Requests for other names are refused, except those of the loopback and of the host. `records` returns the
        newest records of a shard to callers with the right to read them, in a thread; `HubServer.recent.read` does. None: none are shown.
        """
        self._status = status
        self._listen = self._bound = listen
        self._site = Site([*names, *([listen[0]] if listen[0] not in WILDCARDS else [])], records)
        self._server = uvicorn.Server(_configuration(self._site))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._has_failed = False

    def start(self) -> Self:
        """Listen, ask the hub for a first time, and return when browsers are served. Raises OSError if the port is taken, Closed."""
        if self._stop.is_set():
            raise Closed("the page was closed; create another one")
        assert self._socket is None, "it has already been started"
        self._socket = _bind(self._listen)
        self._bound = self._socket.getsockname()[:2]
        self._site.take(self._ask())
        ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(ready,), name="hub-page", daemon=True),
            threading.Thread(target=self._keep_asking, name="hub-page-status", daemon=True),
        ]
        self._threads[0].start()
        ready.wait()
        self._threads[1].start()
        return self

    def close(self) -> None:
        """Stop serving, end requests in progress, and wait for them. May be called again."""
        self._stop.set()
        if self._loop is None:
            return
        self._threads[1].join(STOP)  # a hub that never answers must not delay us; the thread ends with its answer, or with the process
        if self._threads[0].is_alive():
            self._loop.call_soon_threadsafe(self._end)
        self._threads[0].join()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of the listener."""
        if self._socket is None:
            raise Closed("the page has no address before it is started")
        return self._bound

    @property
    def url(self) -> str:
        """The address for a browser on this host."""
        host, port = self.address
        host = "localhost" if host in WILDCARDS else host
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    @property
    def listeners(self) -> int:
        """The number of browsers that receive events now."""
        return self._site.listeners

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The asking thread.

    def _keep_asking(self) -> None:
        while not self._stop.wait(_until_half_second()):
            sample = self._ask()
            if self._stop.is_set():
                return
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._site.take, sample)
            except RuntimeError:  # the serving thread has ended
                return

    def _ask(self) -> Sample:
        try:
            status = self._status()
            sample = Sample(time.monotonic(), status, msgspec.json.encode(status))
        except Exception as error:
            if not self._has_failed:  # once, not every second
                _logger.warning("the hub's page can't get the status", exc_info=True)
            self._has_failed = True
            sentence = f"the hub's status failed: {type(error).__name__}: {error}"[:LONGEST_SENTENCE]
            return Sample(time.monotonic(), failure=sentence.encode(errors="backslashreplace").decode())
        self._has_failed = False
        return sample

    # The serving thread.

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except Exception:
            _logger.exception("the hub's page ended unexpectedly")
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        assert self._socket is not None
        self._loop = asyncio.get_running_loop()
        ready.set()  # it listens already: new clients wait until the server runs
        await self._server.serve(sockets=[self._socket])

    def _end(self) -> None:
        self._server.should_exit = True
        self._site.close()
        asyncio.get_running_loop().call_later(STOP, self._cut)

    def _cut(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class _Connection(H11Protocol):
    """A connection that is cut if it takes too long, or exceeds the limit."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger, self.access_log = _connection_logger, False
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(PATIENCE, self._give_up)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(PATIENCE, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _give_up(self) -> None:
        is_stream = self.scope is not None and self.scope["path"] == "/events"  # which is meant to last
        if not is_stream:
            self.transport.abort()


def _configuration(site: Site) -> uvicorn.Config:
    return uvicorn.Config(
        site.app,
        loop="asyncio",
        http=_Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,  # the process's logging is unchanged
        server_header=False,
        proxy_headers=False,
        backlog=MOST_CONNECTIONS,
    )


def _bind(listen: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    try:
        return socket.create_server(listen, family=family, backlog=MOST_CONNECTIONS)
    except OSError as error:
        error.add_note(f"while the hub's page tried to listen on {listen[0]} port {listen[1]}")
        raise


def _until_half_second() -> float:
    """Return the seconds until the middle of a second: samples taken there give each second of the history exactly one."""
    return 1 - (time.monotonic() - 0.5) % 1
