"""The settings of a log by name, so that `create(..., exist_ok=True)` can compare them with the requested ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvspool.engine import sizes
from kvspool.errors import LogExists
from kvspool.journal import Journal
from kvspool.journal import settings as stored
from kvspool.options import DURABILITIES
from kvspool.record import Codec
from kvspool.spool import Spool, format

_BYTES = ("capacity", "segment_bytes", "total_bytes", "item_bytes")


def of_log(log: Spool | Journal) -> dict[str, Any]:
    """Return the settings of an open log, by their names in `create`. Raises Corruption, Closed."""
    if isinstance(log, Spool):
        return of_header(log.header)
    found = stored.load(log.format.sidecar(log.path)) or stored.Settings(format=log.format.name)
    return of_journal(found, log.format.limits())


def of_header(header: format.ControlHeader) -> dict[str, Any]:
    """Return the settings in the header of a spool."""
    return {
        "format": "spool",
        "capacity": header.capacity,
        "codec": Codec(header.codec).name.lower(),
        "policy": format.POLICIES[header.policy],
        "reader_expiry": header.reader_expiry / 1e9 or None,
        "durability": DURABILITIES[header.durability],
        "sync_interval": header.sync_interval / 1e9 or None,
    }


def of_journal(chosen: stored.Settings, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings of a journal with these limits."""
    return {
        "format": chosen.format,
        "codec": chosen.codec,
        "durability": chosen.durability,
        "sync_interval": chosen.sync_interval,
        "retention": chosen.retention,
        "first_sequence": chosen.first_sequence,
        **limits,
    }


def refuse_others(path: Path, have: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise LogExists if a log's settings differ from those requested of `create`; the error names each difference.

    A name that only one of the two has counts only if both logs have one format. If `capacity` is missing in `asked`, any will do.
    """
    same_format = have["format"] == asked["format"]
    names = [name for name in asked if name in have and _stored(have[name]) != _stored(asked[name])] if same_format else ["format"]
    if names:
        words = ", ".join(f"{name} {_shown(name, have)} -> {_shown(name, asked)}" for name in names)
        raise LogExists(f"{path} exists with other settings (have -> asked): {words}. Open it with kvspool.open, or choose another path")


def _stored(value: Any) -> Any:
    """Return a setting as a log stores it: seconds in whole nanoseconds."""
    return round(value * 1e9) if isinstance(value, float) else value


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    value = settings[name]
    return sizes.show(value) if name in _BYTES else "none" if value is None else str(value)
