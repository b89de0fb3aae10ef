"""The progress of long operations, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvspool.cli import output


@contextmanager
def shown(words: str) -> Iterator[Callable[..., None]]:
    """Return a function to call with `done`, `all` and optionally other text; it draws a bar on stderr if that is a terminal. The bar
    disappears at the end of the block.
    """
    if not sys.stderr.isatty():
        yield lambda done, all, said=words: None
        return
    from rich.progress import Progress

    with Progress(console=output.console(stderr=True), transient=True) as bar:
        task = bar.add_task(words)
        yield lambda done, all, said=words: bar.update(task, completed=done, total=all, description=said)
