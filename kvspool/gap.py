"""The Gap: a reader gets it instead of records that are lost."""

from __future__ import annotations

import msgspec


class Gap(msgspec.Struct, frozen=True, gc=False):
    """The records first..last (both included) that a reader can no longer get.

    reason: "overrun" (overwritten before they were read), "expired" (overwritten because a durable reader had not moved for the log's
    `reader_expiry`), "resized" (they had no room when the log was made smaller), "trimmed" (removed from a journal), "damaged" (their bytes
    don't match their checksums, or don't exist), "machine restart" (numbers that were left out, because a crash of the machine may have
    taken their records) or "missing" (numbers that the writer of a journal left out on purpose, since its source had lost them). path: the
    directory of the log.
    """

    first: int
    last: int
    reason: str
    path: str = ""

    @property
    def count(self) -> int:
        """Return how many sequences are missing."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        if self.reason == "machine restart":
            left_out = f"sequences {self.first} to {self.last} of {self.path} left out (machine restart)"
            return f"{left_out}; its stats say whether records were lost"
        if self.count == 1:
            return f"1 record lost ({self.reason}): sequence {self.first} of {self.path}"
        return f"{self.count} records lost ({self.reason}): sequences {self.first} to {self.last} of {self.path}"
