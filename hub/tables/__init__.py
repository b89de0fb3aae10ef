"""Delta tables, written by any number of processes, exactly once. Needs the extra `tables`. See docs/tables.md.

    from hub.tables import dataset

    duckdb.sql("SELECT carrier, count(*) FROM flights GROUP BY 1")          # flights = dataset("output/flights")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hub.tables.errors import Overtaken, TableError


def dataset(path: str | os.PathLike[str], *, version: int | None = None, options: Mapping[str, str] | None = None) -> Any:
    """Return a table, or an older version of it, as a dataset of Arrow.

    path: a folder, or a URL. options: of an object store, without secrets. Raises TableError, MissingExtra.
    """
    from hub.tables.delta import Table
    from hub.tables.place import TablePlace

    return Table(TablePlace.of(path, options), version=version).dataset()


__all__ = ["Overtaken", "TableError", "dataset"]
