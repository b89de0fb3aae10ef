"""Common parts of the answers of the hub's page."""

from __future__ import annotations

import msgspec
from starlette.responses import PlainTextResponse, Response

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")  # names in a browser's address


def json_answer(answer: msgspec.Struct) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


def sentence(code: int, words: str, headers: dict[str, str] | None = None) -> Response:
    """Return an answer in words."""
    return PlainTextResponse(f"{words}\n", code, headers)


def without_port(host: str) -> str:
    """Return the name in the header Host, in lower case."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
