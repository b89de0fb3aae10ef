"""Finding a place by sequence and by time, in rings of several blocks, with and without a sound index."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from images import Rebooted

import kvspool
from kvspool import Spool, errors, system
from kvspool.kernel import frames_py as frames
from kvspool.spool import format, search

T0 = datetime(2024, 1, 1, tzinfo=UTC)
STEP = timedelta(milliseconds=3)
COUNT = 9000


def at(sequence: int) -> datetime:
    return T0 + STEP * sequence


@pytest.fixture(scope="module", params=[1000, 20_000, COUNT * 3], ids="{} appended".format)
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spool]:
    """A ring of 8 blocks with records of many sizes, not yet full or lapped several times; one record each 3 ms."""
    noise = random.Random(9)
    with kvspool.create(tmp_path_factory.mktemp("search") / "log", capacity="512KiB") as log:
        for sequence in range(request.param):
            log.append(bytes(noise.choice((10, 100, 1000))), timestamp=round(at(sequence).timestamp() * 1e6) * 1000)
        yield log


def first_read(log: Spool, start: search.Start) -> int | None:
    reading = log.read(start, limit=1, on_gap="skip")
    return next((record.sequence for record in reading), None)


def test_every_kept_sequence_is_found_at_once(log: Spool) -> None:
    stats = log.stats()
    for sequence in range(stats.first_sequence, stats.next_sequence, 31):
        reading = log.read(sequence, limit=1)
        assert next(reading).sequence == sequence
        assert reading.missed == 0


def test_every_time_finds_the_first_record_at_or_after_it(log: Spool) -> None:
    stats = log.stats()
    for sequence in range(stats.first_sequence, stats.next_sequence, 37):
        assert first_read(log, at(sequence)) == sequence
        assert first_read(log, at(sequence) - STEP / 3) == sequence
    assert first_read(log, at(stats.first_sequence) - timedelta(days=1)) == stats.first_sequence
    assert first_read(log, at(stats.next_sequence - 1) + STEP / 3) is None


def test_an_overwritten_sequence_gives_the_oldest_place_and_an_exact_gap(log: Spool) -> None:
    first = log.stats().first_sequence
    if first == 0:
        pytest.skip("nothing was overwritten")
    for sequence in (0, 1, first // 2, first - 1):
        reading = log.read(sequence, limit=1, on_gap="skip")
        assert next(reading).sequence == first
        assert reading.missed == first - sequence


def test_a_search_looks_at_few_frames(log: Spool) -> None:
    stats = log.stats()

    class Counted:
        """A reader whose steps along the chain are measured."""

        def __init__(self) -> None:
            self.reader = log.cursor().reader
            self.walked = 0

        def walk(self, position: int, *rest: int) -> int:
            found = self.reader.walk(position, *rest)
            self.walked = max(self.walked, found - position)
            return found

        def __getattr__(self, name: str) -> object:
            return getattr(self.reader, name)

    for sequence in range(stats.first_sequence, stats.next_sequence, 101):
        reader = Counted()
        _, found = search.find(reader, sequence)  # type: ignore[arg-type]
        assert found == sequence
        assert reader.walked <= 3 << frames.BLOCK


@pytest.mark.parametrize("value", [0, 1, 2**64 - 1, 2**63 + 1])
def test_a_ruined_index_costs_time_and_nothing_else(log: Spool, tmp_path: Path, value: int) -> None:
    path = tmp_path / "ruined"
    path.mkdir()
    for name in (format.CONTROL_FILE, format.DATA_FILE):
        (path / name).write_bytes((log.path / name).read_bytes())
    with open(path / format.CONTROL_FILE, "r+b") as file:
        file.seek(format.INDEX_AT)
        file.write(value.to_bytes(8, "little") * (8 * frames.INDEX_WORDS))
    stats = log.stats()
    with kvspool.open(path) as ruined:
        for sequence in range(stats.first_sequence, stats.next_sequence, 499):
            assert first_read(ruined, sequence) == sequence
            assert first_read(ruined, at(sequence)) == sequence


def test_entries_that_name_another_frame_are_not_believed(log: Spool, tmp_path: Path) -> None:
    path = tmp_path / "lying"
    path.mkdir()
    for name in (format.CONTROL_FILE, format.DATA_FILE):
        (path / name).write_bytes((log.path / name).read_bytes())
    raw = (path / format.CONTROL_FILE).read_bytes()
    entries = [format.INDEX_ENTRY.unpack(raw, format.INDEX_AT + block * format.INDEX_ENTRY.size) for block in range(8)]
    lies = [format.INDEX_ENTRY.pack(entry._replace(sequence=entry.sequence ^ 1)) for entry in entries]
    with open(path / format.CONTROL_FILE, "r+b") as file:
        file.seek(format.INDEX_AT)
        file.write(b"".join(lies))
    stats = log.stats()
    with kvspool.open(path) as lying:
        for sequence in range(stats.first_sequence, stats.next_sequence, 499):
            assert first_read(lying, sequence) == sequence


def test_the_ends(log: Spool) -> None:
    stats = log.stats()
    assert first_read(log, "earliest") == stats.first_sequence
    assert first_read(log, "latest") is None
    assert first_read(log, stats.next_sequence) is None
    with pytest.raises(errors.OutOfRange):
        log.read(stats.next_sequence + 1)


def test_records_of_one_instant_are_found_from_the_first_of_them(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity="256KiB") as log:
        for sequence in range(4000):
            log.append(bytes(20), timestamp=(sequence // 1000 + 1) * 10**9)
        for second in range(1, 5):
            assert first_read(log, datetime.fromtimestamp(second, UTC)) == (second - 1) * 1000


def test_the_earliest_place_of_an_empty_log_is_where_the_first_record_will_stand(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        for start in ("earliest", "latest", 0, T0):
            cursor = log.cursor(start)
            assert (cursor.reader.position, cursor.reader.sequence) == (0, 0)


def test_a_damaged_oldest_record_is_reported_from_the_earliest_place(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append_many([b"%08d" % sequence for sequence in range(300)])
        first = log.stats().first_sequence
        place = log.cursor().reader.position % 4096
        with open(log.path / format.DATA_FILE, "r+b") as file:
            file.seek(format.DATA_START + place + 33)
            file.write(b"?")
        gap, record = list(log.read(on_gap="yield"))[:2]
        assert (gap.first, gap.last, gap.reason, record.sequence) == (first, first, "damaged", first + 1)
        assert first_read(log, first + 1) == first + 1
        assert first_read(log, first + 50) == first + 50


@pytest.mark.parametrize("appended", [[3], [0, 3], [2, 2], [1, 0, 4], [30, 1, 30], [0, 0, 0]])
def test_records_are_counted_without_the_numbers_that_restarts_left_out(tmp_path: Path, appended: list[int]) -> None:
    kvspool.create(tmp_path / "log", capacity=4096).close()
    for boot, number in enumerate(appended):
        port = Rebooted()
        port.boot_id = lambda boot=boot: bytes([boot]) * 16  # type: ignore[method-assign,misc]
        with system.replaced(port), kvspool.open(tmp_path / "log") as log:
            log.append_many([b"x" * 100] * number)
            there = [record.sequence for record in log.read(on_gap="skip")]
            stats = log.stats()
            assert stats.records == len(there)
            with log.reader("one", "earliest") as reader:
                reader.rewind()
                assert reader.lag().records == len(there)
                for left in range(len(there) - 1, -1, -1):
                    next(reader.read(on_gap="skip"))
                    assert reader.lag().records == left


def test_a_search_that_a_writer_overtakes_finds_a_record_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer overwrites the frames from which the search walks, and not the one that it looks for."""
    with kvspool.create(tmp_path / "log", capacity="64KiB") as log:
        log.append_many([bytes(100)] * 1000)
        first, end = log.extent()
        cursor = log.cursor("earliest")

        def overtaken(*arguments: Any) -> int:
            monkeypatch.undo()
            log.append_many([bytes(100)] * 100)
            return int(arguments[1])  # the head

        monkeypatch.setattr(search, "_entry_before", overtaken)
        position, sequence = search.find(cursor.reader, end - 20)
        assert log.extent()[0] > first
        assert (sequence, cursor.reader.sequence_at(position, cursor.reader.tail())) == (end - 20, end - 20)
