"""A connection to a collector: OTLP over HTTP, with requests in protobuf, one at a time.

The answer decides what happens to the request:

    status 200 to 299       accepted; the answer may say that items of it were rejected
    429, 502, 503, 504      it is sent again, after the time in Retry-After
    400 to 599, from OTLP   the collector will never accept this request: 400, 413 and others, with a body in protobuf or JSON
    any other               not the request is to blame, but the address, the credentials, or a server in between: it is sent again

A server that isn't OTLP at all answers 400 or 500, too, for example to plain text at its port for TLS. Such an answer blames the request
only after the server has accepted another one.
"""

from __future__ import annotations

import email.utils
import gzip
import http.client
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC
from urllib.parse import urlsplit

import msgspec

from kvspool import system
from kvspool.errors import KvspoolError
from kvspool.otel.errors import CollectorAway, CollectorError, CollectorRefuses, CollectorSilent, RequestRejected
from kvspool.otel.signals import JSON, PROTOBUF, CollectorAnswer, parse_answer, reason
from kvspool.system.handles import Handle

LATER = (429, 502, 503, 504)
TOO_LARGE = (413, 431)
ABOUT_ACCESS = (401, 403, 404, 405, 407)
CONNECTING = 10.0  # seconds
LEAST_COMPRESSED = 1024  # bytes; smaller requests are sent as they are
LARGEST_ANSWER = 1 << 20  # bytes
LONGEST_WORDS = 300  # characters of the collector's
SILENCE = 30.0  # seconds without a byte of the answer


class CollectorAccess(msgspec.Struct, frozen=True):
    """Credentials and trusted authorities. headers: sent with each request; context: for https."""

    headers: Mapping[str, str] = {}
    context: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return "<CollectorAccess>"  # keeps tokens out of logs


