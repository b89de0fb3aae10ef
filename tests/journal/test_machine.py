"""Every format against a list: appends by two handles, readers, followers, commits, trims, restarts, crashes that tear the end, a stale
lock file, places near the end of the numbers."""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import append_lock
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

import kvspool
from kvspool.engine import times
from kvspool.errors import OutOfRange
from kvspool.journal import Journal, JournalBatch
from kvspool.journal.format import LAST_SEQUENCE
from kvspool.record import NO_TIME

TIME = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)
ROWS = st.lists(
    st.tuples(st.binary(max_size=40), st.none() | st.binary(min_size=1, max_size=127), st.integers(0, 255), TIME), min_size=1, max_size=12
)
READERS = st.sampled_from(["a", "b@host"])


class Machine(RuleBasedStateMachine):
    """One journal; the model is the list of its records from the first one that was ever appended."""

    format = ""
    limits: dict[str, Any] = {}
    origin = 0  # sequence of the first record ever
    widest = 40  # bytes of a value; a fixed one has this size

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))  # flushes cost nothing there
        self.path = self.directory / "log"
        self.model: list[tuple[int, int, bytes | None, bytes]] = []
        self.first = self.origin  # after trims
        self.latest = NO_TIME  # timestamp
        self.committed: dict[str, int] = {}
        self.is_orderly = False
        self.log: Journal = kvspool.create(self.path, format=self.format, **self.limits)  # type: ignore[call-overload]
        if self.origin:
            self._begin_at(self.origin)
        self.other: Journal = kvspool.open(self.path)  # type: ignore[assignment]
        self.watcher = kvspool.open(self.path)  # a closed handle ends its followers
        self.follower = self.watcher.follow(timeout=0, on_gap="skip")
        self.followed = self.origin

    def _begin_at(self, sequence: int) -> None:
        """Let the first segment begin there, as after a trim of all that came before."""
        form = self.log.format
        self.log.close()
        form.lock_file(self.path).unlink()
        self.log._segments.path_of(0).unlink()
        self.log._segments.path_of(sequence).write_bytes(form.header(sequence))
        self.log = kvspool.open(self.path)  # type: ignore[assignment]

    @initialize(is_orderly=st.booleans())
    def choose(self, is_orderly: bool) -> None:
        """Whether times ascend."""
        self.is_orderly = is_orderly

    def teardown(self) -> None:
        self.follower.close()
        self.watcher.close()
        self.log.close()
        self.other.close()
        shutil.rmtree(self.directory)

    @property
    def end(self) -> int:
        return self.origin + len(self.model)

    def _kept(self, row: tuple[bytes, bytes | None, int, int], last: int) -> tuple[int, int, bytes | None, bytes]:
        """Return what a row comes back as: timestamp, type, key, value."""
        value, key, type, timestamp = row
        form = self.log.format
        if self.is_orderly:
            timestamp = max(last, 10**18) + timestamp % 3 * 1_000_000
        fitted = value.ljust(self.widest, b"\0") if self.format == "fixed" else value
        return timestamp if form.has_timestamps else 0, type if form.has_types else 0, key if form.has_keys else None, fitted

    def _all_kept(self, rows: list[tuple[bytes, bytes | None, int, int]]) -> list[tuple[int, int, bytes | None, bytes]]:
        kept = self.model[-1:]
        for row in rows:
            kept.append(self._kept(row, kept[-1][0] if kept else 0))
        return kept[-len(rows) :]

    def _add(self, kept: list[tuple[int, int, bytes | None, bytes]]) -> None:
        """Add to the model, where a timestamp that is earlier than the latest one becomes that one."""
        for timestamp, *rest in kept:
            self.latest = max(self.latest, timestamp)
            self.model.append((timestamp if timestamp == NO_TIME else self.latest, *rest))  # type: ignore[arg-type]

    @rule(rows=ROWS, several=st.booleans(), by_other=st.booleans())
    def append(self, rows: list[tuple[bytes, bytes | None, int, int]], several: bool, by_other: bool) -> None:
        log = self.other if by_other else self.log
        kept = self._all_kept(rows)
        form = log.format
        first = self.end
        batch = JournalBatch(
            [row[3] for row in kept],
            [row[2] for row in kept] if form.has_keys else None,
            types=[row[1] for row in kept] if form.has_types else None,
            timestamps=[row[0] for row in kept] if form.has_timestamps else None,
        )
        if first + len(kept) > LAST_SEQUENCE:
            with pytest.raises(OutOfRange, match="no more numbers"):
                log.append_batch(batch)
        elif several:
            assert log.append_batch(batch) == range(first, first + len(rows))
            self._add(kept)
        else:
            timestamp, type, key, value = kept[0]
            if form.has_timestamps and timestamp > times.latest():
                with pytest.raises(ValueError, match="more than a day"):
                    log.append(value, key=key, type=type, timestamp=timestamp)
                return
            assert log.append(value, key=key, type=type, timestamp=timestamp if form.has_timestamps else None) == first
            self._add(kept[:1])

    def _records(self, start: int) -> list[tuple[int, tuple[int, int, bytes | None, bytes]]]:
        return list(enumerate(self.model, self.origin))[max(start, self.first) - self.origin :]

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(self.first, self.end))
        limit = data.draw(st.none() | st.integers(0, 5))
        found = [(one.sequence, (one.timestamp, one.type, one.key, one.value)) for one in self.other.read(start, limit=limit)]
        assert found == self._records(start)[:limit]

    @precondition(lambda self: self.is_orderly and self.log.format.has_timestamps and self.first < self.end)
    @rule(data=st.data())
    def read_from_a_time(self, data: st.DataObject) -> None:
        stamps = [row[0] for _, row in self._records(0)]
        chosen = data.draw(st.sampled_from(stamps)) + data.draw(st.sampled_from([-1000, 0, 1000]))
        found = [one.sequence for one in self.log.read(datetime.fromtimestamp(0, UTC) + timedelta(microseconds=chosen // 1000))]
        assert found == [sequence for sequence, row in self._records(0) if row[0] >= chosen]

    @rule(name=READERS, limit=st.integers(0, 9), commits=st.booleans())
    def consume(self, name: str, limit: int, commits: bool) -> None:
        with self.log.reader(name) as reader:
            assert reader.sequence == self.committed.setdefault(name, self.first)
            taken = [one.sequence for one in reader.read(limit=limit, on_gap="skip")]
            assert taken == [sequence for sequence, _ in self._records(self.committed[name])][:limit]
            if commits:
                self.committed[name] = reader.commit()

    @rule(name=READERS, data=st.data())
    def seek(self, name: str, data: st.DataObject) -> None:
        with self.log.reader(name) as reader:
            reader.seek(data.draw(st.integers(self.first, self.end)))
            self.committed[name] = reader.commit()

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        before = data.draw(st.integers(self.first, self.end))
        bases = self.log.bases()
        first = self.other.trim(before=before, force=True).first_sequence
        assert first == max([base for base in bases if base <= before], default=self.first)
        self.first = max(self.first, first)

    @rule()
    def follow_on(self) -> None:
        taken = [(one.sequence, (one.timestamp, one.type, one.key, one.value)) for one in self.follower]
        rest = self._records(self.followed)
        assert taken[len(taken) - len(rest) :] == rest
        assert taken == [item for item in enumerate(self.model, self.origin) if item in taken and item[0] >= self.followed]
        self.followed = max(self.followed, self.end)

    @rule()
    def sync(self) -> None:
        assert self.log.sync() == self.end

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = kvspool.open(self.path)  # type: ignore[assignment]

    @rule(tail=st.binary(min_size=1, max_size=7))
    def die_while_writing(self, tail: bytes) -> None:
        """A process killed during a write leaves a part of a frame."""
        with append_lock.held(self.log) as (_, page):
            path = self.log._segments.path_of(page.base)
        self.log.close()
        with path.open("ab") as file:
            file.write(self.torn(tail))
        self.log = kvspool.open(self.path)  # type: ignore[assignment]

    def torn(self, tail: bytes) -> bytes:
        """Return bytes that are no frame, whatever follows them."""
        return tail

    @rule(is_open=st.booleans())
    def lose_the_lock_file(self, is_open: bool) -> None:
        """The original removes it when it closes, and its new one is empty. is_open: another program removes it while a handle is open."""
        if not is_open:
            self.log.close()
            self.other.close()
        self.log.format.lock_file(self.path).unlink(missing_ok=True)
        self.latest = max((row[0] for _, row in self._records(self.first)), default=NO_TIME)  # only the records know it now
        if not is_open:
            self.log = kvspool.open(self.path)  # type: ignore[assignment]
            self.other = kvspool.open(self.path)  # type: ignore[assignment]

    @precondition(lambda self: self.log.format.has_archives)
    @rule(undo=st.booleans(), data=st.data())
    def archive(self, undo: bool, data: st.DataObject) -> None:
        before = data.draw(st.none() | st.integers(self.first, self.end))
        (self.log.unarchive if undo else self.log.archive)(before)

    @precondition(lambda self: self.log.format.has_archives)
    @rule()
    def die_while_archiving(self) -> None:
        """A process killed before it removed the first of the old forms leaves both."""
        segments = self.log._segments
        for base in segments.bases()[:1]:
            if segments.path_of(base) == segments.plain_path(base):
                segments.archive_path(base).write_bytes(b"whole, or not")

    @precondition(lambda self: self.first < self.end)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(self.first, self.end - 1))
        with self.log.follow(start, limit=self.end - start) as following:
            assert [one.sequence for one in following] == list(range(start, self.end))

    @invariant()
    def knows_its_end(self) -> None:
        stats = self.log.stats()
        assert (stats.first_sequence, stats.next_sequence) == (self.first, self.end)
        assert {reader.name: reader.sequence for reader in stats.readers} == self.committed


FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("fflg", {"segment_bytes": 10_000, "keep_consumed": 1}),
    ("fixed", {"item_bytes": 40, "items_per_blob": 1}),
    ("fixed", {"item_bytes": 40, "items_per_blob": 3}),
    ("kvj", {"segment_bytes": 100}),
    ("kvj", {}),
    ("sej", {"segment_bytes": 100}),
    ("sej", {"segment_bytes": 1}),
    ("sej", {}),
]
ORIGINS = [
    ("sej", (1 << 32) - 9),
    ("kvj", (1 << 32) - 9),
    ("sej", (1 << 63) - 9),
    ("kvj", (1 << 63) - 9),
    ("sej", LAST_SEQUENCE - 60),
    ("kvj", LAST_SEQUENCE - 60),
]


@pytest.mark.parametrize(("format", "limits"), FORMATS, ids=[f"{name}-{'-'.join(map(str, limits.values()))}" for name, limits in FORMATS])
def test_a_journal_is_a_list(format: str, limits: dict[str, Any]) -> None:
    run(format, limits, 0)


@pytest.mark.parametrize(("format", "origin"), ORIGINS)
def test_a_journal_is_a_list_near_the_ends_of_the_numbers(format: str, origin: int) -> None:
    run(format, {"segment_bytes": 100}, origin)


def run(format: str, limits: dict[str, Any], origin: int) -> None:
    machine = type("Machine", (Machine,), {"format": format, "limits": limits, "origin": origin})
    examples = int(os.environ.get("KVSPOOL_EXAMPLES", "6"))
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )
