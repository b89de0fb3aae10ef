"""`kvspool work`: run a command for each record of a log, a shard set or a hub root, in several workers."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvspool.cli import options, output, plugins, progress
from kvspool.cli.command_keeper import CommandKeeper
from kvspool.cli.options import BadInput
from kvspool.errors import Closed, LeaseLost
from kvspool.system.handles import Handle
from kvspool.tasks.task import Task
from kvspool.tasks.verb import HasTasks
from kvspool.tasks.worker import TaskWorker

NAME = "work"
SUMMARY = "run a command for each record, in several workers"
DESCRIPTION = """\
Run a command for each record that a task list gives out: the value is on standard input; KVSPOOL_KEY, KVSPOOL_SEQUENCE, KVSPOOL_SHARD
and KVSPOOL_DELIVERIES are in the environment. Exit code 0 acknowledges the record, anything else is a retry. After --max-deliveries
attempts the record becomes a dead letter, with the last lines that the command wrote to standard error. Ctrl-C ends it once the running
commands have ended; a second one ends these, too. If it is killed, its running commands are killed, with all processes of their process
groups. Several processes, also of `kvspool work`, share the list of one NAME."""
EXAMPLES = """\
  kvspool work events thumbnails --workers 4 -- ./render
  kvspool work events mails --timeout 10 -- sh -c 'mail -s "Order $KVSPOOL_KEY" sales'
  kvspool work root invoices --order key --lease 300 -- ./invoice"""

ERROR_BYTES = 2000  # of the end of the command's standard error, for a dead letter
SHOWN = 0.2  # seconds between two updates of the progress
RETRY_DELAY = 1.0  # seconds before the next attempt, by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_path(parser, "the log, shard set or hub root")
    parser.add_argument("name", metavar="NAME", help="the task list")
    parser.add_argument("--workers", type=options.count(1, 1024), default=1, metavar="N", help="commands at once (default: %(default)s)")
    parser.add_argument("--timeout", type=options.seconds, metavar="S", help="end after S seconds without a record (default: never)")
    parser.add_argument("--limit", type=options.count(1), metavar="N", help="end after so many commands for each worker")
    parser.add_argument("--max-deliveries", type=options.count(1, 10_000), default=5, metavar="N", help="attempts (default: %(default)s)")
    parser.add_argument(
        "--delay", type=options.seconds, default=RETRY_DELAY, metavar="S", help="seconds before the next attempt (default: %(default)g)"
    )
    parser.add_argument("--lease", type=options.interval, metavar="S", help="give a record to another worker after S seconds")
    parser.add_argument("--order", choices=("key",), help="records with the same key one at a time, and in order")
    parser.add_argument("--dead-letters", type=Path, metavar="LOG", help="the dead-letter log (default: next to the log)")
    options.add_json(parser, "the summary as a JSON object")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: the command and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the workers, and print a summary."""
    with plugins.opened(arguments.path) as log:
        if not isinstance(log, HasTasks):
            raise BadInput(f"{arguments.path} is a queue; queues have no tasks")
        with log.tasks(
            arguments.name,
            max_deliveries=arguments.max_deliveries,
            lease=arguments.lease,
            order=arguments.order,
            dead_letters=arguments.dead_letters,
        ) as worker:
            keeper = CommandKeeper()
            try:
                return _Pool(worker, arguments, keeper).run()
            finally:
                keeper.close()


