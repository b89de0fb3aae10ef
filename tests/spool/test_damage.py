"""A small log damaged in every way: cut off, zeroed, reordered, with parts of an older state, with a bit flipped, with junk at its end.

Opening, reading, appending and continuing a durable reader give the documented error, or true records and Gaps that account for
every other sequence: never a wrong record. All of it runs in a child whose memory is bounded, each case under an alarm that ends it.

`tests/spool/test_spool_files.py` has the headers' bits, `tests/test_frames.py` those of a ring in plain memory. KVSPOOL_ALL_DAMAGE=1 flips
every bit of both files; the default is one in some hundreds, others in each run.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from children import Died, bound_addresses, in_child
from loops import IS_SECOND_RUN

import kvspool
from kvspool import Gap, Record, errors
from kvspool.kernel import frames_py as frames
from kvspool.spool import format

ALL = os.environ.get("KVSPOOL_ALL_DAMAGE") == "1"
STRIDE = 1 if ALL else 293 if IS_SECOND_RUN else 97  # bits from one flip to the next; every byte of a structure is hit in some run
FILES = (format.CONTROL_FILE, format.DATA_FILE)
SECONDS = 5  # for one case
MEMORY = 256 << 20  # bytes more than the child has at its start
RECORDS = 90  # two laps
APPENDED = b"appended to a damaged log"
REFUSED = (errors.FormatError, errors.Corruption, errors.Poisoned)

# Words that nothing covers but each other: where one is wrong, records may be lost, or Gaps told of what never was. Never a wrong record.
TRUSTED = range(frames.HEAD * 8, (frames.MARKS + 2 * frames.MARK_WORDS) * 8)


def value_of(sequence: int) -> bytes:
    return b"%d:" % sequence + bytes([sequence % 251]) * (sequence * 7 % 90)


class Sample(NamedTuple):
    """The files of a log, by name; what it holds: the oldest sequence, the next one, and the one that its reader has committed."""

    files: dict[str, bytes]
    first: int
    next: int
    committed: int


class Outcome(NamedTuple):
    """The results of a damaged log: the error that ended it, the sequences read and lost, and those of a new record's append and read."""

    error: str
    read: list[int]
    lost: list[int]
    appended: list[int]
    resumed: int  # where the durable reader stood; -1: it couldn't be opened


def files_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """A log at four times: after 80 records, synced after 85, after 90, and a lap later."""
    path = tmp_path_factory.mktemp("sample") / "log"
    found = []
    with kvspool.create(path, capacity=4096) as log, log.reader("reader") as reader:
        for sequence in range(RECORDS + 60):
            if sequence in (80, 85, 90):
                found.append(Sample(files_of(path), log.stats().first_sequence, sequence, reader.committed))
            log.append(value_of(sequence), key=b"key", timestamp=sequence)
            if sequence == 82:
                reader.seek(75)
                reader.commit()
            if sequence == 84:
                log.sync()
            if sequence == 87:
                reader.seek(80)
                reader.commit()
        found.append(Sample(files_of(path), log.stats().first_sequence, RECORDS + 60, reader.committed))
    return found


@pytest.fixture
def sample(samples: list[Sample]) -> Sample:
    return samples[2]


def use(path: Path) -> Outcome:
    """Open the log, read it from its oldest record and from the start, append, read that, continue the durable reader."""
    read: list[int] = []
    lost: list[int] = []
    appended: list[int] = []
    resumed = -1
    try:
        with kvspool.open(path, timeout=0) as log:
            check(log.read(0, on_gap="yield"), 0, read, lost)
            check(log.read(on_gap="yield"), None, [], [])
            sequence = log.append(APPENDED)
            appended += [sequence, *(record.sequence for record in log.read(sequence, on_gap="skip"))]
            with log.reader("reader") as reader:
                resumed = reader.sequence
                check(reader.read(on_gap="yield"), resumed, [], [])
                reader.commit()
            assert log.readers() and log.stats()
    except REFUSED as error:
        return Outcome(type(error).__name__, read, lost, appended, resumed)
    return Outcome("", read, lost, appended, resumed)


