"""Delta tables, written by any number of processes, exactly once. Needs the extra `tables`. See docs/tables.md.

    from hub.tables import dataset

    duckdb.sql("SELECT carrier, count(*) FROM flights GROUP BY 1")          # flights = dataset("output/flights")
"""

from __future__ import annotations

import os
from typing import Any

from hub.tables.errors import Overtaken, TableError


def dataset(path: str | os.PathLike[str], *, version: int | None = None) -> Any:
    """Return a table, or an older version of it, as a dataset of Arrow. path: a folder, or a URL. Raises TableError, MissingExtra."""
    from hub.tables.delta import Table

    return Table(path, version=version).dataset()


__all__ = ["Overtaken", "TableError", "dataset"]
