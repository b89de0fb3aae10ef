"""Small files of JSON, TOML or text: read whole, within a bound, and parsed so that every fault is a ValueError.

A file may have been truncated, overwritten or edited manually. Parsers raise errors of many classes for such bytes, some without the
position. The functions here raise only ValueError, whose text gives the fault and its position: a byte, or a path in the document. Callers
convert it to their own error, with the file's path and advice. Of a key that occurs twice in JSON the last one counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvspool.errors import Corruption
from kvspool.system import disk

T = TypeVar("T")


def load(path: Path, kind: type[T], most: int, fault: str, advice: str) -> T:
    """Return the parsed JSON of a file. Raises Corruption "PATH FAULT: details; ADVICE", NotAFile, or the system's OSError.

    most: maximum size of the file in bytes.
    """
    try:
        return from_json(read(path, most), kind)
    except ValueError as error:
        raise Corruption(f"{path} {fault}: {error}; {advice}") from None


def read(path: Path, most: int) -> bytes:
    """Return all bytes of a file. Raises ValueError for more than `most`, NotAFile, or the system's OSError."""
    data = disk.read(path, most + 1)
    if len(data) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return data


def text(data: bytes) -> str:
    """Return UTF-8 as text. Raises ValueError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def from_json(data: bytes, kind: type[T]) -> T:
    """Parse JSON as an object of a type that msgspec supports. Raises ValueError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        text(data)  # the parser counts from the beginning of the string
        raise ValueError(f"it is not UTF-8: {error}") from None
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except msgspec.DecodeError as error:
        if "UTF-8" in str(error):  # msgspec 0.23 has no UnicodeDecodeError
            text(data)
        where = "" if "(byte " in str(error) else f" (at byte {len(data)})"
        raise ValueError(f"{error}{where}") from None


def from_toml(data: bytes) -> dict[str, Any]:
    """Parse TOML. Raises ValueError."""
    import tomllib

    try:
        return tomllib.loads(text(data))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
