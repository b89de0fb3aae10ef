"""The summary of `kvspool append`."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from kvspool.cli import output

PATIENCE = 1.0  # seconds before the growing count is shown


class ProgressLine:
    """A line on stderr with the progress of a long operation; nothing without a terminal, or if it is quick."""

    def __init__(self, *, shows: bool) -> None:
        self._began = time.monotonic() if shows else float("inf")
        self._status: Any = None

    @property
    def seconds(self) -> float:
        """Return the duration of the operation so far, if a terminal shows it."""
        return time.monotonic() - self._began

    def say(self, words: str) -> None:
        """Replace the shown words."""
        if self.seconds < PATIENCE:
            return
        if self._status is None:
            self._status = output.console(stderr=True).status(words)
            self._status.start()
        self._status.update(words)

    def stop(self) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()


class Summary:
    """The appended records so far: shown at the end, and also during long operations."""

    def __init__(self, *, shows_progress: bool) -> None:
        self.count = 0
        self.first: int | None = None
        self.last: int | None = None
        self._progress = ProgressLine(shows=shows_progress)

    def add(self, sequences: range) -> None:
        """Add a batch."""
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
        words = f"appended {output.counted(self.count, 'record')}{self._where()}"
        print(words + (", on disk" if arguments.durable and self.count else ""), file=sys.stderr)

    def _places(self) -> dict[str, Any]:
        """Return the sequences of the records, for JSON."""
        return {"first_sequence": self.first, "last_sequence": self.last}

    def _where(self) -> str:
        """Return the sequences of the records, in words."""
        if self.first is None or self.last is None:
            return ""
        words = f": sequence {self.first}" if self.first == self.last else f": sequences {self.first} to {self.last}"
        return words + (", with records of other writers in between" if self.last - self.first >= self.count else "")
