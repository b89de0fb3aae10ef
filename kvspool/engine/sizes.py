"""Sizes in readable notation: 64 MiB, 1.5GB, 4096."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse(size: int | str) -> int:
    """Return a size in bytes. KiB, MiB, GiB, TiB (or K, M, G, T) count by 1024; kB, MB, GB, TB by 1000. ValueError otherwise."""
    if isinstance(size, int):
        return size
    match = _PATTERN.fullmatch(size)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"a size is a number with a unit such as 64MiB or 2GB, not {size!r}")
    return round(float(match[1]) * _UNITS[match[2].lower()])


def show(size: float) -> str:
    """Return a size in readable notation: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
