"""A collector for tests: an HTTP server on a real socket, which parses requests with the official messages."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

PROTOBUF = "application/x-protobuf"
KINDS: dict[str, tuple[type[Message], type[Message]]] = {
    "/v1/logs": (ExportLogsServiceRequest, ExportLogsServiceResponse),
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
}
Response = tuple[int, str, bytes, dict[str, str]]  # status, content type, body, headers
Answering = Callable[[list[str]], Response | None]


def rejection(status: int, message: str, **headers: str) -> Response:
    """Return the answer that refuses a request, as the specification wants it."""
    return status, PROTOBUF, Status(code=3, message=message).SerializeToString(), headers


class OtlpServer:
    """Inside the `with` block, a collector at `endpoint`. `items` has the names of spans and bodies of log records, in order."""

    def __init__(self, answer: Answering = lambda _: None, *, port: int = 0, tls: ssl.SSLContext | None = None):
        """answer: called with the items of a request; None: accept it."""
        self.items: list[str] = []
        self.requests: list[tuple[str, dict[str, str], Any]] = []  # path, headers, message
        self.arrived = threading.Condition()
        handler = type("Handler", (_Handler,), {"server_of_test": self, "answer_of_test": staticmethod(answer)})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_address[1]
        self.endpoint = f"http{'s' * (tls is not None)}://localhost:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def wait_for(self, count: int, timeout: float = 60) -> None:
        """Wait until so many items were accepted."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.items) >= count, timeout), self.items

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    server_of_test: OtlpServer
    answer_of_test: Answering

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        kind, response = KINDS[self.path]
        assert self.headers["Content-Type"] == PROTOBUF
        request: Any = kind()
        request.ParseFromString(body)
        items = names(request)
        status, content_type, content, headers = self.answer_of_test(items) or (200, PROTOBUF, response().SerializeToString(), {})
        with self.server_of_test.arrived:
            self.server_of_test.requests.append((self.path, dict(self.headers), request))
            if status == 200:
                self.server_of_test.items += items
            self.server_of_test.arrived.notify_all()
        self.send_response(status)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def handle(self) -> None:
        """Serve, until a client that was killed or gave up breaks the connection."""
        try:
            super().handle()
        except OSError:
            pass

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


def names(request: Any) -> list[str]:
    """Return the names of the spans, or the bodies of the log records, in a request."""
    spans = [span.name for one in getattr(request, "resource_spans", ()) for scope in one.scope_spans for span in scope.spans]
    logs = [log for one in getattr(request, "resource_logs", ()) for scope in one.scope_logs for log in scope.log_records]
    return spans + [log.body.string_value for log in logs]
