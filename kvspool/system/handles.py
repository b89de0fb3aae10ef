"""Handles: owners of descriptors, mappings, locks or threads of this process, which can be neither copied nor pickled.

A copy would close the same descriptor a second time, when its number may be that of another file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, ClassVar, NoReturn, Protocol, Self


def refuse_copy(handle: object) -> NoReturn:
    """Raise the TypeError of a handle that is copied or pickled."""
    name = type(handle).__name__
    raise TypeError(
        f"cannot copy or pickle a {name}: it holds files, memory or locks of this process. "
        "Pass the path of the log instead, and open another handle there: with kvspool.open, ChunkQueue.open, ShardSet.open or HubRoot.open"
    )


class Handle:
    """A mix-in: refuses `copy.copy`, `copy.deepcopy` and `pickle`, and lets `dir` show only methods for users.

    HELPERS: public names of a class, besides those of its bases, for other modules of this project.
    """

    __slots__ = ()
    HELPERS: ClassVar[frozenset[str]] = frozenset(("HELPERS",))

    def __dir__(self) -> list[str]:
        helpers = frozenset[str]().union(*(vars(kind).get("HELPERS", ()) for kind in type(self).__mro__))
        return [name for name in super().__dir__() if name not in helpers and (not name.startswith("_") or name.endswith("__"))]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)


class ClosingHandle(Handle):
    """A mix-in for a handle that `with` closes."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Close the handle."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Closable(Protocol):
    """An object that is open until `close`."""

    def close(self) -> None:
        """Close it."""


def close_all(handles: Iterable[Closable]) -> None:
    """Close each of the handles, whatever the others raise; then raise the error of the first one that failed."""
    with ExitStack() as closing:  # the last one first: its error is the context of the earlier ones
        for handle in handles:
            closing.callback(handle.close)
