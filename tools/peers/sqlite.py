"""A table of SQLite in WAL mode."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from peers.peer import PATIENCE, Peer, Place, Writer, names

SYNCHRONOUS = {"process": "NORMAL", "disk": "FULL"}
INSERT = "INSERT INTO record (value) VALUES (?)"
POLL = 0.001  # seconds between two looks of a follower


class _TableWriter:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def append(self, value: bytes) -> None:
        """Insert one row, in a transaction of its own."""
        self._connection.execute(INSERT, (value,))

    def append_many(self, values: list[bytes]) -> None:
        """Insert all rows in one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(INSERT, [(value,) for value in values])
        self._connection.execute("COMMIT")


class Sqlite(Peer):
    """A table whose primary key is the sequence."""

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Yield a function that creates a database."""
        found = names()

        def create() -> Place:
            place = Place(str(folder), f"{self.key}-{next(found)}.db", level)
            with closing(_opened(place)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("CREATE TABLE record (sequence INTEGER PRIMARY KEY, value BLOB)")
            return place

        yield create

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Open the database."""
        with closing(_opened(place)) as connection:
            yield _TableWriter(connection)

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Select all rows in order."""
        with closing(_opened(place)) as connection:
            yield from connection.execute("SELECT sequence, value FROM record ORDER BY sequence LIMIT ?", (count,))

    @contextmanager
    def follow(self, place: Place) -> Iterator[Iterator[bytes]]:
        """Look for new rows each millisecond: SQLite has no way to wait for another process."""
        with closing(_opened(place)) as connection:
            ((last,),) = connection.execute("SELECT coalesce(max(sequence), 0) FROM record").fetchall()
            yield _new_values(connection, last)


def _new_values(connection: sqlite3.Connection, last: int) -> Iterator[bytes]:
    while True:
        rows = connection.execute("SELECT sequence, value FROM record WHERE sequence > ? ORDER BY sequence", (last,)).fetchall()
        yield from (value for _, value in rows)
        last = rows[-1][0] if rows else last
        time.sleep(POLL)


def _opened(place: Place) -> sqlite3.Connection:
    connection = sqlite3.connect(place.path, timeout=PATIENCE, isolation_level=None)
    connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS[place.level]}")
    return connection


PEERS = {"sqlite": Sqlite("sqlite", "SQLite, WAL")}
