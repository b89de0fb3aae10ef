"""What is logged of what others do: plain and short, so that nobody can forge a line, and so many lines that nobody can fill the disk."""

from __future__ import annotations

import logging

from hub.security.quotas import TokenBucket

LINES = 20  # a second at most of each kind
LONGEST = 500  # characters of what somebody else said
_logger = logging.getLogger("kvspool.hub")


class EventLog:
    """The warnings of one kind. Used by all threads."""

    def __init__(self, kind: str) -> None:
        """kind: of what, in the plural, for the line that says how many were left out."""
        self._kind = kind
        self._lines = TokenBucket(LINES)
        self._left_out = 0

    def warn(self, words: str, *arguments: object) -> None:
        """Log what happened, with nothing in the arguments that a terminal or a reader of lines would obey; or count it as left out."""
        if not self._lines.try_take(1):
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        if left_out:
            _logger.warning("%d more %s were not logged", left_out, self._kind)
        _logger.warning(words, *(escape(str(argument)) for argument in arguments))


def escape(text: str) -> str:
    """Return a text that may be logged: plain ASCII, not too long, everything else as \\x1b."""
    return text[:LONGEST].encode("unicode_escape").decode("ascii")
