"""Log messages about other parties: escaped, so that they can't forge lines; limited in rate, so that they can't fill the disk."""

from __future__ import annotations

import logging

from hub.security.quotas import TokenBucket

LINES = 20  # per second, of each kind
LONGEST = 500  # characters of text from another party
_logger = logging.getLogger("kvspool.hub")


class EventLog:
    """The warnings of one kind. Used by all threads."""

    def __init__(self, kind: str) -> None:
        """kind: a plural noun, for the line with the number of omitted messages."""
        self._kind = kind
        self._lines = TokenBucket(LINES)
        self._left_out = 0

    def warn(self, words: str, *arguments: object) -> None:
        """Log a warning with escaped arguments, or count it as omitted."""
        if not self._lines.try_take(1):
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        if left_out:
            _logger.warning("%d more %s were not logged", left_out, self._kind)
        _logger.warning(words, *(escape(str(argument)) for argument in arguments))


def escape(text: str) -> str:
    """Return a text that is safe to log: plain ASCII, limited in length, everything else as \\x1b."""
    return text[:LONGEST].encode("unicode_escape").decode("ascii")
