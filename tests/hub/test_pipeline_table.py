"""The table of a pipeline: whole at every moment, each batch once, and compacted while it is read; a kill may come anywhere."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import StoppedClock

from hub.pipeline import PipelineRuns, SinkError, Table, snapshot
from hub.pipeline.compaction import Compacted, compact, plan
from hub.pipeline.job import Compact
from hub.pipeline.table import MANIFEST, read_manifest
from kvspool import system
from kvspool.system import Port

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RULES = Compact(files=4)
CHANGES = ("open", "close", "write", "flush", "set_mode", "make_directory", "rename", "link", "symlink", "remove")


def stage(table: Table, rows: list[int], folder: str = "", name: str = "part-0", extra: bool = False) -> None:
    """Leave a file as Spark does."""
    target = table.staging / folder
    target.mkdir(parents=True, exist_ok=True)
    columns = {"row": pa.array(rows, pa.int64())} | ({"more": pa.array(rows, pa.int64())} if extra else {})
    parquet.write_table(pa.table(columns), target / f"{name}.parquet")
    (target / f".{name}.parquet.crc").write_bytes(b"x")
    (table.staging / "_SUCCESS").touch()


def rows_of(path: Path) -> list[int]:
    return sorted(parquet.read_table(path).column("row").to_pylist())


def fill(table: Table, batches: int, folder: str = "") -> None:
    for batch in range(batches):
        table.fresh_staging()
        stage(table, [2 * batch, 2 * batch + 1], folder)
        table.commit("q", batch)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with Table(tmp_path / "out") as table:
        yield table


def test_a_batch_is_there_with_its_number_and_once(table: Table) -> None:
    assert not table.path.exists() and not table.has("q", 0)
    fill(table, 3)
    assert table.has("q", 2) and not table.has("q", 3)
    assert rows_of(table.path) == list(range(6))
    assert table.version is not None and (table.version.rows, table.version.batch) == (6, 2)
    assert read_manifest(table.path) == table.version


def test_partitions_are_folders(table: Table) -> None:
    table.fresh_staging()
    stage(table, [1], "carrier=AA/month=1")
    stage(table, [2], "carrier=UA/month=1")
    table.commit("q", 0)
    found = parquet.read_table(table.path).to_pylist()
    assert {(row["row"], row["carrier"], row["month"]) for row in found} == {(1, "AA", 1), (2, "UA", 1)}


def test_a_partition_may_be_called_like_a_file_and_what_a_task_left_half_done_is_not_taken(table: Table) -> None:
    table.fresh_staging()
    stage(table, [1], "file=a.parquet")
    stage(table, [2], "_temporary/0/_temporary/attempt_2")
    table.commit("q", 0)
    assert rows_of(table.path) == [1] and table.version is not None and len(table.version.files) == 1


def test_other_partition_columns_need_another_table(table: Table) -> None:
    fill(table, 1, "day=0")
    for folder, words in (("carrier=AA", "by day, and the batch by carrier"), ("", "by day, and the batch by nothing")):
        table.fresh_staging()
        stage(table, [2], folder)
        with pytest.raises(SinkError, match=rf"KVSPOOL_SINK_PARTITIONED.*{words}"):
            table.commit("q", 1)
        assert rows_of(table.path) == [0, 1]
    table.commit("q", 1, replace=True)  # which lets nothing of the old ones stay
    assert rows_of(table.path) == [2]


def test_a_batch_may_replace_all(table: Table) -> None:
    fill(table, 2)
    before = snapshot(table.path)
    table.fresh_staging()
    stage(table, [7])
    table.commit("q", 2, replace=True)
    assert rows_of(table.path) == [7] and rows_of(before) == [0, 1, 2, 3]


def test_a_batch_without_rows_changes_nothing_but_tells_the_columns_once(table: Table) -> None:
    for batch in range(2):
        table.fresh_staging()
        stage(table, [])
        assert (table.commit("q", batch) is None) == bool(batch)
    assert parquet.read_table(table.path).schema.names == ["row"] and table.next_number == 2


def test_what_another_query_wrote_is_not_added_to(table: Table) -> None:
    fill(table, 1)
    with pytest.raises(SinkError, match="KVSPOOL_SINK_OF_ANOTHER_QUERY"):
        table.has("other", 0)


def test_a_link_that_is_gone_destroys_nothing(tmp_path: Path) -> None:
    with Table(tmp_path / "out") as table:
        fill(table, 2)
    target = os.readlink(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    for _ in range(2):
        with pytest.raises(SinkError, match=rf"KVSPOOL_SINK_DAMAGED.*ln -s {target}"):
            Table(tmp_path / "out")
    assert rows_of(tmp_path / "moved") == list(range(4))
    os.symlink(target, tmp_path / "out")
    with Table(tmp_path / "out") as table:
        assert table.has("q", 1)


def test_the_first_version_is_shown_again_if_it_is_whole(tmp_path: Path) -> None:
    for damage in (False, True):
        path = tmp_path / str(damage) / "out"
        with Table(path) as table:
            fill(table, 1)
            (file,) = table.path.glob("*.parquet")
            if damage:
                file.write_bytes(b"x")
        path.unlink()
        with Table(path) as table:
            assert table.has("q", 0) != damage and table.path.exists() != damage


def test_a_missing_sink_is_distinguished_from_one_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Table(path) as table:
        with pytest.raises(SinkError, match="KVSPOOL_SINK_DAMAGED.* at batch 3"):
            table.begin("q", "job", 3, "append")
        table.begin("q", "job", 0, "append")
    with Table(path) as table:
        with pytest.raises(SinkError, match="KVSPOOL_SINK_DAMAGED"):
            table.begin("other", "job", 1, "append")
        table.begin("q", "job", 1, "append")  # batch 0 had no rows
        table.fresh_staging()
        stage(table, [1])
        table.commit("q", 1)
        table.begin("q", "job", 2, "append")
        table.check_job("job", "append")
    with Table(path) as table, pytest.raises(SinkError, match="KVSPOOL_SINK_OF_ANOTHER_JOB.* the job job, and this is other"):
        table.check_job("other", "append")
    path.unlink()
    shutil.rmtree(tmp_path / ".out" / "versions")
    with Table(path) as table:
        with pytest.raises(SinkError, match="KVSPOOL_SINK_DAMAGED"):
            table.begin("q", "job", 2, "append")
        table.begin("anew", "job", 0, "append")
    (tmp_path / ".out" / "query").write_bytes(b"{}")
    with pytest.raises(SinkError, match="KVSPOOL_SINK_DAMAGED"):
        Table(path)


@pytest.mark.parametrize(("before", "now"), [("append", "complete"), ("complete", "append")])
def test_a_table_keeps_its_mode(tmp_path: Path, before: str, now: str) -> None:
    path = tmp_path / "out"
    with Table(path) as table:
        table.begin("q", "job", 0, before)
        fill(table, 1)
    with Table(path) as table:
        table.check_job("job", before)
        with pytest.raises(SinkError, match=f"KVSPOOL_SINK_OF_ANOTHER_MODE.* the mode {before}, and the job has {now} now"):
            table.check_job("job", now)
        table.begin("q", "job", 1, before)  # and so it is after another batch
    with Table(path) as table, pytest.raises(SinkError, match="KVSPOOL_SINK_OF_ANOTHER_MODE"):
        table.check_job("job", now)


def test_a_table_that_noted_no_mode_takes_the_one_of_its_next_batch(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Table(path) as table:
        table.begin("q", "job", 0, "append")
        fill(table, 1)
    (tmp_path / ".out" / "query").write_bytes(b'{"query":"q","job":"job","is_shown":true}')
    with Table(path) as table:
        table.check_job("job", "append")
        table.begin("q", "job", 1, "append")
    with Table(path) as table, pytest.raises(SinkError, match="KVSPOOL_SINK_OF_ANOTHER_MODE"):
        table.check_job("job", "complete")


def test_one_process_at_a_time(table: Table) -> None:
    with pytest.raises(PipelineRuns):
        Table(table.path)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.symlink(tmp_path / "folder", tmp_path / "link")
    for name in ("folder", "link"):
        with pytest.raises(SinkError, match="KVSPOOL_SINK_TAKEN"):
            Table(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"",
        lambda text: text[:-1],
        lambda text: text.replace(b'"name":"part', b'"name":"../part'),
        lambda text: text.replace(b'"name":"', b'"name":"/'),
        lambda text: text.replace(b'"number":1', b'"number":2'),
        lambda text: text.replace(b'"batch":0', b'"batch":"0"'),
    ],
)
def test_a_manifest_that_can_not_be_trusted_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    with Table(tmp_path / "out") as table:
        fill(table, 1)
    path = tmp_path / "out" / MANIFEST
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SinkError, match="KVSPOOL_SINK_DAMAGED"):
        Table(tmp_path / "out")


def test_snapshots_go_after_their_time(tmp_path: Path) -> None:
    with Table(tmp_path / "out") as table:
        fill(table, 5)
        first = table.path.parent / ".out/versions/0000000001"
        assert table.prune(600) == 0 and rows_of(first) == [0, 1]
        assert table.prune(0) == 4 and not first.exists()
        assert rows_of(table.path) == list(range(10))


# Compaction.


def test_files_of_one_magnitude_become_one(table: Table) -> None:
    fill(table, 3)
    assert compact(table, RULES) == Compacted(0, 0)
    fill_on(table, 3, 9)
    before = snapshot(table.path)
    assert compact(table, RULES) == Compacted(9, 1)
    assert rows_of(table.path) == rows_of(before) == list(range(18))
    assert len(list(table.path.glob("*.parquet"))) == 1 and len(list(before.glob("*.parquet"))) == 9
    assert table.has("q", 8)


def fill_on(table: Table, first: int, end: int) -> None:
    for batch in range(first, end):
        table.fresh_staging()
        stage(table, [2 * batch, 2 * batch + 1])
        table.commit("q", batch)


def test_partitions_are_compacted_for_themselves_and_closed_ones_whole(tmp_path: Path) -> None:
    with system.replaced(StoppedClock()) as clock, Table(tmp_path / "out") as table:
        assert isinstance(clock, StoppedClock)
        for batch in range(6):
            table.fresh_staging()
            stage(table, [batch], f"day={batch // 3}")
            table.commit("q", batch)
        assert compact(table, RULES) == Compacted(0, 0)
        clock.pass_(3601)
        table.fresh_staging()
        stage(table, [6], "day=1")
        table.commit("q", 6)
        assert compact(table, RULES) == Compacted(3 + 4, 2)  # day 0 is closed; day 1 has four
        assert rows_of(table.path) == list(range(7))
        assert list(plan(table, RULES, everything=True)) == []


def test_many_partitions_are_compacted_in_one_version(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in range(2):
        table.fresh_staging()
        for day in range(5):
            stage(table, [10 * batch + day], f"day={day}")
        table.commit("q", batch)
    monkeypatch.setattr("hub.pipeline.compaction.GROUPS", 3)
    assert compact(table, RULES, everything=True) == Compacted(10, 5)
    assert table.version is not None and table.version.number == 2 + 2
    assert rows_of(table.path) == [*range(5), *range(10, 15)]


def test_a_file_never_grows_beyond_the_target(table: Table) -> None:
    for batch in range(8):
        table.fresh_staging()
        stage(table, list(range(5000 * batch, 5000 * (batch + 1))))
        table.commit("q", batch)
    assert table.version is not None
    size = table.version.files[0].size
    done = compact(table, Compact(target=f"{max(65536, 3 * size)}B", files=2), everything=True)
    assert done.before > done.after > 1 or size < 20_000
    assert rows_of(table.path) == list(range(40_000))


def test_files_with_other_columns_are_kept_apart(table: Table) -> None:
    for batch in range(6):
        table.fresh_staging()
        stage(table, [batch], extra=batch % 2 == 1)
        table.commit("q", batch)
    assert compact(table, RULES, everything=True) == Compacted(6, 2)
    assert compact(table, RULES, everything=True) == Compacted(0, 0)  # nothing more can be gained
    names = {tuple(parquet.read_schema(path).names) for path in table.path.glob("*.parquet")}
    assert names == {("row",), ("row", "more")}


# A kill at every step.


class Killed(BaseException):
    """The process is gone here."""


class KillingPort(Port):
    """The real system up to its nth call that changes something; that call and each one after it kill the process."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        for name in CHANGES:
            setattr(self, name, self._dying(getattr(super(), name)))

    def _dying(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return call(*arguments, **options)

        return counted


def commit(folder: Path) -> None:
    """A batch of two partitions, one of them new."""
    table = Table(folder / "out")
    if table.has("q", 3):
        return table.close()
    table.fresh_staging()
    stage(table, [6], "day=0")
    stage(table, [7], "day=1")
    table.commit("q", 3)
    table.prune(0)
    table.close()


def first(folder: Path) -> None:
    """The first batch that has rows."""
    with Table(folder / "out") as table:
        if table.has("q", 1):
            return
        table.begin("q", "job", 1, "append")
        table.fresh_staging()
        stage(table, [0, 1], "day=0")
        table.commit("q", 1)


def replace(folder: Path) -> None:
    table = Table(folder / "out")
    if table.has("q", 3):
        return table.close()
    table.fresh_staging()
    stage(table, list(range(8)), "day=0")
    table.commit("q", 3, replace=True)
    table.prune(0)
    table.close()


def compact_all(folder: Path) -> None:
    table = Table(folder / "out")
    compact(table, RULES, everything=True)
    table.prune(0)
    table.close()


def run_killed(work: Callable[[Path], None], folder: Path, nth: int) -> bool:
    """Do the work, killed at the nth change; return whether there were fewer changes. Its locks are released, as a process's are."""
    with system.replaced(KillingPort(nth)):
        try:
            work(folder)
        except Killed:
            gc.collect()  # what is open closes with its owner
            return False
    return True


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("work", "after"), [(commit, 8), (replace, 8), (compact_all, 6)], ids=lambda one: getattr(one, "__name__", ""))
def test_killed_at_any_step_it_shows_a_whole_version_and_continues(tmp_path: Path, work: Callable[[Path], None], after: int) -> None:
    with Table(tmp_path / "before" / "out") as table:
        fill(table, 3, "day=0")
    nth, is_over, shown = 0, False, []
    while not is_over:
        folder = tmp_path / str(nth)
        shutil.copytree(tmp_path / "before", folder, symlinks=True)
        is_over = run_killed(work, folder, nth)
        found = rows_of(folder / "out")  # a plain reader, before anybody has cleared up
        assert found in (list(range(6)), list(range(after)))
        shown.append(found)
        work(folder)  # the batch is replayed
        assert rows_of(folder / "out") == list(range(after))
        with Table(folder / "out") as table:
            assert table.version is not None and table.version.batch == (2 if work is compact_all else 3)
            table.prune(0)
        assert not list((folder / ".out").rglob("next")) and not list((folder / ".out" / "staging").glob("*"))
        assert len(list((folder / ".out" / "versions").iterdir())) == 1
        shutil.rmtree(folder)
        nth += 1
    assert nth > 15  # there were that many steps
    assert work is compact_all or list(range(6)) in shown and list(range(8)) in shown


@pytest.mark.usefixtures("no_collector")
def test_killed_at_any_step_of_the_first_batch_it_has_it_once(tmp_path: Path) -> None:
    with Table(tmp_path / "before" / "out") as table:
        table.begin("q", "job", 0, "append")
    nth, is_over = 0, False
    while not is_over:
        folder = tmp_path / str(nth)
        shutil.copytree(tmp_path / "before", folder)
        is_over = run_killed(first, folder, nth)
        first(folder)
        assert rows_of(folder / "out") == [0, 1] and read_manifest(folder / "out").number == 1
        nth += 1
    assert nth > 10
