"""Every format against a list: appends, readers, commits, restarts, crashes that tear the end, and a stale lock file."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import kvspool
from kvspool.journal import Batch, Journal

TIME = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)
ROWS = st.lists(
    st.tuples(st.binary(max_size=40), st.none() | st.binary(min_size=1, max_size=127), st.integers(0, 255), TIME), min_size=1, max_size=12
)
READERS = st.sampled_from(["a", "b@host"])


class Machine(RuleBasedStateMachine):
    """One journal; the model is the list of its records from the first one that was ever appended."""

    format = ""
    limits: dict[str, Any] = {}
    widest = 40  # bytes of a value; a fixed one has this size

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))  # flushes cost nothing there
        self.path = self.directory / "log"
        self.model: list[tuple[int, int, bytes | None, bytes]] = []
        self.committed: dict[str, int] = {}
        self.log: Journal = kvspool.create(self.path, format=self.format, **self.limits)  # type: ignore[call-overload]

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.directory)

    def _kept(self, row: tuple[bytes, bytes | None, int, int]) -> tuple[int, int, bytes | None, bytes]:
        """Return what a row comes back as: timestamp, type, key, value."""
        value, key, type, timestamp = row
        form = self.log.format
        fitted = value.ljust(self.widest, b"\0") if self.format == "fixed" else value
        return timestamp if form.has_timestamps else 0, type if form.has_types else 0, key if form.has_keys else None, fitted

    @rule(rows=ROWS, several=st.booleans())
    def append(self, rows: list[tuple[bytes, bytes | None, int, int]], several: bool) -> None:
        kept = [self._kept(row) for row in rows]
        form = self.log.format
        first = len(self.model)
        if several:
            batch = Batch(
                [row[3] for row in kept],
                [row[2] for row in kept] if form.has_keys else None,
                types=[row[1] for row in kept] if form.has_types else None,
                timestamps=[row[0] for row in kept] if form.has_timestamps else None,
            )
            assert self.log.append_batch(batch) == range(first, first + len(rows))
        else:
            timestamp, type, key, value = kept[0]
            kept = kept[:1]
            assert self.log.append(value, key=key, type=type, timestamp=timestamp if form.has_timestamps else None) == first
        self.model += kept

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.model)))
        limit = data.draw(st.none() | st.integers(0, 5))
        found = [(one.sequence, (one.timestamp, one.type, one.key, one.value)) for one in self.log.read(start, limit=limit)]
        assert found == list(enumerate(self.model))[start:][:limit]

    @rule(name=READERS, limit=st.integers(0, 9), commits=st.booleans())
    def consume(self, name: str, limit: int, commits: bool) -> None:
        with self.log.reader(name) as reader:
            assert reader.sequence == self.committed.setdefault(name, 0)
            taken = [one.sequence for one in reader.read(limit=limit)]
            assert taken == list(range(len(self.model)))[self.committed[name] :][:limit]
            if commits:
                self.committed[name] = reader.commit()

    @rule(name=READERS, data=st.data())
    def seek(self, name: str, data: st.DataObject) -> None:
        with self.log.reader(name) as reader:
            reader.seek(data.draw(st.integers(0, len(self.model))))
            self.committed[name] = reader.commit()

    @rule()
    def sync(self) -> None:
        assert self.log.sync() == len(self.model)

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = kvspool.open(self.path)  # type: ignore[assignment]

    @rule(tail=st.binary(min_size=1, max_size=7))
    def die_while_writing(self, tail: bytes) -> None:
        """A process that died in the midst of a write leaves a part of a frame."""
        with self.log.appending(5) as (_, page):
            path = self.log._segments.path_of(page.base)
        self.log.close()
        with path.open("ab") as file:
            file.write(self.torn(tail))
        self.log = kvspool.open(self.path)  # type: ignore[assignment]

    def torn(self, tail: bytes) -> bytes:
        """Return what is no frame, whatever comes behind it."""
        return tail

    @rule()
    def lose_the_lock_file(self) -> None:
        """The original removes it when it closes, and its new one is empty."""
        self.log.close()
        self.log.format.lock_file(self.path).unlink(missing_ok=True)
        self.log = kvspool.open(self.path)  # type: ignore[assignment]

    @precondition(lambda self: len(self.model) > 0)
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.model) - 1))
        with self.log.follow(start, limit=len(self.model) - start) as following:
            assert [one.sequence for one in following] == list(range(start, len(self.model)))

    @invariant()
    def knows_its_end(self) -> None:
        stats = self.log.stats()
        assert (stats.first_sequence, stats.next_sequence) == (0, len(self.model))
        assert {reader.name: reader.sequence for reader in stats.readers} == self.committed


FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("fixed", {"item_bytes": 40, "items_per_blob": 1}),
    ("fixed", {"item_bytes": 40, "items_per_blob": 3}),
    ("kvj", {"segment_bytes": 100}),
    ("kvj", {}),
    ("sej", {"segment_bytes": 100}),
    ("sej", {"segment_bytes": 1}),
    ("sej", {}),
]


@pytest.mark.parametrize(("format", "limits"), FORMATS, ids=[f"{name}-{'-'.join(map(str, limits.values()))}" for name, limits in FORMATS])
def test_a_journal_is_a_list(format: str, limits: dict[str, Any]) -> None:
    machine = type("Machine", (Machine,), {"format": format, "limits": limits})
    examples = int(os.environ.get("KVSPOOL_EXAMPLES", "30"))
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )
