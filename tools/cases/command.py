"""The command `tools/bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from cases import results, trees
from cases.case import SECONDS
from cases.catalogue import CASES, Case, selected
from cases.results import Result
from cases.runs import Run, Runner

ROUNDS = 5
DESCRIPTION = f"""\
Measure kvspool alternately with the machine's own time for the same work, or with another revision of itself.

On a shared machine only the ratio is meaningful. So compared work is measured alternately, in one run: a case and its floor round by
round, or with --against the present tree and the other revision, process by process. The output has medians and quartiles. Most cases
take {SECONDS:g} s for each measurement. Values have 100 bytes unless the row says otherwise.
"""
EXAMPLES = """\
examples:
  tools/bench                                  all cases but those marked * below
  tools/bench append replay                    the cases whose names begin with these words
  tools/bench --against main --case append-one
                                               new and old alternately; SLOWER marks losses beyond the noise
  tools/bench --against v0.1.0 --json > figures.jsonl
  tools/bench growth --directory /dev/shm      on another file system

A bar that is NOT MET is a statement about this run, not an error: the exit code is 1 only if a case fails or is named wrongly.
With --against the floors are not measured, and a case that the old revision cannot run is shown as "not there".
"""


def main(arguments: list[str] | None = None, build: trees.Build = trees.compile_twins) -> int:
    """Run the command, and return its exit code. `build` compiles the twins of the other revision."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        cases = selected([*options.names, *options.cases])
    except ValueError as error:
        parser.error(str(error))
    if options.directory is not None and not options.directory.is_dir():
        parser.error(f"{options.directory} is no directory")
    try:
        with tempfile.TemporaryDirectory(prefix="kvspool-bench.", dir=options.directory) as folder:
            return _run(cases, options, Path(folder), build)
    except trees.TreeError as error:
        print(f"tools/bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tools/bench: interrupted", file=sys.stderr)
        return 130


def _run(cases: list[Case], options: argparse.Namespace, folder: Path, build: trees.Build) -> int:
    runner = Runner(folder, options.rounds, _progress, is_short=options.short)
    with ExitStack() as stack:
        about = [trees.HERE.describe()]
        old = None
        if options.against is not None:
            _progress(f"building {options.against}, which takes a minute")
            old = stack.enter_context(trees.revision(options.against, folder, build))
            about.append(old.describe())
        if not options.json:
            _show("; ".join([*about, *_host(folder)]) + "\n")
        has_failed = False
        slower = []
        for case in cases:
            ours, results_of_case = _results(runner, case, old)
            for result in results_of_case:
                _show(json.dumps(result) if options.json else results.line(result))
                slower += [result["row"]] if result.get("verdict") == "slower" else []
            has_failed |= _tell(case, ours)
        if slower and not options.json:
            _show(f"\nSlower than {options.against}, beyond the noise: {', '.join(slower)}")
    return 1 if has_failed else 0


def _results(runner: Runner, case: Case, old: trees.Tree | None) -> tuple[Run, list[Result]]:
    """Run a case; return the run of this tree, and the results."""
    if old is None:
        ours = runner.measure(case)
        return ours, [results.measured(case.name, row) for row in ours.rows]
    ours, others = runner.compare(case, old)
    rows = {(row.name, row.peer): row for row in others.rows}
    missing = (others.failure or others.left_out or "the case has no such row").splitlines()[-1]
    return ours, [results.compared(case.name, row, rows.get((row.name, row.peer)), missing) for row in ours.rows]


def _tell(case: Case, run: Run) -> bool:
    """Report measurements that were not taken, and return whether the case failed."""
    if run.left_out:
        _show(f"{case.name}: {run.left_out}", sys.stderr)
    if run.failure:
        _show(f"{case.name} failed:\n{run.failure}", sys.stderr)
    return bool(run.failure)


def _host(folder: Path) -> Iterator[str]:
    from kvspool.system import filesystems

    yield f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    yield filesystems.of(folder)


def _progress(words: str) -> None:
    """Show on a terminal what is measured now, until the next line is shown."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words} ...", end="", file=sys.stderr, flush=True)


def _show(words: str, stream: TextIO | None = None) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(words, file=stream or sys.stdout, flush=True)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds: give 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {case.name:<20}{'*' if case.is_asked else ' '} {case.summary}" for case in CASES.values())
    parser = argparse.ArgumentParser(
        prog="tools/bench",
        description=DESCRIPTION,
        epilog=f"{EXAMPLES}\ncases (* only if named):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only the cases whose name begins with one of these")
    parser.add_argument("--case", nargs="+", default=[], dest="cases", metavar="NAME", help="the same")
    parser.add_argument("--against", metavar="REV", help="build this revision of the repository, and measure it in turn with this tree")
    rounds = f"rounds of each case (default {ROUNDS}); --against needs {results.LEAST_ROUNDS} to tell a difference from noise"
    parser.add_argument("--rounds", type=_rounds, default=ROUNDS, help=rounds)
    parser.add_argument("--json", action="store_true", help="print one JSON object for each row")
    parser.add_argument("--short", action="store_true", help="measure next to nothing: the cases run, but their figures mean nothing")
    parser.add_argument("--directory", type=Path, metavar="PATH", help="where the files are (default: the system's temporary directory)")
    return parser
