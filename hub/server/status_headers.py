"""Headers of gRPC over HTTP/2: the request's, and those with the end of a call."""

from __future__ import annotations

import base64
import binascii
import urllib.parse

from hub.server.call import Code, Metadata, Status
from kvspool import system

CONTENT_TYPE = b"application/grpc"
TRAILERS_ONLY = [(b":status", b"200"), (b"content-type", CONTENT_TYPE)]  # the headers of each response, before its own
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_SAFE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")  # characters of a message that stay
_LONGEST = 2048  # bytes of a message; a client takes 8 KiB of headers, and one byte may become three
_RESERVED = (b":", b"grpc-")
_OURS = {b"te", b"content-type", b"user-agent", b"accept-encoding", b"host"}


class CallHeaders:
    """The parsed headers of a call. deadline: of the monotonic clock, in seconds."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Parse them. Raises Status for what is no call of gRPC."""
        first = dict(reversed(headers))
        if first.get(b":method") != b"POST" or not first.get(b"content-type", b"").startswith(CONTENT_TYPE):
            raise Status(Code.UNIMPLEMENTED, "this server has only methods of gRPC")
        if b"content-length" in first:
            raise Status(Code.INTERNAL, "a call of gRPC has no content-length")
        if first.get(b"grpc-encoding", b"identity") != b"identity":
            raise Status(Code.UNIMPLEMENTED, "compressed messages are not supported")
        self.method = first.get(b":path", b"").decode("ascii", "replace")
        self.deadline = _deadline(first.get(b"grpc-timeout"))
        self.metadata: Metadata = []
        for name, value in headers:
            if not name.startswith(_RESERVED) and name not in _OURS:
                self.metadata += _decoded(name, value)


def _deadline(timeout: bytes | None) -> float | None:
    if timeout is None:
        return None
    unit = _SECONDS.get(timeout[-1:])
    if unit is None or not timeout[:-1].isdigit() or len(timeout) > 9:
        raise Status(Code.INVALID_ARGUMENT, "the header grpc-timeout is malformed")
    return system.port.monotonic() + int(timeout[:-1]) * unit


def _decoded(name: bytes, value: bytes) -> Metadata:
    key = name.decode("ascii", "replace")
    if not key.endswith("-bin"):
        return [(key, value.decode("utf-8", "surrogateescape"))]
    try:
        return [(key, base64.b64decode(one + b"=" * (-len(one) % 4), validate=True)) for one in value.split(b",")]
    except binascii.Error:
        raise Status(Code.INVALID_ARGUMENT, f"the header {key[:100]} is not in base64") from None


def encoded(metadata: Metadata) -> list[tuple[bytes, bytes]]:
    """Return metadata as headers."""
    return [
        (name.encode(), base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("ascii", "replace"))
        for name, value in metadata
    ]


def end_headers(status: Status) -> list[tuple[bytes, bytes]]:
    """Return the headers that end a call."""
    headers = [(b"grpc-status", str(int(status.code)).encode())]
    if status.message:
        headers.append((b"grpc-message", urllib.parse.quote(status.message.encode()[:_LONGEST], safe=_SAFE).encode()))
    return headers + encoded(status.trailers)
