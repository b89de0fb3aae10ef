#!/usr/bin/env python3
"""Crash a machine many times, in memory, and see whether a spool recovers from each crash.

A random workload runs the real code on a small spool whose memory records every store. It makes appends of all sizes, and syncs and
durable appends with other appends during them. Writers and flushers are killed. The ring wraps several times, and durable readers commit.
All policies, the keyed codec and resizes are used; all of the above happens during resizes, too, and some of them are killed.

Then disks are composed as a crash could have left them. Each page (or sector) of both files has any of the versions since the last flush of
its file. Between the exchange of two pairs of files and the flush of their directory, either pair may remain. Flushes of a sync or a
recovery fail. Pages that were not written then count as clean, and only a new store makes the kernel write them. A repair follows, of a
control block that may be damaged too; it is killed now and then, and run again. Each image is recovered and compared with the appended
records:

  - every record before the last completed sync is there, unless the policy had evicted it by then;
  - every record was appended, with these bytes, and keyed values can be decoded. Only instead of a record that was not synced may there be
    one that a killed writer had stored and not published;
  - sequences ascend, and missing ones are reported as Gaps: every account adds up;
  - no sequence that was ever visible is assigned again;
  - a durable reader continues at a sequence that it had committed since the last flush, and gets all kept records from there on;
  - no frame that is not kept could be found again, and a second recovery finds the same.

A recovered disk is used again, and crashes again, up to four times, also during its recovery.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from kvspool import system
from kvspool.engine.iteration import Iteration
from kvspool.errors import Corruption, SpoolFull, TooLarge
from kvspool.kernel import frames, group_py, machine, twins
from kvspool.keyed import Packer
from kvspool.record import Codec, Gap
from kvspool.spool import checkpoints, durability, epochs, findings, format, recovery, resize, search, slots
from kvspool.spool.cursor import RingCursor
from kvspool.spool.keys import KeyTable
from kvspool.spool.memory import FrameRun
from kvspool.spool.reader import resume
from kvspool.spool.repair import _makes_sense, mend
from kvspool.system.descriptor import Descriptor

LOG_ID = bytes(range(16))
frames_py = twins.interpreted("kvspool.kernel.frames", frames.PARTS)
CAPACITIES = (4096, 4096, 8192, 8192, 12288, 16384, 65536)
UNITS = (4096, 512)  # bytes that reach the disk at once
RECORDS = 70  # at most, in one life of the machine
IMAGES = 120  # of each life
LIVES = 4  # of one disk
NEVER = 1 << 62
PAGE = 4096  # bytes that the kernel treats as dirty or clean
READERS = (b"one", b"two")
DATA, CONTROL = 1000, 1001  # instead of descriptors


class File:
    """The memory of a file, or of a part of one, that remembers every version of each of its units, and when it was flushed."""

    def __init__(self, content: bytes, unit: int, clock: list[int]) -> None:
        self.bytes = bytearray(content)
        self.view = memoryview(self.bytes)
        self.unit = unit
        self.clock = clock  # one count of the stores to all parts of both files
        self.flushes = [0]
        self.failures: list[int] = []  # when a flush failed
        self.stores: dict[int, list[int]] = {}  # by page: when something was stored there
        self.times: dict[int, list[int]] = {}
        self.versions: dict[int, list[bytes]] = {}

    def store(self, view: memoryview, at: Any, value: Any, first: int, size: int) -> None:
        """Store, and remember the units that changed as they were before the first time and as they are now."""
        units = range(first // self.unit, (first + size - 1) // self.unit + 1)
        for number in units:
            if number not in self.versions:
                self.times[number] = [0]
                self.versions[number] = [bytes(self.view[number * self.unit : (number + 1) * self.unit])]
        view[at] = value
        self.clock[0] += 1
        for page in range(first // PAGE, (first + size - 1) // PAGE + 1):
            self.stores.setdefault(page, []).append(self.clock[0])
        for number in units:
            self.times[number].append(self.clock[0])
            self.versions[number].append(bytes(self.view[number * self.unit : (number + 1) * self.unit]))

    def flush(self) -> None:
        self.clock[0] += 1
        self.flushes.append(self.clock[0])

    def fail(self) -> None:
        """Fail to flush: any of the pages may be on disk, and all of them count as clean."""
        self.clock[0] += 1
        self.failures.append(self.clock[0])

    def kept(self, number: int, when: int) -> int:
        """Return the last moment before this one at which a unit was on disk for sure."""
        if not self.failures:
            return self.flushed(when)
        stores = self.stores.get(number * self.unit // PAGE, [])
        kept = clean = self.flushes[0]
        for at in sorted(at for at in (*self.flushes, *self.failures) if at <= when):
            if bisect_right(stores, at) > bisect_right(stores, clean):
                clean = at
                if at in self.flushes:
                    kept = at
        return kept

    def flushed(self, when: int) -> int:
        """Return when the last flush before this moment was."""
        return self.flushes[bisect_right(self.flushes, when) - 1]

    def crash(self, when: int, base: bytes, choose: random.Random) -> bytearray:
        """Return a disk as a crash at this moment could have left it; `base` is what the file began with."""
        disk = bytearray(base)
        for number, times in self.times.items():
            least, most = bisect_right(times, self.kept(number, when)) - 1, bisect_right(times, when) - 1
            # The oldest and the newest are the likeliest, since whole files are often late or early.
            kind = choose.getrandbits(2)
            at = least if kind == 0 else most if kind == 1 else choose.randint(least, most)
            disk[number * self.unit : (number + 1) * self.unit] = self.versions[number][at]
        return disk


class Recorded:
    """A part of a file as the interpreted twin sees it; every store is recorded."""

    def __init__(self, file: File, view: memoryview, start: int) -> None:
        self.file, self.view, self.start = file, view, start

    def __len__(self) -> int:
        return len(self.view)

    def cast(self, code: str) -> Recorded:
        return Recorded(self.file, self.view.cast(code), self.start)  # type: ignore[call-overload]

    def __getitem__(self, at: Any) -> Any:
        return self.view[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, slice):
            first, size = at.start or 0, len(value)
        else:
            first, size = at * self.view.itemsize, self.view.itemsize
        if size:
            self.file.store(self.view, at, value, self.start + first, size)


class Disk:
    """A pair in memory: a recovery and a cursor take it for an open spool. `twin` reads it."""

    path = Path("image")
    is_closed = False
    key_table: KeyTable | None = None
    data_fd, control_fd = DATA, CONTROL
    is_replaced = False
    flushed = 0

    def __init__(self, front: Any, ring: Any, control: Any, policy: int = 0, twin: Any = frames, log_id: bytes = LOG_ID) -> None:
        self.front, self.ring, self.control, self.policy, self.twin = front, ring, control, policy, twin
        self.seed = format.frame_seed(log_id)
        empty = format.HEADER.unpack(bytes(format.HEADER.size))
        self.header = empty._replace(control_bytes=len(control), capacity=len(ring), log_id=log_id, policy=policy, codec=Codec.KEYED)
        self.flush_data: Callable[[], None] = lambda: None
        self.flush_control: Callable[[], None] = lambda: None

    def write_front(self, data: bytes, at: int) -> None:
        self.front[at : at + len(data)] = data

    def rewrite(self) -> None:
        """Store something in every page."""
        for part in (self.ring, self.control):
            recovery.touch(part)

    def update_producers(self, kept: Any, *, is_forced: bool) -> None:
        """Tell producers what is lost: there are none."""

    def copy_producers(self, successor: Any) -> None:
        """Take the list of producers along: there is none."""

    def count_gap(self) -> None:
        """Count a Gap in the rates: there are none."""

    def reader(self, position: int, sequence: int) -> Any:
        return self.twin.FrameReader(self.ring, self.control, self.seed, position, sequence)

    def ring_reader(self) -> Any:
        return self.twin.FrameReader(self.ring, memoryview(bytes(len(self.control))), self.seed, 0, 0)

    def scanner(self) -> Any:
        return self.twin.FrameScanner(self.ring, self.control, self.seed)

    def writer(self, holder: bytes = bytes(48)) -> Any:
        return self.twin.FrameWriter(self.ring, self.control, self.seed, None, memoryview(holder), self.policy != 0, front=self.front)

    def is_in_place(self) -> bool:
        """Return whether the log is in these files."""
        return not self.is_replaced

    def wake(self) -> None:
        """Wake sleepers on inotify: there are none."""

    def read(self, place: tuple[int, int] | None = None) -> list[Any]:
        """Return the records and Gaps from a place on, by default from the oldest."""
        reader = self.reader(0, 0)
        start = search.find(reader, "earliest") if place is None else place
        return list(Iteration(RingCursor(self, start, reader.mark()[:2], "overrun")))  # type: ignore[arg-type]

    def kept(self) -> frozenset[int]:
        """Return the sequences of all records that can be read."""
        return frozenset(item.sequence for item in self.read() if not isinstance(item, Gap))

    def least(self) -> int:
        """Return the oldest sequence that is there."""
        return search.find(self.reader(0, 0), "earliest")[1]

    def slots(self) -> slots.Slots:
        return slots.Slots(self.control, self.header.log_id)

    def keys(self) -> KeyTable:
        control, part = self.control, slice(format.KEYS_AT, format.INDEX_AT)
        region = Recorded(control.file, control.view[part], part.start) if isinstance(control, Recorded) else control[part]
        return KeyTable(region, self.header.log_id)

    def copy(self, twin: Any = None) -> Disk:
        front, ring, control = (memoryview(bytearray(part)) for part in (self.front, self.ring, self.control))
        disk = Disk(front, ring, control, self.policy, self.twin if twin is None else twin, self.header.log_id)
        disk.flushed = self.flushed
        return disk


def blank(capacity: int, policy: int = 0, boot: bytes = bytes(16), log_id: bytes = LOG_ID, epoch: format.Epoch | None = None) -> Disk:
    """Return a spool as it is made."""
    control = bytearray(format.control_bytes(capacity))
    at = format.EPOCHS_AT[0]
    epoch = epoch or format.Epoch(boot, 0, 0, 0, 0, 0, format.TRUE, 0)
    control[at : at + format.EPOCH.size] = epochs.packed(log_id, epoch)
    return Disk(memoryview(bytearray(format.DATA_START)), memoryview(bytearray(capacity)), memoryview(control), policy, log_id=log_id)


class Recording:
    """The two files of a spool, in memory that records every store. They may be the log's from `exchanged` on, and are from
    `durable_at` on.
    """

    def __init__(self, disk: Disk, unit: int, clock: list[int]) -> None:
        self.clock = clock
        self.base = bytes(disk.front), bytes(disk.ring), bytes(disk.control)
        self.files = [File(content, unit, clock) for content in self.base]
        self.front, self.ring, self.control = self.files
        self.exchanged = self.durable_at = clock[0]
        parts = self._parts()
        self.disk = Disk(*parts, disk.policy, frames_py, disk.header.log_id)
        for file in self.files:
            file.flushes = [clock[0]]

    def _parts(self) -> list[Recorded]:
        return [Recorded(file, file.view, 0) for file in self.files]

    def crash(self, when: int, twin: Any, choose: random.Random) -> Disk:
        """Return a disk that a crash at this moment could leave."""
        parts = (memoryview(file.crash(when, base, choose)) for file, base in zip(self.files, self.base, strict=True))
        return Disk(*parts, self.disk.policy, twin, self.disk.header.log_id)


class Killed(BaseException):
    """The process that resizes or repairs the log is no more."""


class Resizing(resize._Resizing):
    """A resize without locks: only `life` uses the files."""

    def __init__(self, life: Life, new: Recording) -> None:
        super().__init__(life.disk, new.disk)  # type: ignore[arg-type]
        self.life = life
        self.is_alone = False

    @contextmanager
    def _all_locks(self, file: Descriptor, timeout: float) -> Iterator[None]:
        self.is_alone = True
        yield


class Machine(system.Port):
    """The calls of a resize to the system."""

    def __init__(self, life: Life, new: Recording) -> None:
        self.life, self.new = life, new

    def boot_id(self) -> bytes:
        return boot_id(self.life.number)

    def random(self, size: int) -> bytes:
        return self.life.choose.randbytes(size)

    def write(self, fd: int, data: bytes, at: int) -> None:
        assert fd == DATA
        self.new.disk.write_front(data, at)

    def flush_data(self, fd: int) -> None:
        if fd == CONTROL:
            self.new.control.flush()
        else:
            self.life.flush_data(self.new)

    def exchange(self, one: Any, other: Any) -> None:
        self.life.exchange(self.new)

    def open(self, path: Any, flags: int, mode: int = 0) -> int:  # type: ignore[override]
        """Open a real directory instead of the log's."""
        self.directory = os.open(os.sep, os.O_RDONLY)
        return self.directory

    def flush(self, fd: int) -> None:
        assert fd == self.directory
        self.life.finish(self.new)


