"""Runs of a case in a fresh process, on one tree or on two alternately."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cases.case import Row
from cases.catalogue import Case
from cases.trees import HERE, Tree

PATIENCE = 1800.0  # seconds until a process that does not end is killed
LAST_WORDS = 20  # lines shown of a process that failed
Progress = Callable[[str], None]


class Run(NamedTuple):
    """The result of a case's run. left_out: missing measurements, with reasons; failure: how its process failed."""

    rows: list[Row]
    left_out: str = ""
    failure: str = ""


class Runner:
    """Runs cases; each process has its own folder below `folder`."""

    def __init__(self, folder: Path, rounds: int, progress: Progress, *, is_short: bool = False) -> None:
        self._folder, self._rounds, self._progress, self._is_short = folder, rounds, progress, is_short

    def measure(self, case: Case) -> Run:
        """Run a case of this tree alternately with its peers, all rounds in one process."""
        self._progress(case.name)
        return self._run(case, HERE, "--rounds", str(self._rounds))

    def compare(self, case: Case, old: Tree) -> tuple[Run, Run]:
        """Run a case of this tree alternately with the same case of another one, each round in a separate process.

        A case without any row in one of the trees is not repeated.
        """
        pairs: list[tuple[Run, Run]] = []
        for number in range(self._rounds):
            self._progress(f"{case.name}, round {number + 1} of {self._rounds}")
            pairs.append((self._run(case, HERE, "--alone"), self._run(case, old, "--alone")))
            if not all(run.rows for run in pairs[0]):
                break
        ours, others = zip(*pairs, strict=True)
        return _joined(ours), _joined(others)

    def _run(self, case: Case, tree: Tree, *options: str) -> Run:
        command = [sys.executable, "-m", "cases", case.name, *options, *(["--short"] if self._is_short else [])]
        with tempfile.TemporaryDirectory(dir=self._folder) as folder, tempfile.TemporaryFile("w+", dir=folder) as said:
            with subprocess.Popen(
                command, cwd=folder, env=tree.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True,
                start_new_session=True,
            ) as process:  # fmt: skip
                try:
                    lines = process.communicate(timeout=PATIENCE)[0].splitlines()
                except subprocess.TimeoutExpired:
                    return Run([], failure=f"took longer than {PATIENCE:g} s")
                finally:
                    _end(process)
            said.seek(0)
            words = "\n".join(said.read().splitlines()[-LAST_WORDS:])
        found = [json.loads(line) for line in lines]
        rows = [Row.from_json(one["row"]) for one in found if "row" in one]
        left_out = next((one["left_out"] for one in found if "left_out" in one), "")
        return Run(rows, left_out, (words or f"exit code {process.returncode}") if process.returncode else "")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and all its descendants, in any state."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _joined(runs: tuple[Run, ...]) -> Run:
    """Return one run with the pairs of all rounds in each row."""
    rows: dict[tuple[str, str], Row] = {}
    for row in (row for run in runs for row in run.rows):
        known = rows.setdefault((row.name, row.peer), row._replace(pairs=[]))
        known.pairs.extend(row.pairs)
    return Run(list(rows.values()), runs[0].left_out, next((run.failure for run in runs if run.failure), ""))
