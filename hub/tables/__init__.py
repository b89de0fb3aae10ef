"""Delta tables, written by any number of processes, exactly once. Needs the extra `tables`. See docs/tables.md."""

from hub.tables.errors import Overtaken, TableError

__all__ = ["Overtaken", "TableError"]
