"""Delta tables: a commit is atomic, moves its transactions once, and any reader sees whole versions, also in another implementation."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from commands import Run
from faults import Killed
from typed_rows import BY, EVERYTHING, everything, told

from kvspool import system

pa = pytest.importorskip("pyarrow")
deltalake = pytest.importorskip("deltalake")
from pyarrow import parquet  # noqa: E402

from hub.tables import dataset  # noqa: E402
from hub.tables.delta import Change, Table, drop_torn  # noqa: E402
from hub.tables.errors import Overtaken, TableError  # noqa: E402
from hub.tables.files import DataFile, FileWriter  # noqa: E402
from hub.tables.place import TablePlace  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "faults"))
from tablelog import TableLog  # noqa: E402

SCHEMA = pa.schema([("row", pa.int64()), ("carrier", pa.string())])


def rows(numbers: range) -> Any:
    return pa.RecordBatch.from_pydict({"row": list(numbers), "carrier": ["AA UA DL".split()[row % 3] for row in numbers]}, SCHEMA)


def written(place: TablePlace, batch: Any, by: tuple[str, ...] = ()) -> list[DataFile]:
    with FileWriter(place, batch.schema, by, "part") as writer:
        writer.write(batch)
        return writer.close()


def made(path: Path | str, schema: Any = SCHEMA, **options: Any) -> Table:
    return Table.make(TablePlace.of(path), schema, **options)


def numbers_of(path: Path) -> list[int]:
    return sorted(deltalake.DeltaTable(path).to_pyarrow_table().column("row").to_pylist())


def test_a_repeated_batch_and_a_concurrent_one_add_nothing(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    others = [Table(table.place) for _ in range(4)]
    assert table.commit(written(table.place, rows(range(3))), {"q": Change(None, 0)}) == 1
    with pytest.raises(Overtaken) as caught:
        others[0].commit(written(table.place, rows(range(3))), {"q": Change(None, 0)})
    assert caught.value.found == 0
    results: list[object] = []

    def commit(other: Table) -> None:
        try:
            results.append(other.commit(written(table.place, rows(range(3, 5))), {"q": Change(0, 1)}))
        except Overtaken as error:
            results.append(error)

    threads = [threading.Thread(target=commit, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(result).__name__ for result in results) == ["Overtaken"] * 3 + ["int"]
    assert numbers_of(tmp_path / "t") == [0, 1, 2, 3, 4]


def test_commits_of_other_names_are_all_in_the_table(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    threads = []
    for number in range(4):

        def commit(number: int = number) -> None:
            mine = Table(table.place)
            for batch in range(3):
                at = 100 * number + 10 * batch
                mine.commit(written(table.place, rows(range(at, at + 3))), {f"q{number}": Change(batch - 1 if batch else None, batch)})

        threads.append(threading.Thread(target=commit))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert numbers_of(tmp_path / "t") == sorted(100 * a + 10 * b + c for a in range(4) for b in range(3) for c in range(3))


def test_a_batch_may_replace_all_or_merge_by_keys(tmp_path: Path) -> None:
    table = made(tmp_path / "t", partition_by=("carrier",))
    by = ("carrier",)
    table.commit(written(table.place, rows(range(9)), by), {"q": Change(None, 0)})
    table.commit(written(table.place, rows(range(3)), by), {"q": Change(0, 1)}, replace=True)
    assert numbers_of(tmp_path / "t") == [0, 1, 2]
    schema = pa.schema([("k", pa.string()), ("j", pa.int32()), ("n", pa.int64())])
    keyed = made(tmp_path / "k", schema, partition_by=("k",))
    for batch, found in enumerate([[("a", 1, 1), (None, None, 2)], [("a", 1, 5), ("b", None, 6)], [(None, None, 7)], []]):
        fresh = pa.RecordBatch.from_pylist([dict(zip("kjn", row, strict=True)) for row in found], schema)
        files = written(keyed.place, fresh, ("k",))
        keyed.merge(files, ("k", "j"), {"q": Change(batch - 1 if batch else None, batch)})
    assert {(row["k"], row["j"], row["n"]) for row in deltalake.DeltaTable(tmp_path / "k").to_pyarrow_table().to_pylist()} == {
        ("a", 1, 5),
        ("b", None, 6),
        (None, None, 7),
    }


@pytest.mark.parametrize("step", range(12))
def test_killed_at_any_flush_or_folder_a_batch_is_in_the_table_once_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    left = iter(range(step, -1, -1))

    class Dying(system.Port):
        def flush(self, fd: Any) -> None:
            if next(left, 0) == 0:
                raise Killed
            super().flush(fd)

    def work() -> None:
        table = made(tmp_path / "a" / "t")
        files = written(table.place, rows(range(9)))
        if table.last("q") is None:
            table.commit(files, {"q": Change(None, 0)})

    with system.replaced(Dying()):
        try:
            work()
        except Killed:
            pass
    work()
    assert numbers_of(tmp_path / "a" / "t") == list(range(9))


@pytest.mark.parametrize("torn", [b"", b'{"commitInfo":{}}\n{"add":{"pa', b"\0" * 100], ids=["empty", "half", "zeros"])
def test_a_commit_that_a_power_failure_tore_is_moved_aside(tmp_path: Path, torn: bytes) -> None:
    table = made(tmp_path / "t")
    table.commit(written(table.place, rows(range(3))), {"q": Change(None, 0)})
    log = tmp_path / "t" / "_delta_log"
    (log / f"{2:020}.json").write_bytes(torn)
    again = made(tmp_path / "t")
    assert drop_torn(table.place) == [] and (log / f"{2:020}.json.torn").read_bytes() == torn
    assert again.last("q") == 0
    again.commit(written(table.place, rows(range(3, 5))), {"q": Change(0, 1)})
    assert numbers_of(tmp_path / "t") == list(range(5))


def test_a_reader_sees_whole_versions_while_batches_commit_and_files_are_combined(tmp_path: Path) -> None:
    table = made(tmp_path / "t")
    table.commit(written(table.place, rows(range(10))), {"q": Change(None, 0)})
    is_over, seen, wrong = threading.Event(), set[int](), list[object]()

    def read() -> None:
        while not is_over.is_set():
            found = numbers_of(tmp_path / "t")
            seen.add(len(found))
            if found != list(range(len(found))) or len(found) % 10:
                wrong.append(found)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for batch in range(1, 25):
        table.commit(written(table.place, rows(range(10 * batch, 10 * batch + 10))), {"q": Change(batch - 1, batch)})
        if batch % 4 == 0:
            before, after = table.optimize(1 << 20)
            assert before > after
            table.vacuum(1)
    is_over.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(seen) > 1 and numbers_of(tmp_path / "t") == list(range(250))


# Other implementations.


def test_what_one_implementation_writes_others_read(tmp_path: Path) -> None:
    """Arrow writes the files and delta-rs the log. The test reads the log, DuckDB and polars the files, and polars the whole."""
    import duckdb
    import polars

    table = made(tmp_path / "t", EVERYTHING, partition_by=BY)
    table.commit(written(table.place, pa.RecordBatch.from_pylist(everything(), EVERYTHING), BY), {"q": Change(None, 0)})
    log = TableLog(tmp_path / "t")
    for _ in ("as written", "combined by delta-rs"):
        assert told(deltalake.DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist()) == told(everything())
        assert told(table.dataset().to_table().to_pylist()) == told(everything())
        found = polars.read_delta(str(tmp_path / "t"))
        assert sorted(found["i8"].to_list()) == [row["i8"] for row in everything()]
        assert sorted(map(repr, found["p"].to_list())) == sorted(repr(row["p"]) for row in everything())
        assert log.look() == table.version and log.metadata["partitionColumns"] == list(BY)
        assert log.rows() == len(everything()) and sorted(log.values("i8")) == [row["i8"] for row in everything()]
        expected = {row["i8"]: row for row in everything()}
        seen = set()
        for file in log.added.values():
            name = str(tmp_path / "t" / unquote(file["path"]))
            inside = duckdb.read_parquet(name, hive_partitioning=False).fetchall()
            stats = json.loads(file["stats"])
            assert stats["numRecords"] == len(inside)
            for row in inside:
                whole = expected[row[0]]
                seen.add(row[0])
                assert row[1] == whole["i64"] and row[4] == whole["s"] and row[6] == whole["x"] and row[7] == whole["t"]
                assert file["partitionValues"]["p"] == whole["p"] and file["partitionValues"]["q"] == whole["q"].isoformat()
                for column in ("i64", "s", "f32"):
                    if whole[column] is not None:
                        assert stats["minValues"][column] <= whole[column] <= stats["maxValues"][column]
        assert seen == set(expected)
        table.optimize(1 << 20)
        table.refresh()


def test_readers_that_skip_files_by_their_statistics_lose_no_row(tmp_path: Path) -> None:
    import polars
    from pyarrow import compute as pc

    table = made(tmp_path / "t", EVERYTHING)
    for batch in range(8):
        some = pa.RecordBatch.from_pylist(everything()[5 * batch : 5 * batch + 5], EVERYTHING)
        table.commit(written(table.place, some), {"q": Change(batch - 1 if batch else None, batch)})
    for _ in ("as written", "with files of delta-rs among them"):
        whole, lazy, plain = pa.Table.from_pylist(everything(), EVERYTHING), polars.scan_delta(str(tmp_path / "t")), table.dataset()
        for column in ("i8", "i64", "f64", "s", "t", "day", "dec"):
            for row in everything()[:20:3]:
                if row[column] is None or row[column] != row[column]:
                    continue
                value = pa.scalar(row[column], EVERYTHING.field(column).type)
                expected = sorted(whole.filter(pc.less_equal(whole[column], value))["i8"].to_pylist())
                found = plain.to_table(filter=pc.field(column) <= value)["i8"].to_pylist()
                assert sorted(found) == expected
                if column not in ("t", "dec"):
                    assert sorted(lazy.filter(polars.col(column) <= row[column]).collect()["i8"]) == expected
        table.optimize(3000)
        table.refresh()


def test_each_tool_reads_a_table_in_a_line(tmp_path: Path) -> None:
    import duckdb
    import pandas
    import polars

    path = str(tmp_path / "t")
    table = made(path, partition_by=("carrier",))
    table.commit(written(table.place, rows(range(30)), ("carrier",)), {"q": Change(None, 0)})
    frame = deltalake.DeltaTable(path).to_pandas()
    assert isinstance(frame, pandas.DataFrame) and sorted(frame["row"]) == list(range(30))
    assert sorted(polars.read_delta(path)["row"]) == list(range(30))
    assert sorted(polars.scan_delta(path).filter(polars.col("carrier") == "AA").collect()["row"]) == list(range(0, 30, 3))
    flights = dataset(path)
    assert duckdb.sql("SELECT carrier, count(*) FROM flights GROUP BY 1 ORDER BY 1").fetchall() == [("AA", 10), ("DL", 10), ("UA", 10)]
    assert flights.count_rows() == 30


# Differences, files and places.


def test_every_difference_of_columns_is_an_error_that_names_both(tmp_path: Path) -> None:
    made(tmp_path / "t")
    for fields, words in (
        ([("row", pa.int32()), ("carrier", pa.string())], "column row is long in .*/t, and integer in the rows"),
        ([("row", pa.int64()), ("Carrier", pa.string())], "has the column carrier, and the rows have Carrier"),
        ([("row", pa.int64())], "/t has the column carrier, string, and the rows have none"),
    ):
        for evolve in (False, True):
            with pytest.raises(TableError, match=words):
                made(tmp_path / "t", pa.schema(fields), evolve=evolve)
    wider = pa.schema([*SCHEMA, ("late", pa.struct([("minutes", pa.int32())]))])
    with pytest.raises(TableError, match="the rows have the column late, .*/t has none; allow new columns with evolve"):
        made(tmp_path / "t", wider)
    assert made(tmp_path / "t", wider, evolve=True).schema.names == ["row", "carrier", "late"]
    with pytest.raises(TableError, match="is partitioned by nothing, and the rows by carrier"):
        made(tmp_path / "t", wider, partition_by=("carrier",))
    with pytest.raises(TableError, match="there is no column nobody to partition by"):
        made(tmp_path / "u", partition_by=("nobody",))
    with pytest.raises(TableError, match="every column is a partition column"):
        made(tmp_path / "u", partition_by=("row", "carrier"))


def test_a_table_with_rules_of_others_is_refused(tmp_path: Path) -> None:
    deltalake.DeltaTable.create(tmp_path / "t", deltalake.Schema.from_arrow(pa.schema([pa.field("row", pa.int64(), nullable=False)])))
    with pytest.raises(TableError, match="KVSPOOL_TABLE_RULES.*column row"):
        made(tmp_path / "t", pa.schema([("row", pa.int64())]))
    table = made(tmp_path / "u")
    table._table.alter.add_constraint({"positive": "row > 0"})
    with pytest.raises(TableError, match="KVSPOOL_TABLE_RULES.*delta.constraints.positive"):
        made(tmp_path / "u")


def test_a_folder_that_is_no_table_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "file").write_text("mine")
    with pytest.raises(TableError, match="KVSPOOL_SINK_TAKEN"):
        made(tmp_path / "t")
    (tmp_path / "u").write_text("mine")
    with pytest.raises((TableError, OSError)):
        made(tmp_path / "u")
    assert (tmp_path / "u").read_text() == "mine" and os.listdir(tmp_path / "t") == ["file"]


def test_files_are_for_this_user_and_an_error_leaves_none(tmp_path: Path) -> None:
    table = made(tmp_path / "a" / "t", partition_by=("carrier",))
    files = written(table.place, rows(range(9)), ("carrier",))
    for file in files:
        assert (tmp_path / "a" / "t" / file.path).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "a" / "t" / file.path).parent.stat().st_mode & 0o777 == 0o700
    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path / "a", tmp_path / "a" / "t")] == [0o700] * 2
    before = sorted((tmp_path / "a").rglob("*.parquet"))
    with pytest.raises(ZeroDivisionError), FileWriter(table.place, SCHEMA, ("carrier",), "part") as writer:
        writer.write(rows(range(9)))
        raise ZeroDivisionError
    assert sorted((tmp_path / "a").rglob("*.parquet")) == before


def test_many_partitions_are_written_with_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.tables.files.MOST_OPEN", 3)
    schema = pa.schema([("k", pa.int32()), ("n", pa.int64())])
    table = made(tmp_path / "t", schema, partition_by=("k",))
    batch = pa.RecordBatch.from_pydict({"k": [row % 7 for row in range(70)], "n": list(range(70))}, schema)
    with FileWriter(table.place, schema, ("k",), "part") as writer:
        for first in range(0, 70, 10):
            writer.write(batch.slice(first, 10))
            assert len(writer._open) <= 3
        files = writer.close()
    table.commit(files, {"q": Change(None, 0)})
    found = deltalake.DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist()
    assert sorted((row["n"], row["k"]) for row in found) == [(row, row % 7) for row in range(70)]


def test_large_files_and_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.tables.files.LARGEST", 4000)
    monkeypatch.setattr("hub.tables.files.ROW_GROUP", 2000)
    table = made(tmp_path / "t")
    with FileWriter(table.place, SCHEMA, (), "part") as writer:
        for first in range(0, 1000, 100):
            writer.write(rows(range(first, first + 100)))
        files = writer.close()
    assert len(files) > 1 and sum(file.rows for file in files) == 1000
    assert max(parquet.read_metadata(tmp_path / "t" / file.path).num_row_groups for file in files) > 1


# Object stores.


def test_a_table_on_an_object_store_is_written_once_and_read(lake: str, run: Run, tmp_path: Path) -> None:
    import polars

    import kvspool

    table = made(f"{lake}/flights", partition_by=("carrier",))
    other = Table(f"{lake}/flights")
    table.commit(written(table.place, rows(range(9)), ("carrier",)), {"q": Change(None, 0)})
    with pytest.raises(Overtaken):
        other.commit(written(table.place, rows(range(9)), ("carrier",)), {"q": Change(None, 0)})
    assert sorted(polars.read_delta(f"{lake}/flights")["row"]) == list(range(9))
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_many([b'{"row": %d}' % row for row in range(20)])
    append = ["table", "append", str(tmp_path / "log"), f"{lake}/appended", "--schema", "row int", "--once", "--bad", "fail"]
    outputs = [run(*append), run(*append)]
    outputs.append(run("table", f"{lake}/appended", "--json"))
    assert json.loads(outputs[-1].out.splitlines()[-1])["rows"] == 20
    assert sorted(deltalake.DeltaTable(f"{lake}/appended").to_pyarrow_table().column("row").to_pylist()) == list(range(20))
    assert "hush-hush" not in str(outputs)


def test_a_secret_is_refused_as_an_option() -> None:
    with pytest.raises(TableError, match="KVSPOOL_TABLE_SECRET.* set the environment's variable"):
        TablePlace.of("s3://lake/flights", {"AWS_SECRET_ACCESS_KEY": "hush-hush"})
