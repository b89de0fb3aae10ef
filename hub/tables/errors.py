"""The errors of Delta tables. Messages begin with a stable code, because Spark loses the classes of exceptions."""

from __future__ import annotations

from kvspool.errors import KvspoolError


class TableError(KvspoolError):
    """A table can't be read or written as requested. Nothing was committed."""

    exit_code = 3


class Overtaken(TableError):
    """Another writer has committed under the same name since; the rows of this commit are not in the table.

    found: the number that is stored now; None without one.
    """

    def __init__(self, message: str, found: int | None) -> None:
        super().__init__(message)
        self.found = found
