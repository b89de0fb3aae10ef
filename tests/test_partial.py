"""Sound records before an error are never lost with it, whatever reads them in batches."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from faults import FailingPort

import kvspool
from kvspool import Codec, Gap, Record, Spool, system
from kvspool.engine import exporting
from kvspool.engine.iteration import Iteration, keeping
from kvspool.errors import Corruption, GapError, Undecodable
from kvspool.spool import format
from kvspool.spool.spool import Prepared

pa = pytest.importorskip("pyarrow", reason="arrow is an extra")

from kvspool import arrow  # noqa: E402

COUNT = 100
LONG = 150  # records of a history
BAD = 59  # the record that is damaged


def fill(path: Path, kind: str) -> None:
    with kvspool.create(path, format=kind) as log:  # type: ignore[call-overload]
        log.append_many([b"value-%03d-" % number for number in range(COUNT)])


def data_file(path: Path, kind: str) -> Path:
    if kind == "spool":
        return path / format.DATA_FILE
    (segment,) = path.glob("*/0000000000000000.*")
    return segment


def damage(path: Path, kind: str, number: int = BAD) -> None:
    """Change the bytes of a record where it is stored, and its header with them where nothing else has a checksum."""
    file = data_file(path, kind)
    data = bytearray(file.read_bytes())
    at = data.index(b"value-%03d-" % number)
    begin = at - 4 if kind == "sej" else at
    data[begin : at + 1] = b"\xff" * (at + 1 - begin)
    file.write_bytes(data)


def sequences(table: Any) -> list[int]:
    return list(table["sequence"].to_pylist())


@pytest.fixture(params=["spool", "kvj"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A log of a hundred records, one of which is damaged."""
    fill(tmp_path / "log", request.param)
    damage(tmp_path / "log", request.param)
    return tmp_path / "log"


def test_a_gap_error_of_read_arrow_has_the_records_before_the_gap(damaged: Path) -> None:
    with kvspool.open(damaged) as log:
        with pytest.raises(GapError) as raised:
            log.read_arrow()
        partial, gap = raised.value.partial, raised.value.gap
        assert sequences(partial) == list(range(gap.first)) == list(range(BAD))
        assert partial.schema == arrow.SCHEMA
        assert sequences(log.read_arrow(gap.last + 1)) == list(range(BAD + 1, COUNT))
        with pytest.raises(GapError) as raised:
            log.read_arrow(BAD)
        assert sequences(raised.value.partial) == []


@pytest.mark.parametrize("kind", ["kvj", "sej"])
def test_corruption_in_read_arrow_has_the_records_before_it(kind: str, tmp_path: Path) -> None:
    fill(tmp_path / "log", kind)
    damage(tmp_path / "log", kind, COUNT - 1)
    with kvspool.open(tmp_path / "log") as log, pytest.raises(Corruption) as raised:
        log.read_arrow()
    assert sequences(raised.value.partial) == list(range(COUNT - 1))


@pytest.fixture
def history(tmp_path: Path) -> Iterator[Any]:
    """A journal of many segments, each of which takes several reads."""
    with kvspool.create(tmp_path / "log", format="kvj", segment_bytes=1 << 19) as log:
        log.append_many([b"%05d" % number + bytes(6000) for number in range(LONG)])
        yield log


def test_a_disk_error_between_batches_loses_and_repeats_no_record(history: Any) -> None:
    for nth in range(1, 100):
        found: list[int] = []
        port = FailingPort(nth, errno.EIO, only=("read", "open", "status"))
        cursor = history.cursor(bounded=True)
        with system.replaced(port):
            while True:
                try:
                    batch = arrow.next_batch(cursor)
                except OSError:
                    continue
                if not batch.num_rows:
                    break
                found += sequences(batch)
        cursor.close()
        assert found == list(range(LONG))
        if not port.failed:
            break
    assert nth > 10 and not port.failed


def test_a_disk_error_in_read_arrow_has_the_records_before_it(history: Any) -> None:
    cursor = history.cursor(bounded=True)
    with system.replaced(FailingPort(4, errno.EIO, only=("read",), every=True)), pytest.raises(OSError) as raised:
        arrow.read(cursor, None, "raise")
    cursor.close()
    partial = sequences(raised.value.partial)  # type: ignore[attr-defined]
    assert 0 < len(partial) < LONG
    assert partial == list(range(len(partial)))


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Spool]:
    """A log with a key table, two of whose keyed values are none."""
    with kvspool.create(tmp_path / "log", codec="keyed") as log:
        for number in range(10):
            if number in (4, 5):
                log.append_prepared(Prepared([None], [b"\x81\x50\x01"], 0, bytes((Codec.KEYED,)), -1))
            else:
                log.append({"number": number})
        yield log


