"""A small HTTP listener for the state of a shipper or a mirror, on a Unix socket or a loopback port.

    /status     JSON
    /metrics    for Prometheus
    /healthz    200, or 503 with the reasons

There is no login: a Unix socket can be reached only by its owner, a loopback port by all users of the host. Requests change nothing.
"""

from __future__ import annotations

import http.client
import http.server
import ipaddress
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from hub.client.ship_metrics import exposition
from hub.client.ship_state import ShipState
from kvspool.system.handles import Handle

PATIENCE = 10.0  # seconds for a request or an answer
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Address = str | tuple[str, int]


def parse_address(text: str) -> Address:
    """Return the path of a Unix socket, or a loopback host and a port. Raises ValueError."""
    if "/" in text:
        return os.path.abspath(text)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address is a loopback HOST:PORT, or the path of a socket with a slash, not {text!r}")
    if host != "localhost" and not _is_loopback(host):
        raise ValueError(f"{host} can be reached from elsewhere; the state of a shipper is served on a loopback address or a socket only")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class StateListener(Handle):
    """Serves a state on its own threads, inside the `with` block. Raises OSError if the address is taken."""

    def __init__(self, address: Address, state: Callable[[], ShipState]) -> None:
        """state: called for each request."""
        handler = type("Handler", (_Handler,), {"state": staticmethod(state)})
        self._path = address if isinstance(address, str) else None
        if isinstance(address, str):
            _remove_stale(address)
            before = os.umask(0o177)  # only its owner may connect, as soon as it exists
            try:
                self._server: Any = _SocketServer(address, handler)
            finally:
                os.umask(before)
        else:
            self._server = _PortServer(address, handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvspool ship state", daemon=True)

    @property
    def address(self) -> str:
        """The address as users give it."""
        if self._path is not None:
            return self._path
        host, port = self._server.server_address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> StateListener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        if self._path is not None:
            os.unlink(self._path)


class _Server(socketserver.ThreadingMixIn):
    daemon_threads = True
    block_on_close = False


class _PortServer(_Server, http.server.HTTPServer):
    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without the look-up of a name


class _SocketServer(_Server, socketserver.UnixStreamServer):
    pass


class _Handler(http.server.BaseHTTPRequestHandler):
    state: Callable[[], ShipState]
    timeout = PATIENCE

    def do_GET(self) -> None:
        if isinstance(self.client_address, tuple) and self.headers.get("Host", "").rpartition(":")[0].lower() not in LOOPBACK:
            self._answer(421, b"this address has no such name\n")  # a web page that reaches it through a name of its own
            return
        state = self.state()
        if self.path == "/status":
            self._answer(200, msgspec.json.encode(state), "application/json")
        elif self.path == "/metrics":
            self._answer(200, exposition(state), CONTENT_TYPE)
        elif self.path == "/healthz":
            troubles = state.troubles()
            self._answer(503 if troubles else 200, ("; ".join(troubles) or "ok").encode(errors="backslashreplace") + b"\n")
        else:
            self._answer(404, b"there are /status, /metrics and /healthz\n")

    def _answer(self, code: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response_only(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


class _Connection(http.client.HTTPConnection, Handle):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


def ask(address: Address, path: str) -> tuple[int, bytes]:
    """Return the code and the body of an answer. Raises OSError."""
    connection = _Connection(address) if isinstance(address, str) else http.client.HTTPConnection(*address, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        shown = address if isinstance(address, str) else ":".join(map(str, address))
        why = getattr(error, "strerror", None) or repr(error)
        raise OSError(f"no shipper serves its state at {shown} ({why}); start one with --status {shown}") from error
    finally:
        connection.close()


def _remove_stale(path: str) -> None:
    """Remove the socket of a process that has ended. Any other file stays, and then the address is taken."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError:
        pass
    finally:
        probe.close()
