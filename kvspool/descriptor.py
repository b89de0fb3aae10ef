"""An open file and its number, which one object owns.

A signal handler may raise an exception between any two steps of Python code. A bare number is lost if that happens after the system has
opened the file, and closed twice if it happens after the system has closed it; the second close hits whatever file has the number by then.
So a number never stands alone: the system's answer goes into an object of C that closes it, within one call that no handler can interrupt.
"""

from __future__ import annotations

import os
import select
from types import TracebackType

from kvspool import system
from kvspool.errors import Closed


class Descriptor:
    """An open file; its last component is no link, and it closes on exec. It closes with the object at the latest.

    The owner is an `epoll` object made from the number. It knows nothing about the file; it forgets the number before it closes it, closes
    it once, and does so without any Python code when it is collected, so that no handler's exception is swallowed there.
    """

    __slots__ = ("__weakref__", "_file", "path")

    def __init__(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> None:
        """Open a file. Raises the system's OSError."""
        self.path = path
        self._file = next(map(select.epoll.fromfd, map(system.port.open, (path,), (flags | system.PRIVATE_FILE,), (mode,))))

    @property
    def number(self) -> int:
        """Return the number of the open file. Raises Closed."""
        try:
            return self._file.fileno()
        except ValueError:
            raise Closed(f"{os.fspath(self.path)} was closed by this handle; open the log again") from None

    @property
    def is_closed(self) -> bool:
        """Return whether it was closed."""
        return self._file.closed

    def close(self) -> None:
        """Close the file, unless that was done. Raises the system's OSError; it is closed then, too."""
        if not self._file.closed:
            system.port.close(self._file)

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
