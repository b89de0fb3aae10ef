"""The progress of long operations: a bar on a terminal; reports of operations without an end in every form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvspool import system
from kvspool.cli import output

SAY = 10.0  # seconds between two lines without a terminal


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


@contextmanager
def reported(
    words: str, sentence: Callable[[Any], str], *, is_json: bool, state: Callable[[Any], object] | None = None
) -> Iterator[Callable[[Any], None]]:
    """Return a function to call with each report: it prints JSON, changes a line on a terminal, or prints a line to stderr now and then.

    words: until the first report; sentence: returns a report in words. state: as JSON, each of its values is printed once, or each report
    without it; without a terminal, a line is printed when it changes, and every `SAY` seconds.
    """
    console = output.console(stderr=True)
    if is_json or not console.is_terminal:
        yield _Lines(None if is_json else sentence, state)
        return
    with console.status(words) as status:
        yield lambda report: status.update(output.escape(sentence(report)))


class _Lines:
    """Prints reports; see `reported`. sentence: None: as JSON."""

    def __init__(self, sentence: Callable[[Any], str] | None, state: Callable[[Any], object] | None) -> None:
        self._sentence = sentence
        self._state = state
        self._said: object = None
        self._said_at = 0.0

    def __call__(self, report: Any) -> None:
        now, state = system.port.monotonic(), None if self._state is None else self._state(report)
        is_due = self._state is None if self._sentence is None else now - self._said_at >= SAY
        if state == self._said and not is_due:
            return
        self._said, self._said_at = state, now
        if self._sentence is None:
            output.print_json(report)
            sys.stdout.flush()
        else:
            print(output.escape(self._sentence(report)), file=sys.stderr, flush=True)