class _Pool(Handle):
    """The threads, each with one command at a time."""

    def __init__(self, worker: TaskWorker, arguments: argparse.Namespace, keeper: CommandKeeper) -> None:
        self._worker = worker
        self._keeper = keeper
        self._arguments = arguments
        self._counts: Counter[str] = Counter()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_ending = False
        self._guard = threading.Lock()
        self._ended = 0
        self._all_ended = threading.Event()
        self._failure: BaseException | None = None
        self._began = time.monotonic()

    def run(self) -> int:
        """Wait for all threads; return the exit code."""
        threads = [threading.Thread(target=self._work, name=f"worker {number}") for number in range(self._arguments.workers)]
        for thread in threads:
            thread.start()
        code = self._wait()
        if self._failure is not None:
            raise self._failure
        self._summarize()
        return code

    def _wait(self) -> int:
        """Wait for the end of all threads. `Thread.join` would count them as ended after an interrupt."""
        code = 0
        while True:
            try:
                with progress.shown("working") as show:
                    while self._ended < self._arguments.workers:
                        show(self._counts["done"], None, self._words())
                        self._all_ended.wait(SHOWN)
                return code
            except KeyboardInterrupt:
                if self._is_ending:
                    self._kill()
                self._is_ending = True
                code = 130
                output.complain("ending after the running commands; press Ctrl-C again to end these, too")

    def _kill(self) -> None:
        for process in list(self._running):
            process.kill()

    def _work(self) -> None:
        try:
            left = -1 if self._arguments.limit is None else self._arguments.limit
            deadline = None if self._arguments.timeout is None else time.monotonic() + self._arguments.timeout
            while left != 0 and not self._is_ending and (deadline is None or time.monotonic() < deadline):
                for task in self._worker.take(1, wait=SHOWN, on_gap="skip"):
                    self._handle(task)
                    left -= 1
                    deadline = None if deadline is None else time.monotonic() + self._arguments.timeout
        except Closed:
            pass
        except BaseException as error:
            self._failure = error
            self._is_ending = True
        finally:
            with self._guard:
                self._ended += 1
                if self._ended == self._arguments.workers:
                    self._all_ended.set()

    def _handle(self, task: Task) -> None:
        """Run the command for one task."""
        code, text = self._call(task)
        try:
            if code == 0:
                task.ack()
                self._counts["done"] += 1
            else:
                is_last = task.deliveries >= self._arguments.max_deliveries
                task.retry(self._arguments.delay, f"exit code {code}: {text}" if text else f"exit code {code}")
                self._counts["dead" if is_last else "retried"] += 1
        except LeaseLost:
            self._counts["lost"] += 1

    def _call(self, task: Task) -> tuple[int, str]:
        """Return the exit code of the command, and the end of its standard error."""
        process = subprocess.Popen(
            self._arguments.command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(task),
            start_new_session=True,  # Ctrl-C must not end it
        )
        self._running.add(process)
        self._keeper.began(process.pid)
        try:
            _, errors = process.communicate(task.value)
        finally:
            self._running.discard(process)
            self._keeper.ended(process.pid)
        if errors:
            sys.stderr.buffer.write(errors)
            sys.stderr.flush()
        return process.returncode, errors[-ERROR_BYTES:].decode("utf-8", "replace").strip()

    def _words(self) -> str:
        counts = self._counts
        return f"{counts['done']:,} done, {counts['retried']:,} retried, {output.counted(counts['dead'], 'dead letter')}"

    def _summarize(self) -> None:
        seconds = time.monotonic() - self._began
        if self._arguments.json:
            counts: dict[str, Any] = {name: self._counts[name] for name in ("done", "retried", "dead", "lost")}
            output.print_json({**counts, "seconds": round(seconds, 3)})
        else:
            lost = f", {self._counts['lost']:,} lost leases" if self._counts["lost"] else ""
            print(f"{self._words()}{lost} in {seconds:,.1f} s")


def _environment(task: Task) -> dict[bytes, bytes]:
    """Return the environment of a command."""
    shard = task.shard
    found = {
        **os.environb,
        b"KVSPOOL_SEQUENCE": b"%d" % task.sequence,
        b"KVSPOOL_SHARD": os.fsencode("/".join(map(str, shard)) if isinstance(shard, tuple) else str(shard)),
        b"KVSPOOL_DELIVERIES": b"%d" % task.deliveries,
    }
    found.pop(b"KVSPOOL_KEY", None)
    if task.key is not None and b"\0" not in task.key:  # an environment can't have a zero byte
        found[b"KVSPOOL_KEY"] = task.key
    return found