def boot_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


class History:
    """The appends, reads, syncs and commits in all lives of a disk, and their times in this one."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[bytes, Any]] = {}  # by sequence: the stored bytes, and what was meant where they are keyed
        self.unpublished: dict[int, set[bytes]] = {}  # by sequence: what killed writers had put there
        self.seen: list[tuple[int, int]] = [(0, 0)]  # when, and the sequence below which every number was given out
        self.safe: list[tuple[int, frozenset[int]]] = [(0, frozenset())]  # when, and the sequences that were on disk then
        self.least: list[tuple[int, int]] = [(0, 0)]  # when, and the oldest sequence that was not evicted
        self.commits: dict[bytes, list[tuple[int, int]]] = {name: [] for name in READERS}  # when, and the sequence

    @staticmethod
    def at(entries: list[tuple[int, Any]], when: int) -> Any:
        return entries[bisect_right(entries, when, key=lambda entry: entry[0]) - 1][1]

    def committed(self, name: bytes, flushed: int, when: int) -> set[int]:
        """Return the sequences of which a commit may be on disk."""
        entries = self.commits[name]
        first = max(0, bisect_right(entries, flushed, key=lambda entry: entry[0]) - 1)
        return {sequence for time, sequence in entries[first:] if time <= when}

    def crashed(self, when: int) -> History:
        """Return the history with which the next life begins."""
        after = History()
        known = self.at(self.seen, when)
        least = self.at(self.least, when)
        after.values = {sequence: value for sequence, value in self.values.items() if sequence < known}
        after.unpublished = self.unpublished
        after.seen = [(0, known)]
        after.safe = [(0, frozenset(sequence for sequence in self.at(self.safe, when) if sequence >= least))]
        after.least = [(0, least)]
        return after


class Life:
    """One start of the machine: recover the disk, append, sync and commit, and remember every store."""

    def __init__(self, disk: Disk, history: History, number: int, unit: int, choose: random.Random) -> None:
        self.clock = [0]
        self.history = history
        self.choose = choose
        self.number = number
        self.unit = unit
        self.recordings: list[Recording] = []
        self.resizes: list[tuple[int, int]] = []  # when they began and ended
        self.repairs: list[tuple[int, int]] = []
        self._keep(Recording(disk, unit, self.clock))
        if number:
            self._recover()
            self.history.safe.append((self.clock[0], self.disk.kept()))
            self._adopt()
        self.recovered = self.clock[0]
        self.table = self.disk.keys()
        self.pack = Packer(self._intern).pack
        self.commits: dict[bytes, tuple[Any, Any]] = {}
        self._open_readers()
        self._work()

    def _keep(self, recording: Recording) -> None:
        """Continue in these files."""
        self.recordings.append(recording)
        self.front, self.ring, self.control = recording.files
        self.disk = recording.disk
        self.disk.flush_data, self.disk.flush_control = lambda: self.flush_data(recording), recording.control.flush

    def _recover(self) -> None:
        """Recover the disk; now and then a flush fails, and the next opener does it again."""
        if self.choose.random() < 0.1:
            with suppress(OSError), self._troubled(OSError(errno.EIO, "the flush failed")):
                recovery.recover(self.disk, boot_id(self.number), 1)  # type: ignore[arg-type]
            if epochs.is_true(self.disk.control, self.disk.header.log_id, boot_id(self.number)):
                return
        recovery.recover(self.disk, boot_id(self.number), 1)  # type: ignore[arg-type]

    @contextmanager
    def _troubled(self, error: BaseException) -> Iterator[None]:
        """Let one of the flushes inside the `with` block fail, or the process be killed before it."""
        disk, left = self.disk, self.choose.randrange(5)
        data, control = disk.flush_data, disk.flush_control

        def troubled(flush: Callable[[], None], files: list[File]) -> Callable[[], None]:
            def flushed() -> None:
                nonlocal left
                left -= 1
                if left:
                    flush()
                    return
                if isinstance(error, OSError):
                    for file in files:
                        file.fail()
                raise error

            return flushed

        disk.flush_data, disk.flush_control = troubled(data, [self.front, self.ring]), troubled(control, [self.control])
        try:
            yield
        finally:
            disk.flush_data, disk.flush_control = data, control

    def _adopt(self) -> None:
        """Count a killed writer's frame that the crash has made visible as a record from now on."""
        for item in self.disk.read():
            if not isinstance(item, Gap) and item.value in self.history.unpublished.get(item.sequence, ()):
                self.history.values[item.sequence] = item.value, None

    def _intern(self, keys: list[str]) -> dict[str, int]:
        self.table.look()
        if not self.table.is_full and any(key not in self.table.indexes for key in keys):
            self.table.add(keys, self.control.flush)
        return self.table.indexes

    def _open_readers(self) -> None:
        """Find the readers that the crash left, and note where they are: that is what a crash of this life can take them back to."""
        for name, slot in self._slots():
            commit = slot.commit()
            self.commits[name] = slot, commit
            self.history.commits[name] = [(0, commit.sequence)]

    def _work(self) -> None:
        owed: dict[bytes, set[int]] = {name: set() for name in READERS}
        for name, (_, commit) in self.commits.items():
            owed[name] = {sequence for sequence in self.disk.kept() if sequence >= commit.sequence}
        for _ in range(self.choose.randrange(RECORDS)):
            kind = self.choose.random()
            if kind < 0.08:
                self._sync(owed)
            elif kind < 0.20:
                self._commit(owed)
            elif kind < 0.22:
                self._resize(owed)
            elif kind < 0.24:
                self._repair(owed)
            else:
                self._append(owed)
        self.clock[0] += 1
        if self.disk.policy:
            for name, (_, commit) in self.commits.items():
                place = resume(self.disk.reader(0, 0), "", commit)
                got = {item.sequence for item in self.disk.read(place) if not isinstance(item, Gap)}
                assert got == owed[name], f"{name!r} was to get {sorted(owed[name])}, and got {sorted(got)}"

    def _append(self, owed: dict[bytes, set[int]]) -> None:
        self._stay()
        writer = self.disk.writer()
        largest = (len(self.disk.ring) >> 2) - 48
        count = self.choose.choice((1, 1, 1, 3))
        meant: list[Any] = [None] * count
        if self.choose.random() < 0.1:
            meant = [{f"key {self.choose.randrange(40)}": at} for at in range(count)]
            values = [self.pack(each) for each in meant]
        else:
            sizes = (0, 9, 60, 200, min(1500, largest), largest // 3, largest)
            values = [self.choose.randbytes(self.choose.choice(sizes)) for _ in range(count)]
        began, sequence = self.clock[0], writer.begin()
        if not writer.admits(writer.end_of_many(writer.end, None, values)):
            return
        codecs = bytes(Codec.RAW if each is None else Codec.KEYED for each in meant)
        writer.put_many(None, values, 0, codecs, 1)
        if meant[0] is not None or self.choose.random() < 0.9:
            writer.publish()
        published = self.disk.reader(0, 0).mark()[1] - sequence
        for at in range(published, count):
            self.history.unpublished.setdefault(sequence + at, set()).add(values[at])
        count = published
        self.history.values.update(enumerate(zip(values[:count], meant, strict=False), sequence))
        # Part of them may have been published earlier, and room was made first of all: both count from the first store on.
        self.history.seen.append((began, sequence + count))
        self.history.least.append((began, self.disk.least()))
        for name in self.commits:
            owed[name].update(range(sequence, sequence + count))

    def _stay(self) -> None:
        """As a writer does that finds the word of a resize which did not come to its end."""
        words = self.disk.control.cast("Q")
        if words[frames_py.MOVED]:
            words[frames_py.MOVED] = 0

    def _resize(self, owed: dict[bytes, set[int]]) -> None:
        """Replace these files by another two, by the real code, while others continue; now and then it is killed."""
        self._stay()
        began = self.clock[0]
        found = epochs.newest(self.disk.control, self.disk.header.log_id)
        assert found is not None
        made = blank(self.choose.choice(CAPACITIES), self.disk.policy, log_id=self.choose.randbytes(16), epoch=found[1])
        new = Recording(made, self.unit, self.clock)
        self.disk.key_table, new.disk.key_table = self.table, new.disk.keys()
        dies = self.choose.randrange(40) if self.choose.random() < 0.2 else -1
        looks = 0

        def progress(position: int, end: int) -> None:
            nonlocal looks
            looks += 1
            if looks == dies:
                raise Killed
            if not resizing.is_alone:
                self._append_meanwhile(owed)
                if self.choose.random() < 0.1:
                    self._commit(owed)

        interpreted = mock.patch.multiple(durability, Ring=frames_py.Ring, FlushGroup=group_py.FlushGroup)
        with system.replaced(Machine(self, new)), interpreted:
            try:
                resizing = Resizing(self, new)
                resizing.run(Path("image"), None, 0, progress)  # type: ignore[arg-type]
            except Killed:
                self._let_die(resizing)
            except (SpoolFull, TooLarge, Corruption):
                pass  # refused: readers have yet to read what has no room, say
        self.disk.key_table = None
        self.resizes.append((began, self.clock[0]))

    def _let_die(self, resizing: Resizing) -> None:
        """The leftovers of a killed process."""
        if resizing.is_alone:
            self.disk.control.cast("Q")[frames_py.MOVED] = 1

    def exchange(self, new: Recording) -> None:
        """Replace the old files by the new ones. Records without room there are evicted; a crash may restore the old files, too."""
        self.clock[0] += 1
        new.exchanged, new.durable_at = self.clock[0], NEVER
        before = self.disk
        self._keep(new)
        before.key_table, before.is_replaced = None, True
        self.table = new.disk.key_table
        new.disk.key_table = None
        self.history.least.append((self.clock[0], max(before.least(), new.disk.least())))
        self.commits = {name: (slot, slot.commit()) for name, slot in self._slots()}

    def finish(self, new: Recording) -> None:
        """The directory is on disk, and all that is in the new pair."""
        self.clock[0] += 1
        new.durable_at = self.clock[0]
        self.history.safe.append((self.clock[0], new.disk.kept()))
        self.history.least.append((self.clock[0], new.disk.least()))

    def _slots(self) -> Iterator[tuple[bytes, Any]]:
        return ((slot.raw_name.rstrip(b"\0"), slot) for slot in self.disk.slots().taken())

    def flush_data(self, recording: Recording) -> None:
        """Flush spool.dat: of its parts one is there before the other."""
        parts = [recording.front, recording.ring]
        self.choose.shuffle(parts)
        for part in parts:
            part.flush()

    def _sync(self, owed: dict[bytes, set[int]]) -> None:
        """Flush as the spool's flusher does, while writers continue. A durable append, half of the time, leaves spool.ctl alone."""
        kept = self.disk.kept()
        reader = self.disk.reader(0, 0)
        state, synced = checkpoints.state(reader), reader.word(format.SYNCED)
        at, raw = checkpoints.successor(self.disk.front, self.disk.header, state, synced, boot_id(self.number))
        self._append_meanwhile(owed)
        self.disk.write_front(raw, at)
        self._append_meanwhile(owed)
        if self.choose.random() < 0.1:
            return  # killed
        self.disk.flush_data()
        self.history.safe.append((self.clock[0], kept))
        checkpoints.announce(self.disk.control, state)
        self._append_meanwhile(owed)
        if self.choose.random() < 0.5:
            self.control.flush()

    def _repair(self, owed: dict[bytes, set[int]]) -> None:
        """Let a sync fail, or not, and the control block be damaged, or not; then repair the log until it takes records again."""
        self._stay()
        words = self.disk.control.cast("Q")
        if self.choose.random() < 0.8:
            reader = self.disk.reader(0, 0)
            state = checkpoints.state(reader)
            at, raw = checkpoints.successor(self.disk.front, self.disk.header, state, reader.word(format.SYNCED), boot_id(self.number))
            self.disk.write_front(raw, at)
            for file in (self.front, self.ring):
                file.fail()
            words[frames_py.SYNC_ERROR] = errno.EIO
        if self.choose.random() < 0.6:
            for word in self.choose.sample((frames_py.HEAD, frames_py.TAIL, frames_py.MIN_SEQ, frames_py.MARKS), 2):
                words[word] = self.choose.getrandbits(self.choose.choice((3, 12, 64)))
        began = self.clock[0]
        trouble = self.choose.choice((Killed(), Killed(), OSError(errno.EIO, "the flush failed")))
        with suppress(Killed, OSError), self._troubled(trouble):
            mend(self.disk, boot_id(self.number), 1)  # type: ignore[arg-type]
        if words[frames_py.SYNC_ERROR] or not self._is_in_order():
            mend(self.disk, boot_id(self.number), 1)  # type: ignore[arg-type]
        self.repairs.append((began, self.clock[0]))
        self._adopt()
        least = self.history.at(self.history.least, self.clock[0])
        lost = {sequence for sequence in self.history.at(self.history.safe, self.clock[0]) if sequence >= least} - self.disk.kept()
        assert not lost, f"a repair lost synced records: {sorted(lost)}"
        self._sync(owed)
        self.commits = {name: (slot, slot.commit()) for name, slot in self._slots()}
        for name, (_, commit) in self.commits.items():
            owed[name] = {sequence for sequence in self.disk.kept() if sequence >= commit.sequence}

    def _is_in_order(self) -> bool:
        """Return whether a writer may continue."""
        return epochs.is_true(self.disk.control, self.disk.header.log_id, boot_id(self.number)) and _makes_sense(
            self.disk.reader(0, 0)
        )

    def _append_meanwhile(self, owed: dict[bytes, set[int]]) -> None:
        if self.choose.random() < 0.3:
            self._append(owed)

    def _commit(self, owed: dict[bytes, set[int]]) -> None:
        """Open a durable reader, or let one move; as `Reader` does it under the append lock."""
        name = self.choose.choice(READERS)
        reader = self.disk.reader(0, 0)
        self.disk.slots().announce()
        if name not in self.commits:
            slot = next(slot for slot in map(self.disk.slots().slot, format.SLOTS) if not slot.is_taken)
            place = search.find(reader, self.choose.choice(("earliest", "latest")))
            commit = slot.take(name.ljust(64, b"\0"), place, 1)
        else:
            slot, before = self.commits[name]
            items = self.disk.read(resume(reader, "", before))
            if not items:
                return
            item = self.choose.choice(items)
            sequence = (item.last if isinstance(item, Gap) else item.sequence) + 1
            commit = slot.move(search.find(reader, sequence), 1, before)
        self.commits[name] = slot, commit
        self.history.commits[name].append((self.clock[0], commit.sequence))
        owed[name] = {sequence for sequence in self.disk.kept() if sequence >= commit.sequence}

    def crash(self, when: int, twin: Any = frames) -> Disk:
        """Return a disk that a crash at this moment could leave; `flushed` of it: when its spool.ctl was flushed before."""
        there = [one for one in self.recordings if one.exchanged <= when]
        oldest = max(at for at, one in enumerate(there) if one.durable_at <= when)
        recording = self.choose.choice(there[oldest:])
        disk = recording.crash(when, twin, self.choose)
        disk.flushed = recording.control.flushed(when)
        return disk

    def moment(self) -> int:
        """Return a moment at which the machine may crash: any, or one of a recovery or of a resize."""
        kind = self.choose.random()
        exchanges = [one.exchanged for one in self.recordings[1:]]
        if kind < 0.05 and exchanges:
            return self.choose.choice(exchanges)
        if kind < 0.25 and self.resizes:
            return self.choose.randint(*self.choose.choice(self.resizes))
        if kind < 0.45 and self.repairs:
            return self.choose.randint(*self.choose.choice(self.repairs))
        return self.choose.randint(0, self.recovered if kind > 0.75 and self.recovered else self.clock[0])

    def kinds(self, when: int, disk: Disk) -> Moments:
        """Return what the moment of an image was, and its disk."""
        is_between = any(one.exchanged <= when < one.durable_at for one in self.recordings)
        is_new = disk.header.log_id != self.recordings[0].disk.header.log_id
        is_in_resize = any(began <= when < ended for began, ended in self.resizes)
        is_in_repair = any(began <= when < ended for began, ended in self.repairs)
        return Moments(when < self.recovered, is_in_resize, is_between, is_new, is_in_repair)


def check(disk: Disk, history: History, when: int, number: int) -> findings.Findings:
    """Recover a disk, and compare it with the history; AssertionError says what is wrong."""
    boot = boot_id(number)
    found = recovery.recover(disk, boot, 1)  # type: ignore[arg-type]
    assert found is not None
    assert epochs.is_true(disk.control, disk.header.log_id, boot)
    disk.key_table = disk.keys()
    place = search.find(disk.reader(0, 0), "earliest")
    got, brought_up = check_items(disk.read(place), place[1], found.state.next_seq, history)
    assert got | brought_up == {sequence for run in found.kept for sequence in range(run.first, run.last + 1)}
    least, seen = history.at(history.least, when), history.at(history.seen, when)
    lost = {sequence for sequence in history.at(history.safe, when) if sequence >= least} - got
    assert not lost, f"synced records are gone: {sorted(lost)}"
    next_sequence = disk.reader(0, 0).mark()[1]
    assert next_sequence == found.state.next_seq >= seen, f"{next_sequence} was given out before; {seen} is next"
    there = {slot.raw_name.rstrip(b"\0") for slot in disk.slots().taken()}
    gone = {name for name, commits in history.commits.items() if any(at <= disk.flushed for at, _ in commits)} - there
    assert not gone, f"durable readers are gone: {gone}"
    for slot in disk.slots().taken():
        commit = slot.commit()
        allowed = history.committed(slot.raw_name.rstrip(b"\0"), disk.flushed, when)
        assert commit.sequence in allowed, f"{slot.name} is at {commit.sequence}, and committed {sorted(allowed)}"
        place = resume(disk.reader(0, 0), slot.name, commit)
        rest = check_items(disk.read(place), commit.sequence, found.state.next_seq, history)
        assert rest[0] | rest[1] == {sequence for sequence in got | brought_up if sequence >= commit.sequence}
    again = findings.examine(disk)  # type: ignore[arg-type]
    assert again.rejected == [], "a leftover could be found again"
    assert again.state[:3] == found.state[:3] or not found.kept
    assert joined(again.kept) == joined(found.kept)
    return found


def joined(runs: list[FrameRun]) -> list[list[int]]:
    """Return start, end and sequences of the runs, with those that touch made one."""
    out: list[list[int]] = []
    for run in runs:
        if out and (out[-1][1], out[-1][3] + 1) == (run.start, run.first):
            out[-1][1], out[-1][3] = run.end, run.last
        else:
            out.append([run.start, run.end, run.first, run.last])
    return out


def check_items(items: list[Any], first: int, end: int, history: History) -> tuple[set[int], set[int]]:
    """Return the sequences that were read, and those with records that were never published.

    Every sequence from `first` to `end` must be an appended record, or be in a Gap.
    """
    got: set[int] = set()
    brought_up: set[int] = set()
    expected = first
    for item in items:
        at, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
        assert at == expected, f"{item} follows {expected}"
        expected = last + 1
        if isinstance(item, Gap):
            continue
        value, meant = history.values.get(item.sequence, (None, None))
        if item.value == value:
            assert meant is None or item.data == meant, f"{item.sequence} means something else"
            got.add(item.sequence)
        else:
            assert item.value in history.unpublished.get(item.sequence, ()), f"{item.sequence} has other bytes"
            brought_up.add(item.sequence)
    assert expected == end, f"the account ends at {expected}, the log at {end}"
    return got, brought_up


class Moments(NamedTuple):
    """How many images were made while a recovery was under way; while a resize was; between the exchange of the pairs and the flush of
    their directory; of files that a resize had put in place; and while a repair was under way.
    """

    recovery: int
    resize: int
    exchanged: int
    resized: int
    repair: int


def campaign(images: int, seed: int, unit: int, on_case: Callable[[str], None] = lambda name: None) -> Moments:
    """Check this many images. The same seed makes the same images."""
    clock, machine.now = machine.now, lambda: 10**18
    try:
        return _campaign(images, random.Random(seed), unit, on_case)
    finally:
        machine.now = clock


def _campaign(images: int, choose: random.Random, unit: int, on_case: Callable[[str], None]) -> Moments:
    done, moments = 0, Moments(0, 0, 0, 0, 0)
    while done < images:
        disk, history = blank(choose.choice(CAPACITIES), choose.choice((0, 0, 1, 2))), History()
        for number in range(choose.randint(1, LIVES)):
            life = Life(disk, history, number, unit, choose)
            at = 0
            for _ in range(min(IMAGES, images - done)):
                at = life.moment()
                disk = life.crash(at)
                on_case(check(disk.copy(), history, at, number + 1).case.name)
                done += 1
                moments = Moments(*(count + kind for count, kind in zip(moments, life.kinds(at, disk), strict=True)))
            history = history.crashed(at)
            if done >= images:
                break
    return moments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000, help="how many, in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeat a campaign (default: a new one)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}, images {options.images}, recovered on the {frames.TWIN} twin", flush=True)
    for unit in UNITS:
        counts: dict[str, int] = {}

        def count(name: str, counts: dict[str, int] = counts) -> None:
            counts[name] = counts.get(name, 0) + 1

        began = time.monotonic()
        moments = campaign(options.images // len(UNITS), seed, unit, count)
        seconds = time.monotonic() - began
        total = sum(counts.values())
        print(f"{total} images of {unit}-byte units in {seconds:.1f} s, {total / seconds:.0f}/s; no fault")
        print(f"  {moments.recovery} during a recovery, {moments.resize} during a resize, {moments.exchanged} of them between the exchange")
        print(f"  of two pairs and the flush of their directory; {moments.resized} of files that a resize made;")
        print(f"  {moments.repair} during a repair")
        for name, number in sorted(counts.items(), key=lambda each: -each[1]):
            print(f"  {number:>8}  {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
