"""The positions of logs, as campaigns see them from outside, and commands of kvspool in the process of a campaign."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import kvspool
from kvspool import cli


def command(*words: object) -> None:
    """Run a command of kvspool in this process, which takes less time than a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = cli.main([str(word) for word in words])
    if code:
        raise OSError(f"{words} ended with {code}: {said.getvalue()}")


def end(path: Path) -> int:
    """Return the next sequence of a log."""
    with kvspool.open(path) as log:
        return log.end()


def positions(path: Path) -> list[int]:
    """Return the positions of the shippers' readers in a log: one for each hub that has begun."""
    with kvspool.open(path) as log:
        return [reader.sequence for reader in log.readers() if reader.name.startswith("ship.") and reader.sequence is not None]


def position(path: Path) -> int | None:
    """Return the position of the shipper's reader in a log, None if it has none yet."""
    return next(iter(positions(path)), None)
