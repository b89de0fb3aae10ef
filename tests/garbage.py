"""Contents that a small file may have after a crash, a disk error or a wrong edit."""

from __future__ import annotations

import re
from collections.abc import Iterator

DEEP = 100_000  # brackets, far beyond what parsers follow
HUGE = b"9" * 5000


def of_any_file(sound: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    """Yield bytes that damage any kind of file: what they are, and they. most: bytes that the file may have."""
    yield "empty", b""
    yield "NUL bytes", bytes(len(sound))
    yield "not UTF-8", b"\xff" * 20
    yield "too large", sound.ljust(most + 1, b" ")
    for at in range(1, len(sound), max(1, len(sound) // 8)):
        yield f"cut at {at}", sound[:at]
        yield f"a byte at {at} that is not UTF-8", sound[:at] + b"\xff" + sound[at + 1 :]
        yield f"a NUL at {at}", sound[:at] + b"\0" + sound[at + 1 :]


def of_json(sound: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    """Yield what damages a file of JSON, too."""
    yield from of_any_file(sound, most)
    for other in (b"[]", b"{}", b'"text"', b"7", b"null", b"true", b"1e999", HUGE, b"{" * 10, b'{"a":1,"a":2}', b'{"\xff":1}'):
        yield f"other JSON {other[:20]!r}", other
    for deep in (b"[" * DEEP, b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP):
        yield f"deep {deep[:5]!r}", deep
    for match in re.finditer(rb'(?<=[:\[,])(?:"[^"]*"|-?[0-9][0-9.e+-]*|true|false|null)', sound):
        before, after = sound[: match.start()], sound[match.end() :]
        for other in (b"null", b"-1", b"0", b"1.5", b"1e308", HUGE, b"9" * 30, b'"\xff"', b'"x"', b"[]", b"{}", b"[" * DEEP):
            yield f"{other[:20]!r} at {match.start()}", before + other + after
    if sound.startswith(b"{") and b":" in sound:
        key = sound[1 : sound.index(b":")]
        yield "a key twice", sound[:-1] + b"," + key + b":[]}"
