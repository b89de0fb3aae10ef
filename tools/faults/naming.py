#!/usr/bin/env python3
"""Delete and rename logs while other processes create, open, append and read them, and some are killed; with an independent ledger.

    tools/faults/naming.py 60             # a minute of each kind of log
    tools/faults/naming.py 10 --kind kvj

Each appender writes a line for a record after its append has returned. A remover copies the log first, at the last moment, under
all of its locks. So every line must be in the log of its id: in that at the path, in one with a new name, or in the last copy of a deleted
one. A directory of a user next to the log must stay as it is.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvspool
from kvspool import system
from kvspool.engine.making import DELETED
from kvspool.errors import KvspoolError, LogExists, LogInUse, LogNotFound, LogVanished, MismatchedFiles, NotALog, ReaderBusy

OPTIONS: dict[str, dict[str, Any]] = {
    "spool": {"capacity": 1 << 16},
    "kvj": {"segment_bytes": 400},
    "sej": {"segment_bytes": 400},
    "fflg": {"segment_bytes": 10_000, "keep_consumed": 1},
    "fixed": {"item_bytes": 16, "items_per_blob": 8},
}
EXPECTED = (LogExists, LogInUse, LogNotFound, LogVanished, MismatchedFiles, NotALog, ReaderBusy)  # of operations that lose a race
APPENDERS, REMOVERS, CREATORS = 3, 3, 2


class Copying(system.Port):
    """Copies a log before it is renamed to the hidden name of a deletion."""

    def __init__(self, copies: Path) -> None:
        self._copies = copies

    def rename_new(self, source: Any, target: Any) -> None:
        if str(target).endswith(DELETED):
            temporary = self._copies / f"{os.getpid()}.part"
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(source, temporary)
            os.rename(temporary, self._copies / f"{time.time_ns()}")
        super().rename_new(source, target)


def identity(path: Path, kind: str) -> str:
    """Return the first record of a log, which names it: not every kind has an id."""
    options = OPTIONS[kind] if kind == "fixed" else {}
    with kvspool.open(path, format=kind, **options) as log:  # type: ignore[call-overload]
        first = next(iter(log.read(0, on_gap="skip")), None)
        return "" if first is None else first.value.decode()


def contents(path: Path, kind: str) -> set[bytes]:
    """Return the values in a log."""
    options = OPTIONS[kind] if kind == "fixed" else {}
    with kvspool.open(path, format=kind, **options) as log:  # type: ignore[call-overload]
        return {record.value for record in log.read(on_gap="skip")}


class Storm:
    """One run with logs of a kind."""

    def __init__(self, root: Path, kind: str, seed: int) -> None:
        self.kind = kind
        self.path = root / "logs" / "log"
        self.copies, self.ledgers = root / "copies", root / "ledgers"
        for directory in (self.path.parent, self.copies, self.ledgers):
            directory.mkdir(parents=True)
        self.foreign = self.path.parent / ".log.mine"
        self.foreign.mkdir()
        (self.foreign / "precious").write_text("mine")
        self.random = random.Random(seed)
        self.workers: dict[int, Callable[[random.Random], None]] = {}

    def run(self, seconds: float) -> Counter[str]:
        """Let processes work for some seconds, kill some, and check everything. Return what was counted."""
        self.warm_up()
        for work in [self.appender] * APPENDERS + [self.remover] * REMOVERS + [self.creator] * CREATORS:
            self.start(work)
        until = time.monotonic() + seconds
        kills = 0
        while time.monotonic() < until:
            time.sleep(self.random.random() * 0.02)
            if self.random.random() < 0.1:
                pid = self.random.choice(list(self.workers))
                work = self.workers.pop(pid)
                os.kill(pid, signal.SIGKILL)
                self.ended(pid, is_killed=True)
                self.start(work)
                kills += 1
        for pid in list(self.workers):
            os.kill(pid, signal.SIGTERM)
        for pid in list(self.workers):
            self.ended(pid)
        return Counter(kills=kills) + self.check()

    def warm_up(self) -> None:
        """Do everything once, so that no process has to import modules."""
        dice = random.Random(0)
        with system.replaced(Copying(self.copies)):
            for work in (self.creator, self.appender, self.remover):
                work(dice)
        kvspool.delete(self.path, missing_ok=True)

    def start(self, work: Callable[[random.Random], None]) -> None:
        seed = self.random.random()
        pid = os.fork()
        if pid:
            self.workers[pid] = work
            return
        code = 1
        try:
            stopped = []
            signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
            with system.replaced(Copying(self.copies)):
                dice = random.Random(seed)
                while not stopped:
                    with suppress(*EXPECTED):
                        work(dice)
            code = 0
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            os._exit(code)

    def ended(self, pid: int, *, is_killed: bool = False) -> None:
        status = os.waitpid(pid, 0)[1]
        self.workers.pop(pid, None)
        allowed = {0, signal.SIGKILL} if is_killed else {0, signal.SIGTERM}  # before it had a handler
        assert status in allowed, f"a process ended with status {status}"

    # The work of each process.

    def note(self, words: bytes) -> None:
        """Write a line into this process's own ledger: one write, which a kill doesn't tear."""
        fd = os.open(self.ledgers / f"{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, words + b"\n")
        os.close(fd)

    def appender(self, dice: random.Random) -> None:
        with kvspool.open(self.path, timeout=30) as log:
            first = next(iter(log.read(0, limit=1, on_gap="skip")), None)
            if first is None:
                return
            time.sleep(dice.random() * 0.003)
            for _ in range(dice.randrange(1, 4)):
                value = dice.randbytes(8).hex().encode()
                log.append(value)
                self.note(first.value + b" " + value)
            if dice.random() < 0.3:
                with log.reader("reader") as reader:
                    for _ in reader.read(limit=2, on_gap="yield"):
                        pass
                    reader.commit()

    def creator(self, dice: random.Random) -> None:
        value = dice.randbytes(8).hex().encode()
        with kvspool.create(self.path, format=self.kind, timeout=30, **OPTIONS[self.kind]) as log:
            if len(log) == 0 and log.append(value) == 0:
                self.note(value + b" " + value)
        time.sleep(dice.random() * 0.02)

    def remover(self, dice: random.Random) -> None:
        time.sleep(dice.random() * 0.004)
        if self.kind in ("fflg", "fixed") or dice.random() < 0.6:
            kvspool.delete(self.path, timeout=30)
            self.note(b"deleted")
        else:
            kvspool.rename(self.path, self.path.with_name(f"kept-{os.getpid()}-{time.time_ns()}"), timeout=30)
            self.note(b"renamed")

    # The check.

    def check(self) -> Counter[str]:
        """Compare the logs with the ledgers; AssertionError if a record is missing."""
        counted: Counter[str] = Counter()
        acknowledged: dict[bytes, set[bytes]] = {}
        for ledger in self.ledgers.iterdir():
            for line in ledger.read_bytes().splitlines():
                name, _, value = line.partition(b" ")
                if value:
                    acknowledged.setdefault(name, set()).add(value)
                else:
                    counted[name.decode()] += 1
        found: dict[bytes, set[bytes]] = {}
        places = [*sorted(self.copies.glob("[0-9]*[0-9]"), key=lambda path: int(path.name))]
        places += [self.path, *self.path.parent.glob("kept-*")]  # a copied log whose deletion was killed before it was done
        for place in places:
            if place.exists():
                name = identity(place, self.kind).encode()
                found[name] = contents(place, self.kind)
        for name, values in acknowledged.items():
            missing = values - found.get(name, set())
            assert not missing, f"the log {name!r} lacks {len(missing)} acknowledged records of {len(values)}"
            counted["records"] += len(values)
        counted["logs"] = len(acknowledged)
        kvspool.delete(self.path, missing_ok=True)
        assert (self.foreign / "precious").read_text() == "mine"
        left = {path.name for path in self.path.parent.iterdir() if not path.name.startswith("kept-")}
        hidden = {name for name in left if name.endswith(".new")}  # of killed creators: the next create removes them
        assert left - hidden <= {".log.mine", ".log.kvspool"}, left
        return counted


def storm(seconds: float, kind: str, seed: int) -> Counter[str]:
    """Run once in a temporary directory, and return what was counted."""
    root = Path(tempfile.mkdtemp(prefix="kvspool-naming-"))
    run = Storm(root, kind, seed)
    try:
        return run.run(seconds)
    finally:
        for pid in run.workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    """Run for each kind of log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, help="for each kind")
    parser.add_argument("--kind", choices=tuple(OPTIONS), help="only this one")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    for kind in (arguments.kind,) if arguments.kind else OPTIONS:
        try:
            counted = storm(arguments.seconds, kind, arguments.seed)
        except (AssertionError, KvspoolError) as error:
            print(f"{kind}: {error}", file=sys.stderr)
            return 1
        print(f"{kind}: {', '.join(f'{number:,} {what}' for what, number in counted.items())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