def check(items: Iterator[Record | Gap], expected: int | None, read: list[int], lost: list[int]) -> None:
    """Check that every record is the one appended with its sequence, and that every sequence in between is in exactly one Gap."""
    for item in items:
        first, last = (item.first, item.last) if isinstance(item, Gap) else (item.sequence, item.sequence)
        assert expected is None or first == expected, f"{first} came where {expected} was due"
        expected = last + 1
        if isinstance(item, Gap):
            assert item.first <= item.last
            lost.extend(range(item.first, min(item.last + 1, item.first + 1000)))
        else:
            assert item.value in (value_of(item.sequence), APPENDED), f"sequence {item.sequence} has a wrong value"
            assert item.value == APPENDED or (item.key, item.timestamp) == (b"key", item.sequence)
            read.append(item.sequence)


def bounded(path: Path, cases: Iterable[tuple[str, Callable[[], None]]], judge: Callable[[str, Outcome], None]) -> Counter[str]:
    """In a child with bounded memory: do each damage to a fresh copy, use the log, judge; return how often which error came.

    A case that takes too long ends the child by SIGALRM, one that touches missing memory by SIGBUS or SIGSEGV; then its name is reported.
    """
    name_of_case = path.with_suffix(".case")

    def run() -> Counter[str]:
        bound_addresses(MEMORY)
        counts: Counter[str] = Counter()
        fd = os.open(name_of_case, os.O_WRONLY | os.O_CREAT, 0o600)
        for name, damage in cases:
            os.pwrite(fd, name.ljust(80).encode(), 0)
            signal.alarm(SECONDS)
            damage()
            try:
                outcome = use(path)
                judge(name, outcome)
            except Exception as error:
                error.add_note(f"case: {name}")
                raise
            counts[outcome.error or "used"] += 1
        return counts

    try:
        counts: Counter[str] = in_child(run)
    except Died as death:
        raise AssertionError(f"{name_of_case.read_text(encoding='utf-8').strip()}: {death}") from death
    print(dict(counts))
    return counts


class Damaged:
    """A copy of a sample's files; each damage begins with whole ones. The sizes never shrink in between, nor is a byte written in vain."""

    def __init__(self, path: Path, sample: Sample) -> None:
        self.path = path
        self.whole = dict(sample.files)
        path.mkdir()
        for name in FILES:
            (path / name).write_bytes(self.whole[name])

    def put(self, **changed: bytes) -> None:
        """Make both files what they were, but for those that are given as `ctl` or `dat`."""
        for name in FILES:
            content = changed.get(name.removeprefix("spool."), self.whole[name])
            with open(self.path / name, "r+b") as file:
                file.write(content)
                file.truncate(len(content))

    def flip(self, name: str, bit: int) -> None:
        content = bytearray(self.whole[name])
        content[bit >> 3] ^= 1 << (bit & 7)
        self.put(**{name.removeprefix("spool."): bytes(content)})


@pytest.fixture
def damaged(tmp_path: Path, sample: Sample) -> Damaged:
    return Damaged(tmp_path / "log", sample)


def assert_whole(outcome: Outcome, sample: Sample) -> None:
    """Nothing is lost but what had been overwritten before."""
    assert outcome.error == ""
    assert outcome.read == list(range(sample.first, sample.next))
    assert outcome.lost == list(range(sample.first))
    assert outcome.appended == [sample.next, sample.next]
    assert outcome.resumed == sample.committed


def test_undamaged_it_is_whole(damaged: Damaged, sample: Sample) -> None:
    assert 0 < sample.first < sample.committed < sample.next
    assert_whole(use(damaged.path), sample)


@pytest.mark.parametrize("name", FILES)
def test_cut_off_at_any_length_it_is_refused(damaged: Damaged, name: str) -> None:
    full = len(damaged.whole[name])
    near = {at + by for at in range(0, 8192, 8) for by in (0, 1)} | {full - 1, full - 8}
    lengths = sorted({at for at in near | set(range(0, full, 8 if ALL else 64)) if at < full}, reverse=True)

    def cut(length: int) -> Callable[[], None]:
        return lambda: os.truncate(damaged.path / name, length)

    def judge(case: str, outcome: Outcome) -> None:
        assert outcome.error == ("NotALog" if int(case) < 8 else "Truncated")

    counts = bounded(damaged.path, ((str(length), cut(length)) for length in lengths), judge)
    assert sum(counts.values()) == len(lengths) > 1000


