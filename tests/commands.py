"""The command `kvspool`, called within this process: its exit code, and everything that it prints."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvspool.cli import main


class Printed(NamedTuple):
    """The output of one call of the command."""

    out: str
    err: str

    @property
    def objects(self) -> list[Any]:
        """The JSON value of each line of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def object(self) -> Any:
        """The JSON value that is all of standard output."""
        return json.loads(self.out)


class Run:
    """Runs the command; `run` of conftest is one."""

    def __init__(self, captured: Callable[[], tuple[str, str]], input: Path) -> None:
        self._captured = captured
        self._input = input

    def __call__(self, *words: object, code: int = 0, given: bytes | None = b"") -> Printed:
        """Run the command, which must end with `code`, with `given` as its standard input. None: that is closed."""
        self._captured()
        self._input.write_bytes(given or b"")
        with self._input.open(encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", None if given is None else file)
            ended = main([str(word) for word in words])
        printed = Printed(*self._captured())
        assert ended == code, f"{words} ended with {ended}: {printed}"
        return printed


class Row(NamedTuple):
    """A row of a table of commands: the words after `kvspool`, the exit code, and a part of the error."""

    line: str
    code: int
    says: str

    def check_refusal(self, run: Run, place: Path) -> None:
        """Run the line in `place`: it must end with the code, say the words on standard error only, and change no file."""
        before = files_in(place)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            printed = run(*shlex.split(self.line), code=self.code)
        assert self.says in " ".join(printed.err.split()), printed
        assert printed.out == "" and "\x1b" not in printed.err and "Traceback" not in printed.err
        assert "kvspool.create" not in printed.err and "kvspool.open" not in printed.err
        assert files_in(place) == before


def table(rows: Mapping[str, tuple[str, int, str]]) -> pytest.MarkDecorator:
    """Run a test once for each promise, with its row."""
    return pytest.mark.parametrize("row", [Row(*row) for row in rows.values()], ids=list(rows))


def files_in(place: Path) -> set[tuple[Path, int]]:
    """Return each file below `place`, with its size."""
    return {(path, path.stat().st_size) for path in place.rglob("*") if path.is_file()}
