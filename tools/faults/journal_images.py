#!/usr/bin/env python3
"""Crash a machine under a journal many times, and see whether the journal recovers from each crash.

    python tools/faults/journal_images.py --images N [--seed SEED] [--format sej]

A random workload runs the real code on small segments. It makes appends of all sizes, batches over segments, syncs and durable appends,
commits of durable readers, and trims. A writer crashes with a part of a record written. Every call that changes a file or a name is noted,
and every flush. Then disks are composed as a power failure could have left them:

  - of a file: flushed bytes are there. Of bytes that were appended since, there is a first part of any length; after that nothing, or zeros
    up to a later length. Of replaced bytes, the old or the new ones. Of a file that was cut since, either length;
  - of a directory: names that were created, replaced or removed since its last flush are as before, or as after, any first part of these
    changes.

Each one is opened in another run of the machine, and compared with the appended records:

  - every record before the last completed sync is there, with its bytes, unless it was trimmed; sequences have no hole;
  - a durable reader is at its last commit, or at one that it had begun. It is never ahead of the present records, no matter whether it or a
    writer opens the journal first;
  - the next append continues and is read back. All records of that moment are there after one more start of the machine.

A format without checksums can't detect zeros, or an old byte, within a record that was not synced: only its length is known.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import stat
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvspool
from kvspool import Gap, system
from kvspool.errors import KvspoolError, LogNotFound
from kvspool.journal import Journal
from kvspool.journal.appender import Appender
from kvspool.journal.control import Page
from kvspool.journal.format import Before

FORMATS: dict[str, dict[str, Any]] = {
    "sej": {"segment_bytes": 400},
    "kvj": {"segment_bytes": 400},
    "fixed": {"item_bytes": 40, "items_per_blob": 6},
}
STEPS = 25  # of one life of the machine
IMAGES = 60  # of each life
READERS = ("one", "two")


class File:
    """The history of one file: each of its contents, since when, and when it was flushed."""

    def __init__(self, clock: int, content: bytes = b"") -> None:
        self.contents = [(clock, content)]
        self.flushes = [-1] if not content else [clock]

    @property
    def content(self) -> bytes:
        return self.contents[-1][1]

    def change(self, clock: int, content: bytes) -> None:
        self.contents.append((clock, content))

    def crash(self, when: int, choose: random.Random) -> bytes:
        """Return what a crash at this moment could leave of it."""
        flushed = self.flushes[bisect_right(self.flushes, when) - 1]
        times = [time for time, _ in self.contents]
        newest = bisect_right(times, when) - 1
        oldest = min(max(0, bisect_right(times, flushed) - 1), newest)
        base = self.contents[oldest][1] if flushed >= 0 else b""
        later = self.contents[newest][1]
        if oldest == newest and flushed >= 0:
            return base
        kind = choose.randrange(6)
        if kind == 0:
            return base
        if kind == 1:
            return later
        some = self.contents[choose.randint(oldest, newest)][1]
        if not some.startswith(base):  # cut, or replaced
            return choose.choice((base, some, later))
        length = choose.randint(len(base), len(some))
        if kind < 4:
            return some[:length]
        return some[:length] + bytes(choose.choice((len(some), choose.randint(length, len(some)))) - length)


class Recorder(system.Port):
    """The real system below one directory, which notes what changes there; flushes cost nothing."""

    def __init__(self, root: Path, boot: int) -> None:
        self.root = str(root)
        self.boot = boot
        self.clock = 0
        self.files: dict[int, File] = {}  # by inode
        self.kept: list[int] = []  # descriptors, so that no inode is given out twice
        self.there: dict[str, int] = {}  # what is there now
        self.changes: dict[str, list[tuple[int, dict[str, int | None]]]] = {}  # of a directory: when, and names with their inodes
        self.flushed: dict[str, list[int]] = {}
        self.before: dict[str, int] = {}
        self._scan()

    def _scan(self) -> None:
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = f"{folder}/{name}"
                number = self._keep(path)
                self.files[number] = File(0, Path(path).read_bytes())
                self.there[path] = number
        self.before = dict(self.there)

    def _keep(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY)
        self.kept.append(fd)
        return os.fstat(fd).st_ino

    def _name(self, changes: dict[str, int | None]) -> None:
        self.clock += 1
        folder = os.path.dirname(next(iter(changes)))
        self.changes.setdefault(folder, []).append((self.clock, changes))
        for path, number in changes.items():
            if number is None:
                self.there.pop(path, None)
            else:
                self.there[path] = number

    def _changed(self, fd: int) -> None:
        self.clock += 1
        status = os.fstat(fd)
        if status.st_ino in self.files:
            self.files[status.st_ino].change(self.clock, Path(f"/proc/self/fd/{fd}").read_bytes())

    def open(self, path: Any, flags: int, mode: int = 0o600) -> int:
        name = os.fspath(path)
        is_new = flags & os.O_CREAT and name.startswith(self.root) and not os.path.lexists(name)
        fd = super().open(path, flags, mode)
        if is_new:
            number = self._keep(name)
            self.files[number] = File(self.clock)
            self._name({name: number})
        elif flags & os.O_TRUNC:
            self._changed(fd)
        return fd

    def write(self, fd: int, data: bytes | bytearray, at: int) -> None:
        super().write(fd, data, at)
        self._changed(fd)

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self._changed(fd)

    def flush_data(self, fd: int) -> None:
        self.flush(fd)

    def flush(self, fd: int) -> None:
        status = os.fstat(fd)
        self.clock += 1
        if stat.S_ISDIR(status.st_mode):
            self.flushed.setdefault(os.readlink(f"/proc/self/fd/{fd}"), []).append(self.clock)
        elif status.st_ino in self.files:
            self.files[status.st_ino].flushes.append(self.clock)

    def rename(self, source: Any, target: Any) -> None:
        super().rename(source, target)
        old, new = os.fspath(source), os.fspath(target)
        if old in self.there:
            self._name({old: None, new: self.there[old]})

    def remove(self, path: Any) -> None:
        super().remove(path)
        self._name({os.fspath(path): None})

    def boot_id(self) -> bytes:
        return self.boot.to_bytes(16, "little")

    def image(self, when: int, choose: random.Random, target: Path) -> None:
        """Put a disk that a crash at this moment could leave into a directory that has the same subdirectories, and nothing else."""
        names: dict[str, int | None] = dict(self.before)
        for folder, changes in self.changes.items():
            flushed = max((time for time in self.flushed.get(folder, ()) if time <= when), default=-1)
            sure = [change for time, change in changes if time <= flushed]
            perhaps = [change for time, change in changes if flushed < time <= when]
            for change in sure + perhaps[: choose.randint(0, len(perhaps))]:
                names.update(change)
        contents = {number: self.files[number].crash(when, choose) for number in set(names.values()) if number is not None}
        for path, number in names.items():
            if number is not None:
                (target / os.path.relpath(path, self.root)).write_bytes(contents[number])

    def close_all(self) -> None:
        for fd in self.kept:
            os.close(fd)


class Life:
    """One run of the machine: what was appended, and what was promised when."""

    def __init__(self, root: Path, form: str, choose: random.Random) -> None:
        self.root, self.form, self.choose = root, form, choose
        self.values: dict[int, bytes] = {}
        self.synced = [(0, 0)]  # when, and the sequence below which all was on disk
        self.trimmed = [(0, 0)]  # when it was about to begin, and the first sequence that could be left
        self.commits: dict[str, list[tuple[int, int, int]]] = {name: [(0, 0, 0)] for name in READERS}  # begun, done, sequence
        with kvspool.create(root / "log", format=form, **FORMATS[form]) as log:  # type: ignore[call-overload]
            for name in READERS:
                log.reader(name).close()
        self.port = Recorder(root, 1)
        with system.replaced(self.port):
            self.log: Journal = kvspool.open(root / "log")  # type: ignore[assignment]
            for _ in range(STEPS):
                self.step()
            self.log.close()
        self.port.close_all()

    def value(self) -> bytes:
        size = 40 if self.form == "fixed" else self.choose.choice((0, 5, 30, 90, 500))
        return bytes(self.choose.randrange(1, 256) for _ in range(size))

    def step(self) -> None:
        choose, log, clock = self.choose, self.log, self.port
        kind = choose.randrange(12)
        if kind < 5:
            values = [self.value() for _ in range(choose.choice((1, 1, 2, 7)))]
            first = log.end()
            self.values.update(enumerate(values, first))
            got = log.append_many(values, durable=choose.randrange(4) == 0)
            assert got.start == first
            if log.stats().synced_sequence > self.synced[-1][1]:
                self.synced.append((clock.clock, log.stats().synced_sequence))
        elif kind < 7:
            end = log.sync()
            self.synced.append((clock.clock, end))
        elif kind < 10:
            name = choose.choice(READERS)
            with log.reader(name) as reader:
                reader.seek(max(reader.sequence, log.first()))
                for _ in reader.read(limit=choose.randrange(1, 9), on_gap="skip"):
                    pass
                begun = clock.clock
                self.commits[name].append((begun, 1 << 62, reader.sequence))
                reader.commit()
                self.commits[name][-1] = (begun, clock.clock, reader.sequence)
        elif kind < 11:
            before = choose.randint(log.first(), log.end())
            self.trimmed.append((clock.clock, before))
            log.trim(before=before, force=True)
        else:
            log.under_lock(5, self._tear)
            log.close()
            self.log = kvspool.open(self.root / "log")  # type: ignore[assignment]

    def _tear(self, appender: Appender, page: Page) -> None:
        """Under the append lock: write the beginning of a frame, as a writer that is killed."""
        place = Before(page.next_sequence, page.base, page.end, self.port.clock, page.last_timestamp)
        data, _, _ = appender.format.encode(kvspool.journal.JournalBatch([self.value()]), 0, place)
        assert appender._segment is not None
        system.port.write(appender._segment.fd, bytes(data[: self.choose.randrange(len(data))]), page.end)


class Wrong(Exception):
    """The records that a recovery has not kept."""


def check(life: Life, root: Path, when: int, choose: random.Random, counts: Counter[str]) -> None:
    """Open an image in another run of the machine, and compare it with what was promised. Raises Wrong."""
    synced = max(sequence for time, sequence in life.synced if time <= when)
    trimmed = max(sequence for time, sequence in life.trimmed if time <= when)
    later = Rebooted(2)
    with system.replaced(later):
        with kvspool.open(root / "log") as log:
            assert isinstance(log, Journal)
            writer_first = choose.random() < 0.5
            end = -1
            try:
                if writer_first:
                    end = log.append(b"w" * 40)
                else:
                    check_readers(life, log, when, synced, counts)
            except LogNotFound:
                raise Wrong("it has no segment") from None
            if end < 0:
                end = log.append(b"w" * 40)
            found = [item for item in log.read(on_gap="yield")]
            if any(isinstance(item, Gap) for item in found):
                raise Wrong(f"{[item for item in found if isinstance(item, Gap)]} are reported")
            first = log.first()
            if [item.sequence for item in found] != list(range(first, end + 1)):
                raise Wrong(f"{[item.sequence for item in found]} are there of {first} to {end}")
            if first > trimmed and first > synced:
                raise Wrong(f"it begins at {first}, although at most {trimmed} was trimmed")
            if end < synced:
                raise Wrong(f"it ends at {end}, although all below {synced} was synced")
            for item in found[:-1]:
                exact = item.sequence < synced or log.format.has_checksums
                if item.value != life.values[item.sequence] and (exact or len(item.value) != len(life.values[item.sequence])):
                    raise Wrong(f"record {item.sequence} of {end}, synced below {synced}, has other bytes")
            counts["records not synced that survived"] += end - max(synced, first) if end > synced else 0
            check_readers(life, log, when, synced, counts)
            log.sync()
            kept = [item.value for item in found]
        with system.replaced(Rebooted(3)), kvspool.open(root / "log") as log:
            assert isinstance(log, Journal)
            if [item.value for item in log.read()] != kept or log.append(b"x" * 40) != end + 1:
                raise Wrong("after one more start it is another one")


def check_readers(life: Life, log: Journal, when: int, synced: int, counts: Counter[str]) -> None:
    """Every reader stands at a place that it had committed, and at none that is ahead of what is there."""
    for name in READERS:
        commits = life.commits[name]
        done = max(number for number, (_, time, _) in enumerate(commits) if time <= when)
        allowed = {sequence for begun, _, sequence in commits[done:] if begun <= when}
        stored = log.offsets.load(name)
        if stored not in allowed:
            raise Wrong(f"the reader {name!r} stands at {stored}, not at one of {allowed}")
        if stored is not None and stored > log.end():
            raise Wrong(f"the reader {name!r} stands at {stored}, and the journal ends at {log.end()}")
        counts["readers checked"] += 1


class Rebooted(system.Port):
    """Another run of the machine; flushes cost nothing."""

    def __init__(self, boot: int) -> None:
        self.boot = boot

    def boot_id(self) -> bytes:
        return self.boot.to_bytes(16, "little")

    def flush(self, fd: int) -> None:
        pass

    def flush_data(self, fd: int) -> None:
        pass


def adopt(root: Path) -> None:
    """Return the number of the directory that has a name next to a journal."""
    for path in root.glob(".*.kvspool/writers-*"):
        path.rename(path.with_name(f"writers-{system.port.identity(root / 'log')}.{path.name.partition('.')[2]}"))


def campaign(images: int, seed: int, forms: list[str], say: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Try so many images; returns what they were like. Raises Wrong, with the seed."""
    counts: Counter[str] = Counter()
    number = 0
    while counts["images"] < images:
        choose = random.Random(f"{seed} {number}")
        form = forms[number % len(forms)]
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            root = Path(folder) / "life"
            root.mkdir()
            life = Life(root, form, choose)
            target = Path(folder) / "image"
            directories = [path.relative_to(root) for path in root.rglob("*") if path.is_dir()]
            for _ in range(IMAGES):
                for directory in [Path(), *sorted(directories)]:
                    (target / directory).mkdir(mode=0o700)
                when = choose.randint(1, life.port.clock)
                life.port.image(when, choose, target)
                adopt(target)
                try:
                    check(life, target, when, choose, counts)
                except (Wrong, KvspoolError, AssertionError, KeyError) as error:
                    error.add_note(f"{form}, seed {seed}, life {number}, crash at {when} of {life.port.clock}")
                    raise
                shutil.rmtree(target)
                counts["images"] += 1
                counts[form] += 1
        number += 1
        if number % 100 == 0:
            say(f"{dict(counts)}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--format", choices=sorted(FORMATS), help="of these alone")
    options = parser.parse_args()
    started = time.monotonic()
    forms = [options.format] if options.format else list(FORMATS)
    counts = campaign(options.images, options.seed, forms, lambda line: print(line, flush=True))
    print(f"seed {options.seed}, {time.monotonic() - started:.0f} s: {dict(counts)}, 0 violations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
