"""The hub's web page: a listener of its own, in threads of its own, that shows what a hub says of itself.

    with HubPage(server.status, ("127.0.0.1", 8816)) as page:
        print(page.url)

One thread asks the hub for its status each second; another serves (`hub.web.site`). A hub that fails to say how it is, or doesn't answer at
all, is shown as that, and is not healthy. Whoever looks takes nothing from the hub but that one question a second: connections are
counted and bounded, and one that asks nothing, or doesn't take its answer, is cut. Needs the extra `hub`.
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

from hub.protocol.status import HubStatus
from kvspool.errors import Closed, MissingExtra
from kvspool.handles import Handle

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from hub.web.site import Sample, Site
except ModuleNotFoundError as error:
    raise MissingExtra(f"the hub's page needs a package that isn't installed ({error}); pip install 'kvspool[hub]'") from error

PATIENCE = 30.0  # seconds that a connection may take to ask and be answered, or to take the event that it was sent
MOST_CONNECTIONS = 64  # at once; each is for one answer
STOP = 2.0  # seconds that stopping waits for the hub's last word, and for answers under way
LONGEST_SENTENCE = 500  # characters of what a failure says
WILDCARDS = ("", "0.0.0.0", "::")

_logger = logging.getLogger("kvspool")
_connection_logger = logging.getLogger("kvspool.page")
_connection_logger.addFilter(lambda line: line.levelno != logging.WARNING)  # of bad requests: strangers would fill the log


class HubPage(Handle):
    """The page of one hub. `start` and `close` it, or use it in a `with` statement; closed, it stays closed."""

    def __init__(self, status: Callable[[], HubStatus], listen: tuple[str, int] = ("127.0.0.1", 0), names: Iterable[str] = ()) -> None:
        """Take what says how the hub is, and where to listen: a host and a port, 0 for any that is free.

        `status` is called from a thread of the page's own, once a second. `names` are further names or addresses under which browsers
        reach the page, without a port: of those that they don't know, loopback and host aside, requests are refused.
        """
        self._status = status
        self._listen = self._bound = listen
        self._site = Site([*names, *([listen[0]] if listen[0] not in WILDCARDS else [])])
        self._server = uvicorn.Server(_configuration(self._site))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._has_failed = False

    def start(self) -> Self:
        """Listen, ask the hub a first time, and return when browsers are served. Raises OSError if the port is taken, Closed."""
        if self._stop.is_set():
            raise Closed("the page was closed; make another one")
        assert self._socket is None, "it was started already"
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
        """Stop serving, end what is under way, and wait for it. May be called again."""
        self._stop.set()
        if self._loop is None:
            return
        self._threads[1].join(STOP)  # a hub that never answers must not keep us; its thread ends with its answer, or with the process
        if self._threads[0].is_alive():
            self._loop.call_soon_threadsafe(self._end)
        self._threads[0].join()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        if self._socket is None:
            raise Closed("the page listens nowhere before it is started")
        return self._bound

    @property
    def url(self) -> str:
        """Where a browser on this host finds it."""
        host, port = self.address
        host = "localhost" if host in WILDCARDS else host
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    @property
    def listeners(self) -> int:
        """Browsers that get events now."""
        return self._site.listeners

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The thread that asks.

    def _keep_asking(self) -> None:
        while not self._stop.wait(_until_half_second()):
            sample = self._ask()
            if self._stop.is_set():
                return
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._site.take, sample)
            except RuntimeError:  # nobody serves any more
                return

    def _ask(self) -> Sample:
        try:
            status = self._status()
            sample = Sample(time.monotonic(), status, msgspec.json.encode(status))
        except Exception as error:
            if not self._has_failed:  # once, not each second
                _logger.warning("the hub's page can't get the status", exc_info=True)
            self._has_failed = True
            sentence = f"the hub fails to say how it is: {type(error).__name__}: {error}"[:LONGEST_SENTENCE]
            return Sample(time.monotonic(), failure=sentence.encode(errors="backslashreplace").decode())
        self._has_failed = False
        return sample

    # The thread that serves.

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except Exception:
            _logger.exception("the hub's page ended by itself")
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        assert self._socket is not None
        self._loop = asyncio.get_running_loop()
        ready.set()  # it listens already: who comes now waits until the server runs
        await self._server.serve(sockets=[self._socket])

    def _end(self) -> None:
        self._server.should_exit = True
        self._site.close()
        asyncio.get_running_loop().call_later(STOP, self._cut)

    def _cut(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class _Connection(H11Protocol):
    """A connection that is cut if it takes too long, or is one too many."""

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
        is_stream = self.scope is not None and self.scope["path"] == "/events"  # which is to last
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
        log_config=None,  # nothing of the process's logging is changed
        server_header=False,
        proxy_headers=False,
        backlog=MOST_CONNECTIONS,
    )


def _bind(listen: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    try:
        return socket.create_server(listen, family=family, backlog=MOST_CONNECTIONS)
    except OSError as error:
        error.add_note(f"the hub's page was to listen on {listen[0]} port {listen[1]}")
        raise


def _until_half_second() -> float:
    """Return the seconds until the middle of a second: asked there, no second of the history goes without a sample, or gets two."""
    return 1 - (time.monotonic() - 0.5) % 1
