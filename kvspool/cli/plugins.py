"""Commands and logs of packages above this one, found through the entry-point group `kvspool.commands`.

An entry point names a module with

    add_commands(subparsers) -> None     add sub-parsers, each with `set_defaults(run=...)`
    open_log(path) -> OpenLog | None     optional: open this package's log at the path, None if it isn't its own
    checks() -> Iterable[Check]          optional: its checks for `doctor`

so that `read`, `tail` and `stats` open the logs of all installed packages, while this package imports nothing above it. Plugins are
imported only when they are needed. A failing plugin causes one line on stderr, and the command continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import kvspool
from kvspool import queue
from kvspool.cli import output
from kvspool.cli.queues import QueueLog
from kvspool.errors import KvspoolError, NotALog
from kvspool.options import Isolation, OnGap, Start

GROUP = "kvspool.commands"


class OpenLog(Protocol):
    """The interface of a log that the commands need, of any package.

    `stats` returns a `msgspec.Struct`, or a list of them for a log of several logs. Records are `kvspool.Record`, or a subclass whose
    further fields are shown too.
    """

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Iterator[Any]: ...

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> Iterator[Any]: ...

    def stats(self) -> Any: ...

    def close(self) -> None: ...


def load() -> list[ModuleType]:
    """Return the modules of all plugins, in the order of their names; one that can't be imported is left out with a warning."""
    modules = []
    for entry_point in sorted(metadata.entry_points(group=GROUP), key=lambda found: found.name):
        try:
            modules.append(entry_point.load())
        except Exception as error:
            _warn(entry_point.name, error)
    return modules


def add_commands(subparsers: Any) -> None:
    """Let each plugin add its commands."""
    for plugin in load():
        try:
            plugin.add_commands(subparsers)
        except Exception as error:
            _warn(plugin.__name__, error)


def checks() -> Iterator[Any]:
    """Yield the checks of the plugins for `doctor`."""
    for plugin in load():
        try:
            yield from plugin.checks() if hasattr(plugin, "checks") else ()
        except Exception as error:
            _warn(plugin.__name__, error)


@contextmanager
def opened(path: Path) -> Iterator[OpenLog]:
    """Open the log at `path`, kvspool's or a plugin's, for the `with` block. Raises the errors of `kvspool.open` if no plugin knows it."""
    log = _open(path)
    try:
        yield log
    finally:
        log.close()


def _open(path: Path) -> OpenLog:
    try:
        return QueueLog(queue.open(path)) if queue.is_queue(path) else kvspool.open(path)
    except NotALog:
        for plugin in load():
            log = _ask(plugin, path)
            if log is not None:
                return log
        raise


def _ask(plugin: ModuleType, path: Path) -> OpenLog | None:
    """Return the plugin's log at `path`. Damage of its own log, and errors of the system, are reported to the user; its bugs aren't."""
    open_log = getattr(plugin, "open_log", None)
    try:
        log: OpenLog | None = None if open_log is None else open_log(path)
        return log
    except NotALog:
        return None
    except (KvspoolError, OSError):
        raise
    except Exception as error:
        _warn(plugin.__name__, error)
        return None


def _warn(name: str, error: Exception) -> None:
    lines = str(error).splitlines() or [""]
    output.complain(f"warning: the plugin {name} was left out: {type(error).__name__}: {lines[0]}")