class CollectorEndpoint(msgspec.Struct, frozen=True):
    """The address of a collector."""

    is_secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> CollectorEndpoint:
        """Return the endpoint in a URL such as http://localhost:4318. Raises ValueError."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"an endpoint is http(s)://HOST:PORT, not {text!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not text.isascii() or any(char <= " " for char in text):
            raise ValueError(f"an endpoint is http(s)://HOST:PORT, such as http://localhost:4318, not {text!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(
                f"an endpoint has only a host, a port and a path; give credentials as headers or a token: https://{parts.hostname}"
            )
        is_secure = parts.scheme == "https"
        return cls(is_secure, parts.hostname, (443 if is_secure else 80) if port is None else port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.is_secure}://{host}:{self.port}{self.path}"


class Collector(Handle):
    """Sends requests over one connection, which is opened again after an error. For one thread."""

    def __init__(
        self, endpoint: CollectorEndpoint, access: Callable[[], CollectorAccess], *, compresses: bool = True, silence: float = SILENCE
    ) -> None:
        """access: called for each connection, so that credentials can change. silence: seconds to wait for each part of an answer."""
        self.endpoint = endpoint
        self.silence = silence
        self._access = access
        self._compresses = compresses
        self._headers: dict[str, str] = {}
        self._connection: http.client.HTTPConnection | None = None
        self._has_accepted = False

    def send(self, signal: bytes, body: bytes) -> CollectorAnswer:
        """Send one request, and return the answer once it is accepted. Raises the errors of `kvspool.otel.errors`."""
        try:
            if self._connection is not None:
                try:
                    return self._exchange(self._connection, signal, body)
                except (ConnectionError, http.client.BadStatusLine, ssl.SSLError):
                    self.close()  # the collector has closed an idle connection
            return self._exchange(self._connect(), signal, body)
        except ssl.SSLError as error:
            self.close()
            raise self._not_secured(error) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._away(error) from None

    def _connect(self) -> http.client.HTTPConnection:
        endpoint = self.endpoint
        try:
            access = self._access()
        except (KvspoolError, OSError) as error:  # files are replaced while this runs
            raise CollectorRefuses(f"{endpoint}: {error}") from error
        self._headers = {**access.headers, "Content-Type": PROTOBUF, "User-Agent": "kvspool"}
        place = (endpoint.host, endpoint.port)
        connection: http.client.HTTPConnection
        if endpoint.is_secure:
            connection = http.client.HTTPSConnection(*place, timeout=CONNECTING, context=access.context)
        else:
            connection = http.client.HTTPConnection(*place, timeout=CONNECTING)
        self._connection = connection
        connection.connect()
        return connection

    def _exchange(self, connection: http.client.HTTPConnection, signal: bytes, body: bytes) -> CollectorAnswer:
        headers = self._headers
        if self._compresses and len(body) >= LEAST_COMPRESSED:
            body = gzip.compress(body, 1, mtime=0)
            headers = {**headers, "Content-Encoding": "gzip"}
        connection.sock.settimeout(self.silence)
        connection.request("POST", f"{self.endpoint.path}/v1/{signal.decode()}", body, headers)
        response = connection.getresponse()
        answer = response.read(LARGEST_ANSWER + 1)
        if response.will_close or len(answer) > LARGEST_ANSWER:
            self.close()
        return self._accepted(signal, response, answer)

    def _accepted(self, signal: bytes, response: http.client.HTTPResponse, body: bytes) -> CollectorAnswer:
        """Return the answer if the request was accepted. Raises the error of its status."""
        content_type = response.headers.get_content_type() if "Content-Type" in response.headers else ""
        status = response.status
        if 200 <= status < 300:
            try:
                answer = parse_answer(signal, content_type, body)
            except ValueError as error:
                self.close()
                raise CollectorRefuses(f"{self.endpoint} is no collector: {_plain(str(error))}; check the address") from None
            self._has_accepted = True
            return CollectorAnswer(answer.rejected, _plain(answer.message))
        words = _plain(reason(content_type, body))
        said = f"{self.endpoint} answers {status} {_plain(response.reason)}{f': {words}' if words else ''}"
        if status in LATER:
            away = CollectorAway(said)
            away.retry_after = _seconds(response.headers.get("Retry-After"))
            raise away
        is_otlp = content_type in (PROTOBUF, JSON)
        if status in TOO_LARGE or status >= 400 and status not in ABOUT_ACCESS and (is_otlp or status < 500 and self._has_accepted):
            raise RequestRejected(said)
        self.close()  # the next connection reads the credentials again
        raise CollectorRefuses(f"{said}; {_advice(status)}")

    def _away(self, error: Exception) -> CollectorAway:
        if isinstance(error, TimeoutError):
            return CollectorSilent(f"{self.endpoint}: no answer in time; start the collector, or check the address")
        words = str(error) or repr(error)
        return CollectorAway(f"{self.endpoint}: {_plain(words)}; start the collector, or check the address")

    def _not_secured(self, error: ssl.SSLError) -> CollectorError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return CollectorRefuses(f"{self.endpoint}: {error.verify_message}; check the name in the address, and --ca")
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            return CollectorRefuses(f"{self.endpoint}: the server doesn't speak TLS at this port; use http://, or the port for https")
        if error.reason in ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"):
            return CollectorRefuses(f"{self.endpoint}: the server wants a certificate of the client; give --certificate and --key")
        return CollectorAway(f"{self.endpoint}: {_plain(error.reason or str(error))}")

    def abort(self) -> None:
        """Break the connection: the request under way raises CollectorAway. Can be called by other threads."""
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _advice(status: int) -> str:
    if status in (401, 403, 407):
        return "check the token, and the headers in OTEL_EXPORTER_OTLP_HEADERS"
    if status >= 500:
        return "a server before the collector may have failed"
    return "check the path in the address" if status in (404, 405) else "check the address: http or https, host and port"


def _seconds(value: str | None) -> float | None:
    """Return the seconds of a header Retry-After: a number, or a date."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value[:9])
    try:
        at = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, at.timestamp() - system.port.now() / 1e9)


def _plain(words: str) -> str:
    """Return foreign words without control characters, and not too long."""
    line = " ".join("".join(char if char.isprintable() else " " for char in words).split())
    return line if len(line) <= LONGEST_WORDS else f"{line[:LONGEST_WORDS]}..."
