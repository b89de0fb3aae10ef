"""What `kvspool append` has appended."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from kvspool.cli import output

PATIENCE = 1.0  # seconds before the count is shown while it grows


class Progress:
    """A line on stderr that says how far long work is; nothing where nobody watches, or while it is quick."""

    def __init__(self, *, shows: bool) -> None:
        self._began = time.monotonic() if shows else float("inf")
        self._status: Any = None

    @property
    def seconds(self) -> float:
        """Return how long the work has taken so far, where somebody watches."""
        return time.monotonic() - self._began

    def say(self, words: str) -> None:
        """Show these words in place of the last ones."""
        if self.seconds < PATIENCE:
            return
        if self._status is None:
            self._status = output.console(stderr=True).status(words)
            self._status.start()
        self._status.update(words)

    def stop(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()


class Summary:
    """What was appended so far: shown while it grows, if that takes long, and in the end."""

    def __init__(self, *, shows_progress: bool) -> None:
        self.count = 0
        self.first: int | None = None
        self.last: int | None = None
        self._progress = Progress(shows=shows_progress)

    def add(self, sequences: range) -> None:
        """Count a batch in."""
        if not sequences:
            return
        self.count += len(sequences)
        self.first = sequences[0] if self.first is None else self.first
        self.last = sequences[-1]
        seconds = self._progress.seconds
        if seconds >= PATIENCE:
            self._progress.say(f"appended {self.count:,} records, {self.count / seconds:,.0f}/s")

    def print(self, arguments: Namespace) -> None:
        """Write the summary."""
        self._progress.stop()
        if arguments.json:
            output.print_json({"appended": self.count, **self._places(), "synced": arguments.durable})
            return
        words = f"appended {self.count:,} {'record' if self.count == 1 else 'records'}{self._where()}"
        print(words + (", on disk" if arguments.durable and self.count else ""), file=sys.stderr)

    def _places(self) -> dict[str, Any]:
        """Return where the records are, as JSON says it."""
        return {"first_sequence": self.first, "last_sequence": self.last}

    def _where(self) -> str:
        """Return where the records are, in words."""
        if self.first is None or self.last is None:
            return ""
        words = f": sequences {self.first} to {self.last}"
        return words + (", with records of others in between" if self.last - self.first >= self.count else "")