def test_a_batch_ends_before_a_value_that_cannot_be_decoded(keyed: Spool) -> None:
    cursor = keyed.cursor(bounded=True)
    assert sequences(arrow.next_batch(cursor, coded=True)) == [0, 1, 2, 3]
    for number in (4, 5):
        with pytest.raises(Undecodable, match=f"record {number}"):
            arrow.next_batch(cursor, coded=True)
    assert sequences(arrow.next_batch(cursor, coded=True)) == [6, 7, 8, 9]
    assert arrow.next_batch(cursor, coded=True).num_rows == 0
    assert cursor.missed == 0


@pytest.mark.parametrize("kind", exporting.FORMATS)
def test_an_export_has_the_records_before_one_that_cannot_be_decoded(keyed: Spool, kind: str) -> None:
    file = io.BytesIO()
    with pytest.raises(Undecodable):
        kvspool.export(keyed, file, kind)
    assert exported(file, kind) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", exporting.FORMATS)
def test_an_export_has_the_records_before_a_gap(tmp_path: Path, kind: str) -> None:
    fill(tmp_path / "log", "spool")
    damage(tmp_path / "log", "spool")
    file = io.BytesIO()
    with kvspool.open(tmp_path / "log", format="spool") as log, pytest.raises(GapError):
        kvspool.export(log, file, kind)
    assert exported(file, kind) == list(range(BAD))


def exported(file: io.BytesIO, kind: str) -> list[int]:
    """Return the sequences in a file of JSON lines or Parquet."""
    import msgspec
    from pyarrow import parquet

    file.seek(0)
    if kind == "parquet":
        return sequences(parquet.read_table(file))
    return [msgspec.json.decode(line)["sequence"] for line in file]


def test_a_copy_has_the_records_before_corruption(tmp_path: Path) -> None:
    fill(tmp_path / "source", "sej")
    damage(tmp_path / "source", "sej", COUNT - 1)
    with pytest.raises(Corruption):
        kvspool.copy(tmp_path / "source", tmp_path / "target", format="kvj")
    with kvspool.open(tmp_path / "target") as log:
        assert [record.value for record in log.read()] == [b"value-%03d-" % number for number in range(COUNT - 1)]


def test_tail_prints_the_records_before_corruption(tmp_path: Path, run: Run) -> None:
    fill(tmp_path / "log", "sej")
    damage(tmp_path / "log", "sej", COUNT - 1)
    for arguments in (["-n", "2"], ["-n", "2", "--follow", "--timeout", "0"]):
        captured = run("tail", tmp_path / "log", "--json", *arguments, code=Corruption.exit_code)
        assert [f'"value":"value-{number:03}-"' in line for number, line in zip((97, 98), captured.out.splitlines(), strict=True)]
        assert "no sej frame" in captured.err


def test_tail_with_nothing_sound_reports_the_corruption(tmp_path: Path, run: Run) -> None:
    fill(tmp_path / "log", "sej")
    file = data_file(tmp_path / "log", "sej")
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert run("tail", tmp_path / "log", code=Corruption.exit_code).out == ""


def test_an_exception_while_records_are_copied_out_of_a_journal_loses_and_repeats_none(tmp_path: Path) -> None:
    fill(tmp_path / "log", "kvj")
    interrupted = []

    def make(sequence: int, *fields: Any) -> Record:
        if sequence == BAD and not interrupted:
            interrupted.append(sequence)
            raise KeyboardInterrupt
        return Record(sequence, *fields)

    with kvspool.open(tmp_path / "log") as log:
        reading = Iteration(log.cursor(bounded=True), None, "raise", make)
        found: list[Any] = []
        while len(found) < COUNT:
            try:
                found += [record.sequence for record in iter(lambda: next(reading, None), None) if record is not None]
                break
            except KeyboardInterrupt:
                continue
        reading.close()
    assert interrupted == [BAD]
    assert found == list(range(COUNT))


def test_poll_returns_records_that_an_exception_had_left(tmp_path: Path) -> None:
    fill(tmp_path / "log", "spool")
    with kvspool.open(tmp_path / "log", format="spool") as log:
        reading = log.read()
        assert next(reading).sequence == 0
        assert [record.sequence for record in reading.poll()] == list(range(1, COUNT))
        assert reading.poll() == []


def test_gathered_yields_the_items_before_an_error_first() -> None:
    from kvspool.engine.iteration import gathered

    def items() -> Iterator[int]:
        yield from range(5)
        raise GapError(Gap(5, 6, "damaged", "log"))

    lists = gathered(items(), lambda item: item, 2, 100)
    assert [next(lists) for _ in range(3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(GapError):
        next(lists)
    assert list(gathered([1, 50, 7, 60, 2], lambda item: item, 10, 50)) == [[1, 50], [7, 60], [2]]
    assert list(gathered([], len, 1, 1)) == []


def test_an_interrupt_keeps_the_records_that_were_read_before_it() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, keeping(lambda: ["read before"]):
        raise KeyboardInterrupt
    assert raised.value.partial == ["read before"]  # type: ignore[attr-defined]
