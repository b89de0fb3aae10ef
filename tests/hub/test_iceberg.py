"""Iceberg tables: each batch is there once, although pyiceberg repeats refused commits automatically, and writers are killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from faults import Killed
from typed_rows import EVERYTHING, everything

from kvspool import system

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")

from hub.tables.delta import Change  # noqa: E402
from hub.tables.errors import Overtaken, TableError  # noqa: E402
from hub.tables.files import DataFile, FileWriter  # noqa: E402
from hub.tables.iceberg import DATABASE, IcebergCatalog, IcebergTable  # noqa: E402
from hub.tables.place import TablePlace  # noqa: E402

SCHEMA = pa.schema([("row", pa.int64()), ("carrier", pa.string())])
spawn = multiprocessing.get_context("spawn")


def rows(numbers: range) -> Any:
    return pa.RecordBatch.from_pydict({"row": list(numbers), "carrier": ["AA UA DL".split()[row % 3] for row in numbers]}, SCHEMA)


def written(place: TablePlace, batch: Any) -> list[DataFile]:
    with FileWriter(place, batch.schema, (), "part") as writer:
        writer.write(batch)
        return writer.close()


def made(path: Path, schema: Any = SCHEMA, **options: Any) -> IcebergTable:
    return IcebergTable.make(TablePlace.of(path), schema, **options)


def numbers_of(path: Path) -> list[int]:
    """Return the rows as pyiceberg alone reads them."""
    from pyiceberg.catalog.sql import SqlCatalog

    with closing(SqlCatalog("kvspool", uri=f"sqlite:///{path / DATABASE}")) as catalog:
        return sorted(catalog.load_table("kvspool.rows").scan().to_arrow().column("row").to_pylist())


def test_a_repeated_batch_adds_nothing_and_batches_without_rows_count(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    other = IcebergTable(table.place)
    table.commit(written(table.place, rows(range(3))), {"q": Change(None, 0)}, note={"by": "job", "batch": 0})
    with pytest.raises(Overtaken) as caught:
        other.commit(written(table.place, rows(range(3))), {"q": Change(None, 0)})
    assert caught.value.found == 0
    other.commit([], {"q": Change(0, 1)})
    table.commit(written(table.place, rows(range(3, 5))), {"q": Change(1, 2), "r": Change(None, 7)})
    assert (table.last("q"), table.last("r"), table.last("s"), table.rows(), table.has_rows()) == (2, 7, None, 5, True)
    assert numbers_of(tmp_path / "t") == [0, 1, 2, 3, 4]
    assert (tmp_path / "t" / DATABASE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700


def test_no_connection_to_the_catalog_is_left_open(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    table.commit(written(table.place, rows(range(3))), {"q": Change(None, 0)})
    table.refresh()
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert str(tmp_path / "t" / DATABASE) not in opened


@pytest.mark.parametrize(("app", "batch"), [("q", range(3, 5)), ("other", range(10, 12))])
@pytest.mark.parametrize(("name", "at"), [("commit_table", 1), ("load_table", 1), ("load_table", 2), ("_update_and_stage_table", 1)])
def test_an_attempt_that_pyiceberg_repeats_compares_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: str, batch: range, name: str, at: int
) -> None:
    """Another writer commits between the comparison and the commit, in each place where that is possible."""
    table, other = made(tmp_path / "t"), made(tmp_path / "t")
    table.commit(written(table.place, rows(range(3))), {"q": Change(None, 0)})
    calls, call = [0], getattr(IcebergCatalog, name)

    def overtaken(self: Any, *arguments: Any) -> Any:
        if self is table._catalog and self.expected:
            calls[0] += 1
            if calls[0] == at:
                other.refresh()
                other.commit(written(table.place, rows(batch)), {app: Change(other.last(app), 1)})
        return call(self, *arguments)

    monkeypatch.setattr(IcebergCatalog, name, overtaken)
    files = written(table.place, rows(range(3, 5)))
    if app == "q":
        with pytest.raises(Overtaken):
            table.commit(files, {"q": Change(0, 1)})
        assert numbers_of(tmp_path / "t") == [0, 1, 2, 3, 4]
    else:
        table.commit(files, {"q": Change(0, 1)})
        assert numbers_of(tmp_path / "t") == [0, 1, 2, 3, 4, 10, 11]
    assert calls[0] >= at


def repeat_all(path: Path, batches: int) -> None:
    """Commit batches, as three others do at the same time."""
    place = TablePlace.of(path)
    table = IcebergTable(place)
    for batch in range(batches):
        while (last := table.last("q")) is None or last < batch:
            files = written(place, rows(range(3 * batch, 3 * batch + 3)))
            try:
                table.commit(files, {"q": Change(batch - 1 if batch else None, batch)})
            except Overtaken:
                table.refresh()
            except TableError:  # pyiceberg has tried it five times
                time.sleep(0.01)
                table.refresh()


def test_each_batch_is_there_once_although_processes_commit_it_at_once(tmp_path: Path) -> None:
    made(tmp_path / "t")
    workers = [spawn.Process(target=repeat_all, args=(tmp_path / "t", 6)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert numbers_of(tmp_path / "t") == list(range(18))


@pytest.mark.parametrize("step", range(14))
def test_killed_at_any_flush_a_batch_is_there_once_when_it_is_repeated(tmp_path: Path, step: int) -> None:
    left = [step]

    class Dying(system.Port):
        def flush(self, fd: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            super().flush(fd)

    def work() -> None:
        table = made(tmp_path / "t")
        for batch in range(2):
            if (table.last("q") or -1) < batch and table.last("q") != batch:
                files = written(table.place, rows(range(3 * batch, 3 * batch + 3)))
                table.commit(files, {"q": Change(batch - 1 if batch else None, batch)})

    try:
        with system.replaced(Dying()):
            work()
    except Killed:
        pass
    work()
    assert numbers_of(tmp_path / "t") == list(range(6))


def test_columns_are_added_on_request_and_every_other_difference_is_named(tmp_path: Path) -> None:
    table = made(tmp_path / "t", properties={"kvspool.mode": "append"})
    table.commit(written(table.place, rows(range(2))), {"q": Change(None, 0)})
    wider = SCHEMA.append(pa.field("late", pa.list_(pa.int16())))
    with pytest.raises(TableError, match=r"KVSPOOL_TABLE_SCHEMA.* column late, and .*evolve"):
        made(tmp_path / "t", wider)
    table = made(tmp_path / "t", wider, evolve=True)
    table.commit(written(table.place, pa.RecordBatch.from_pylist([{"row": 2, "late": [5]}], wider)), {"q": Change(0, 1)})
    found = table.table.scan().to_arrow().sort_by("row").to_pylist()
    assert found == [
        {"row": 0, "carrier": "AA", "late": None}, {"row": 1, "carrier": "UA", "late": None}, {"row": 2, "carrier": None, "late": [5]}
    ]  # fmt: skip
    with pytest.raises(TableError, match="column row is int64 in .*, and string in the rows"):
        made(tmp_path / "t", wider.set(0, pa.field("row", pa.string())), evolve=True)
    with pytest.raises(TableError, match="has the column late, and the rows have none"):
        made(tmp_path / "t", SCHEMA, evolve=True)
    assert table.properties["kvspool.mode"] == "append"
    table.expire(0)
    assert numbers_of(tmp_path / "t") == [0, 1, 2]


def test_a_place_with_other_files_and_a_url_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "notes.txt").touch()
    with pytest.raises(TableError, match="KVSPOOL_SINK_TAKEN"):
        made(tmp_path / "t")
    with pytest.raises(TableError, match="needs a folder"):
        IcebergTable.make(TablePlace.of("s3://bucket/t"), SCHEMA)
    with pytest.raises(TableError, match="KVSPOOL_NO_TABLE"):
        IcebergTable(TablePlace.of(tmp_path / "none"))
    assert os.listdir(tmp_path / "t") == ["notes.txt"]


def test_rows_of_every_type_are_read_by_others_and_filters_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import polars

    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # the files are read by polars
    table = made(tmp_path / "t", EVERYTHING)
    for batch in range(4):
        some = pa.RecordBatch.from_pylist(everything()[10 * batch : 10 * batch + 10], EVERYTHING)
        table.commit(written(table.place, some), {"q": Change(batch - 1 if batch else None, batch)})
    metadata = sorted((tmp_path / "t" / "metadata").glob("*.metadata.json"))[-1]
    lazy = polars.scan_iceberg(str(metadata))
    found = {row["i8"]: row for row in lazy.collect().to_dicts()}
    for row in everything():
        for column in ("i64", "f32", "s", "b", "x", "t", "day", "dec", "a", "p", "r"):
            assert found[row["i8"]][column] == row[column], column
    for column in ("i8", "i64", "s", "day", "f32"):
        for row in everything()[:20:3]:
            if row[column] is not None:
                expected = sorted(one["i8"] for one in everything() if one[column] is not None and one[column] <= row[column])
                assert sorted(lazy.filter(polars.col(column) <= row[column]).collect()["i8"].to_list()) == expected
