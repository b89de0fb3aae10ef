"""Small files that hold JSON, TOML or text: read whole, within a bound, and parsed so that every fault of theirs is a ValueError.

A file of ours may have been cut, overwritten or edited by hand. Parsers meet such bytes with errors of many classes, some of which say
nothing of the place. The functions here raise ValueError alone, whose text says what is wrong and where: at a byte, or at a path in the
document. Callers make the error of their own of it, with the file's path and what to do. Of a key that is there twice in JSON the last
one counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvspool.errors import Corruption
from kvspool.system import disk

T = TypeVar("T")


def load(path: Path, kind: type[T], most: int, fault: str, advice: str) -> T:
    """Return what the JSON in a file says. Raises Corruption "PATH FAULT: what is wrong; ADVICE", NotAFile, or the system's OSError.

    most: bytes that the file may have.
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
    """Return what JSON says, as an object of a type that msgspec knows. Raises ValueError."""
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
        where = "" if "(byte " in str(error) else f" (at byte {len(data)})"
        raise ValueError(f"{error}{where}") from None


def from_toml(data: bytes) -> dict[str, Any]:
    """Return what TOML says. Raises ValueError."""
    import tomllib

    try:
        return tomllib.loads(text(data))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
