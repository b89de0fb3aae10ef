#!/usr/bin/env python3
"""Crash a machine that runs the real code on real files, and see whether the log and its list of producers recover.

`crash_images.py` records the stores of the interpreted twin, to a spool in memory. This one takes the compiled twin as it is: a child runs
appends, batches of producers and syncs, and stops after each instruction of the machine. Wherever an instruction of the compiled loops, of
libc or of the kernel has changed spool.dat, spool.ctl or `producers`, the pages (or sectors) that changed are new versions. An image has
each page of the three files at any version since the last flush of that file. Each image is opened as after a restart, and compared with
what the child had done by then:

  - every record that a completed sync or durable append covers is there, and no record that was not appended, or comes twice;
  - what the list of producers says is there in full is there;
  - a durable batch that comes again after the restart is there exactly once: no record is missing or doubled, and so it stays when it
    comes once more.

Nothing is overwritten in these runs: rings are large enough. It needs Linux on x86-64, and may trace its own child.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from crash_images import UNITS, File

import kvspool
from kvspool import Gap, Spool, system
from kvspool.engine import producer_table
from kvspool.kernel import frames
from kvspool.spool import format

FILES = (format.DATA_FILE, format.CONTROL_FILE, producer_table.NAME)
CAPACITY = 65536
PRODUCERS = ("p", "q")
TRACE_ME, PEEK_USER, SINGLE_STEP = 0, 3, 9  # of ptrace
INSTRUCTION_POINTER = 16 * 8  # in the user area of x86-64
SOURCES = (os.path.dirname(kvspool.__file__), os.path.abspath(__file__))


class Unsteppable(Exception):
    """This process may not trace another one, or not on this machine."""


class Step(NamedTuple):
    """One call: an append of `values`, as batch `batch` of a producer if that is given; no values: a sync."""

    values: list[bytes]
    producer: str = ""
    batch: int = -1
    durable: bool = False

    def run(self, log: Spool) -> None:
        if not self.values:
            log.sync()
        elif self.producer:
            log.producer(self.producer).append_many(self.values, batch=self.batch, durable=self.durable)
        elif len(self.values) == 1:
            log.append(self.values[0], durable=self.durable)
        else:
            log.append_many(self.values, durable=self.durable)


def plan(choose: random.Random, count: int, producers: bool = True) -> list[Step]:
    """Return calls whose values are all different. producers: let them append, too; half of their batches are durable."""
    steps, batches = [], dict.fromkeys(PRODUCERS, 0)
    for number in range(count):
        kind = choose.random()
        values = [b"%d.%d " % (number, row) + choose.randbytes(choose.choice((0, 30, 400))) for row in range(choose.choice((1, 3)))]
        if kind < 0.6 and producers:
            name = choose.choice(PRODUCERS)
            batches[name] += 1
            steps.append(Step(values, name, batches[name], choose.random() < 0.5))
        else:
            steps.append(Step([] if kind < 0.7 else values, durable=choose.random() < 0.2))
    return steps


class Counting(system.Port):
    """Tells another process which files were flushed, through a word for each."""

    def __init__(self, words: memoryview, inodes: list[int]) -> None:
        self._words, self._inodes = words, inodes

    def flush(self, fd: int) -> None:
        os.getppid()  # a call of libc: what was stored before the flush is seen before it
        super().flush(fd)
        self._count(fd)

    def flush_data(self, fd: int) -> None:
        os.getppid()
        super().flush_data(fd)
        self._count(fd)

    def _count(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if inode in self._inodes:
            self._words[1 + self._inodes.index(inode)] += 1
            os.getppid()  # the flush is seen before what is stored next


class Restarted(system.Port):
    """The machine, started anew."""

    def boot_id(self) -> bytes:
        return bytes(range(16))


class Recording:
    """What a child stored while it made the calls: every version of each unit of the files, and when each was flushed."""

    def __init__(self, root: Path, steps: list[Step], unit: int, *, by_opcodes: bool = False) -> None:
        """Run it. by_opcodes: look before each opcode of Python, in this process, which is quicker. Raises Unsteppable."""
        self.steps, self.unit = steps, unit
        self.path = root / "log"
        with kvspool.create(self.path, capacity=CAPACITY) as log:
            for name in PRODUCERS:
                log.producer(name).append_many([name.encode()], batch=0, durable=True)
            log.sync()
        self.first = [name.encode() for name in PRODUCERS]
        self.clock = [0]
        contents = [(self.path / name).read_bytes() for name in FILES]
        self.base = contents
        self.files = [File(content, unit, self.clock) for content in contents]
        self.done = [0]  # the clock when the n-th call had returned
        self.instructions = 0
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self._counted = [0] * (1 + len(FILES))
        self._maps = []
        for name in FILES:
            with (self.path / name).open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        if by_opcodes:
            self._trace()
        else:
            self._step_through()
        assert len(self.done) == len(self.steps) + 1, "all calls were made"

    def _run(self, log: Spool) -> None:
        for number, step in enumerate(self.steps):
            step.run(log)
            self._words[0] = number + 1

    def _port(self) -> Counting:
        return Counting(self._words, [(self.path / name).stat().st_ino for name in FILES])

    def _begin(self) -> None:
        """Leave out what opening has stored."""
        self._look()
        for file in self.files:
            file.flush()
        self.done = [self.clock[0]]

    def _trace(self) -> None:
        def trace(frame: FrameType, event: str, arg: object) -> Any:
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_code.co_filename.startswith(SOURCES):
                self.instructions += 1
                self._look()
            return trace

        with system.replaced(self._port()), kvspool.open(self.path) as log:
            log.frame_writer()
            self._begin()
            before = sys.gettrace()
            sys._getframe().f_trace_opcodes = True
            sys.settrace(trace)
            try:
                self._run(log)
            finally:
                sys.settrace(before)
            self._look()

    def _child(self, trace_me: Callable[[], Any]) -> None:
        with system.replaced(self._port()):
            log = kvspool.open(self.path)
            log.frame_writer()
            if not trace_me():
                os.kill(os.getpid(), signal.SIGSTOP)
                self._run(log)
                os.kill(os.getpid(), signal.SIGSTOP)

    def _step_through(self) -> None:
        if platform.machine() != "x86_64" or sys.platform != "linux":
            raise Unsteppable
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        ptrace.argtypes, ptrace.restype = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_long
        child = os.fork()
        if child == 0:
            try:
                self._child(lambda: ptrace(TRACE_ME, 0, None, None))
            finally:
                os._exit(1)
        try:
            if not os.WIFSTOPPED(os.waitpid(child, 0)[1]):
                child = 0
                raise Unsteppable
            self._begin()
            storing = _code(child)
            was_there = True
            while not ptrace(SINGLE_STEP, child, None, None):
                status = os.waitpid(child, 0)[1]
                assert os.WIFSTOPPED(status), "a call failed"
                if was_there:
                    self._look()
                if os.WSTOPSIG(status) != signal.SIGTRAP:
                    break
                self.instructions += 1
                at = ptrace(PEEK_USER, child, INSTRUCTION_POINTER, None) & (1 << 64) - 1
                found = bisect_right(storing, (at, 1 << 64)) - 1
                was_there = found >= 0 and at < storing[found][1]
            self._look()
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def _look(self) -> None:
        """Remember what changed since the last look."""
        for file, mapping in zip(self.files, self._maps, strict=True):
            if mapping[:] != file.bytes:
                now = mapping[:]
                for at in range(0, len(now), self.unit):
                    piece = now[at : at + self.unit]
                    if piece != file.view[at : at + self.unit]:
                        file.store(file.view, slice(at, at + len(piece)), piece, at, len(piece))
        if list(self._words[: len(self._counted)]) != self._counted:
            before, self._counted = self._counted, list(self._words[: len(self._counted)])
            for number, file in enumerate(self.files, 1):
                if self._counted[number] != before[number]:
                    file.flush()
            for _ in range(before[0], self._counted[0]):
                self.clock[0] += 1
                self.done.append(self.clock[0])

    def crash(self, when: int, path: Path, choose: random.Random) -> None:
        """Let the files at `path` be as a crash at this moment could have left them."""
        for name, file, base in zip(FILES, self.files, self.base, strict=True):
            (path / name).write_bytes(file.crash(when, base, choose))

    def check(self, when: int, path: Path) -> str:
        """Open the files at `path` after a restart, and compare them with what had been done; return what became of the last batches."""
        finished = bisect_right(self.done, when) - 1
        begun = self.steps[: finished + 1]
        with system.replaced(Restarted()), kvspool.open(path) as log:
            there = values_of(log)
            appended = [*self.first, *(value for step in begun for value in step.values)]
            assert not there - Counter(appended), "a record that was never appended, or one that came twice"
            last = max((at for at, step in enumerate(begun[:finished]) if step.durable or not step.values), default=-1)
            safe = [*self.first, *(value for step in begun[: last + 1] for value in step.values)]
            assert not Counter(safe) - there, "synced records are gone"
            return " ".join(self._again(log, name, begun) for name in PRODUCERS)

    def _again(self, log: Spool, name: str, begun: list[Step]) -> str:
        """Let the last batch of a producer come again, as its client would after a restart."""
        batches = {step.batch: step for step in begun if step.producer == name}
        producer = log.producer(name)
        there, last = values_of(log), producer.last
        if last in batches and producer.next == last + 1:
            missing = Counter(batches[last].values) - there
            assert not missing, f"batch {last} of {name} counts as there in full, and {missing} of it is not"
        if not batches:
            return "none"
        number = max(batches)
        step = batches[number]
        before = sum(there[value] for value in step.values)
        producer.append_many(step.values, batch=number, durable=True)
        now = values_of(log)
        if step.durable:
            counts = [now[value] for value in step.values]
            assert set(counts) == {1}, f"the records of batch {number} of {name} are there {counts} times"
        assert not there - now, "a record went away"
        assert all(now[value] for value in step.values)
        assert producer.append_many(step.values, batch=number).repeated
        assert values_of(log) == now
        kind = "durable" if step.durable else "plain"
        return f"{kind}:{'whole' if before == len(step.values) else 'part' if before else 'gone'}"


def _code(process: int) -> list[tuple[int, int]]:
    """Return where the code of the compiled loops, of libc and of the kernel's page lies in a process, in order."""
    found = []
    for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        name = fields[5] if len(fields) > 5 else ""
        if "x" in fields[1] and ("_c.cpython" in name or "/libc.so" in name or "/libc-" in name or name == "[vdso]"):
            begin, end = fields[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return sorted(found)


def values_of(log: Spool) -> Counter[bytes]:
    """Return how often each value is there."""
    return Counter(item.value for item in log.read(on_gap="yield") if not isinstance(item, Gap))


class Done(NamedTuple):
    """What a campaign did."""

    images: int
    recordings: int
    instructions: int
    stores: int
    kinds: Counter[str]


def campaign(
    images: int, seed: int, unit: int, *, calls: int = 6, each: int = 400, by_opcodes: bool = False, producers: bool = True
) -> Done:
    """Check this many images, `each` of one recording. The same seed makes the same calls. producers: let them append, too.

    Raises Unsteppable.
    """
    choose = random.Random(seed)
    done = recordings = instructions = stores = 0
    kinds: Counter[str] = Counter()
    while done < images:
        root = Path(tempfile.mkdtemp(prefix="file-images-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        try:
            recording = Recording(root, plan(choose, calls, producers), unit, by_opcodes=by_opcodes)
            recordings, instructions = recordings + 1, instructions + recording.instructions
            stores += sum(len(times) - 1 for file in recording.files for times in file.times.values())
            for _ in range(min(each, images - done)):
                when = choose.randint(recording.done[0], recording.clock[0])
                recording.crash(when, recording.path, choose)
                try:
                    kinds.update(recording.check(when, recording.path).split())
                except BaseException as error:
                    error.add_note(f"seed {seed}, unit {unit}, image {done} of recording {recordings}, at {when}: {recording.steps}")
                    raise
                done += 1
        finally:
            shutil.rmtree(root)
    return Done(done, recordings, instructions, stores, kinds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000, help="how many, in all (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=6, help="calls of each child (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeat a campaign (default: a new one)")
    parser.add_argument("--opcodes", action="store_true", help="look before each opcode of Python: quicker, and stores of C come at once")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}, images {options.images}, {frames.TWIN} twin", flush=True)
    for unit in UNITS:
        began = time.monotonic()
        done = campaign(options.images // len(UNITS), seed, unit, calls=options.calls, by_opcodes=options.opcodes)
        print(f"{done.images} images of {unit}-byte units in {time.monotonic() - began:.1f} s; no fault")
        print(f"  {done.recordings} recordings, {done.instructions} instructions or opcodes, {done.stores} versions of units")
        print(f"  last batches before they came again: {dict(done.kinds.most_common())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
