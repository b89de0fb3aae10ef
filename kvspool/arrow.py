"""Records as Arrow columns, in both directions, without a Python object for a row. Needs the extra `arrow`."""

from __future__ import annotations

from kvspool.engine.batches import BATCH, LARGE_BATCH, WINDOW, batches, next_batch, read, table
from kvspool.engine.columns import CODED_SCHEMA, RECORDS, SCHEMA, Columns, parts
from kvspool.journal.columns import ColumnRows, JournalColumns, Records

__all__ = [
    "BATCH",
    "CODED_SCHEMA",
    "LARGE_BATCH",
    "RECORDS",
    "SCHEMA",
    "WINDOW",
    "ColumnRows",
    "Columns",
    "JournalColumns",
    "Records",
    "batches",
    "next_batch",
    "parts",
    "read",
    "table",
]
