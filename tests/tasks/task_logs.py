"""Logs with tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvspool

KINDS = ("spool", "kvj", "sej", "fflg")


def create(path: Path, kind: str, **options: Any) -> Any:
    """Create a log of a kind."""
    options = {"capacity": "1MiB", **options} if kind == "spool" else {"format": kind, **options}
    return kvspool.create(path, **options)