@pytest.mark.parametrize("name", FILES)
def test_junk_after_the_end_means_nothing(damaged: Damaged, sample: Sample, name: str) -> None:
    def append(size: int) -> Callable[[], None]:
        return lambda: damaged.put(**{name.removeprefix("spool."): damaged.whole[name] + os.urandom(size)})

    bounded(
        damaged.path,
        ((f"{size} bytes of junk", append(size)) for size in (1, 7, 8, 512, 4095, 4096, 5000, 1 << 20)),
        lambda case, outcome: assert_whole(outcome, sample),
    )


def frames_of(sample: Sample) -> dict[int, range]:
    """Return the range in spool.dat that the checksum of each record covers."""
    data = sample.files[format.DATA_FILE]
    found = {}
    for at in range(format.DATA_START, len(data) - 31, 8):
        frame = format.FRAME.unpack(data[at : at + 32])
        content = data[at + 32 : at + 32 + frame.content]
        if frame.codec == 0 and content == b"key" + value_of(frame.sequence) and sample.first <= frame.sequence < sample.next:
            found[frame.sequence] = range(at, at + 32 + frame.content)
    assert sorted(found) == list(range(sample.first, sample.next))
    return found


def assert_only(outcome: Outcome, sample: Sample, hit: set[int]) -> None:
    """These records are lost, and no other."""
    assert outcome.error == ""
    assert outcome.read == [at for at in range(sample.first, sample.next) if at not in hit]
    assert set(outcome.lost) == {*range(sample.first), *hit}
    assert outcome.appended == [sample.next, sample.next]
    assert outcome.resumed == sample.committed


def test_a_flipped_bit_of_the_ring_costs_the_record_it_is_in(damaged: Damaged, sample: Sample) -> None:
    where = frames_of(sample)
    owner = {byte: sequence for sequence, bytes_of in where.items() for byte in bytes_of}
    bits = range(format.DATA_START * 8 + random.randrange(STRIDE), len(damaged.whole[format.DATA_FILE]) * 8, STRIDE)

    def flip(bit: int) -> Callable[[], None]:
        return lambda: damaged.flip(format.DATA_FILE, bit)

    def judge(case: str, outcome: Outcome) -> None:
        byte = int(case) >> 3
        assert_only(outcome, sample, {owner[byte]} if byte in owner else set())

    bounded(damaged.path, ((str(bit), flip(bit)) for bit in bits), judge)


def test_a_flipped_bit_of_the_control_block_never_makes_a_wrong_record(damaged: Damaged, sample: Sample) -> None:
    dense = range(format.CONTROL_AT * 8, format.PAGE * 4)
    sparse = range(format.PAGE * 4, len(damaged.whole[format.CONTROL_FILE]) * 8)
    slot = range(format.SLOTS_AT * 8, (format.SLOTS_AT + 256) * 8)
    bits = [
        bit
        for part, stride in ((dense, max(1, STRIDE // 4)), (slot, max(1, STRIDE // 4)), (sparse, max(1, STRIDE * 7 - 6)))
        for bit in range(part.start + random.randrange(stride), part.stop, stride)
    ]

    def flip(bit: int) -> Callable[[], None]:
        return lambda: damaged.flip(format.CONTROL_FILE, bit)

    def judge(case: str, outcome: Outcome) -> None:
        judge_control(int(case) >> 3, outcome, sample)

    counts = bounded(damaged.path, ((str(bit), flip(bit)) for bit in bits), judge)
    assert counts["used"] > len(bits) // 2


def judge_control(byte: int, outcome: Outcome, sample: Sample) -> None:
    """Damage outside of the words that readers must trust costs no record; a slot's may send its reader back, never forward."""
    if byte in TRUSTED:
        return
    assert outcome.read == list(range(sample.first, sample.next))
    assert outcome.lost == list(range(sample.first))
    if outcome.resumed >= 0:
        assert outcome.resumed <= sample.committed
    if not outcome.error:
        assert outcome.appended == [sample.next, sample.next]
    else:
        assert byte in range(format.SLOTS_AT, format.KEYS_AT) or frames.SYNC_ERROR * 8 <= byte < frames.SYNC_ERROR * 8 + 8


@pytest.mark.parametrize("name", FILES)
def test_any_sector_of_zeros_is_found_or_costs_its_records(damaged: Damaged, sample: Sample, name: str) -> None:
    whole = damaged.whole[name]
    where = frames_of(sample)

    def clear(at: int) -> Callable[[], None]:
        return lambda: damaged.put(**{name.removeprefix("spool."): whole[:at] + bytes(512) + whole[at + 512 :]})

    def judge(case: str, outcome: Outcome) -> None:
        at = int(case)
        if at == 0:
            assert outcome.error == "NotALog"
        elif name == format.DATA_FILE:
            hit = {sequence for sequence, bytes_of in where.items() if bytes_of.start < at + 512 and at < bytes_of.stop}
            assert_only(outcome, sample, hit)
        elif whole[at : at + 512] == bytes(512) or at >= format.PAGE:
            judge_control(at, outcome, sample)

    bounded(damaged.path, ((str(at), clear(at)) for at in range(0, len(whole), 512)), judge)


@pytest.mark.parametrize("name", FILES)
def test_any_two_pages_that_changed_places_are_found_or_do_no_harm(damaged: Damaged, sample: Sample, name: str) -> None:
    whole = damaged.whole[name]
    pages = len(whole) // 4096

    def swap(one: int, other: int) -> Callable[[], None]:
        content = [whole[at * 4096 : at * 4096 + 4096] for at in range(pages)]
        content[one], content[other] = content[other], content[one]
        return lambda: damaged.put(**{name.removeprefix("spool."): b"".join(content)})

    def judge(case: str, outcome: Outcome) -> None:
        if case.startswith("0 "):
            assert outcome.error in ("NotALog", "FormatError", "Corruption")
        else:
            judge_control(int(case.split()[0]) * 4096, outcome, sample)

    cases = [(f"{one} {other}", swap(one, other)) for one in range(pages) for other in range(one + 1, pages)]
    bounded(damaged.path, cases, judge)


def test_two_files_of_different_ages_never_make_a_wrong_record(tmp_path: Path, samples: list[Sample]) -> None:
    damaged = Damaged(tmp_path / "log", samples[0])
    ages = [(control, data) for control in range(len(samples)) for data in range(len(samples)) if control != data]

    def mix(control: int, data: int) -> Callable[[], None]:
        return lambda: damaged.put(ctl=samples[control].files[format.CONTROL_FILE], dat=samples[data].files[format.DATA_FILE])

    def judge(case: str, outcome: Outcome) -> None:
        control, data = map(int, case.split())
        if data > control:
            return
        # The newest records aren't there; those before them that nothing ran over are.
        kept = set(range(samples[control].first, samples[data].next))
        assert outcome.error or kept <= set(outcome.read)

    bounded(damaged.path, ((f"{control} {data}", mix(control, data)) for control, data in ages), judge)


@pytest.mark.parametrize("name", FILES)
def test_any_page_of_another_age_never_makes_a_wrong_record(tmp_path: Path, samples: list[Sample], name: str) -> None:
    damaged = Damaged(tmp_path / "log", samples[0])

    def mix(one: int, other: int, size: int, at: int) -> Callable[[], None]:
        content, foreign = samples[one].files[name], samples[other].files[name]
        partner = next(file for file in FILES if file != name)
        mixed = {name: content[:at] + foreign[at : at + size] + content[at + size :], partner: samples[one].files[partner]}
        return lambda: damaged.put(ctl=mixed[format.CONTROL_FILE], dat=mixed[format.DATA_FILE])

    cases = [
        (f"{one} {other} {size} {at}", mix(one, other, size, at))
        for one in range(len(samples))
        for other in range(len(samples))
        for size in (512, 4096)
        for at in range(0, len(samples[0].files[name]), size)
        if samples[one].files[name][at : at + size] != samples[other].files[name][at : at + size]
    ]
    assert len(cases) > 30
    bounded(damaged.path, cases, lambda case, outcome: None)


def test_the_bounds_work(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_damage.SECONDS", 1)

    def hang() -> None:
        while True:
            pass

    def die() -> None:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGBUS)

    for harm, death in ((hang, "SIGALRM"), (die, "SIGBUS"), (lambda: bytearray(1 << 30), "MemoryError")):
        with pytest.raises(AssertionError, match=death):
            bounded(damaged.path, [("harm", harm)], lambda case, outcome: None)
