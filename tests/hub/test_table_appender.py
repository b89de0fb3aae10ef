"""Tables that are kept up to date without Spark: each record once, whatever is killed when, decoded as in a pipeline."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Run

import hub
import kvspool
import shard
from hub.pipeline import BadRecords, SchemaError
from hub.spark.errors import DataLossError
from hub.tables.delta import Table
from hub.tables.errors import TableError

pytest.importorskip("pyarrow")
deltalake = pytest.importorskip("deltalake")
from hub.pipeline.appender import AppendProgress, AppendSource, TableAppender  # noqa: E402

SCHEMA = "row int, carrier string"
PATIENCE = 60  # seconds, against a hang


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hub root with two clients, which keep all that they get."""
    path = tmp_path / "root"
    hub.create(path).close()
    for client in ("EWR", "JFK"):
        shard.create(path, prefix=client, bits=1, capacity="1MiB").close()
    fill(path, range(300))
    return path


def flight(row: int) -> dict[str, Any]:
    return {"row": row, "carrier": "AA UA DL".split()[row % 3]}


def fill(root: Path, rows: range) -> None:
    for client, some in (("EWR", rows[::2]), ("JFK", rows[1::2])):
        with shard.open(root, prefix=client) as shards:
            shards.append_many([flight(row) for row in some], keys=[b"%d" % row for row in some])


def table_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    return found


def rows_of(path: Path) -> list[int]:
    return sorted(row["row"] for row in table_of(path))


def append(root: Path, path: Path, **options: Any) -> AppendProgress:
    with TableAppender(AppendSource(root), str(path), **options) as appender:
        return appender.run(once=True)


def test_each_record_is_a_row_with_its_origin(root: Path, tmp_path: Path) -> None:
    done = append(root, tmp_path / "t", schema=SCHEMA, rows=100)
    assert (done.records, done.rows, done.bad, done.lag) == (300, 300, 0, 0) and done.commits >= 3
    fill(root, range(300, 400))
    done = append(root, tmp_path / "t")  # with the schema that the table has
    assert (done.records, done.rows) == (100, 100)
    found = table_of(tmp_path / "t")
    assert sorted((row["row"], row["carrier"], row["record"]["key"]) for row in found) == [
        (row, flight(row)["carrier"], b"%d" % row) for row in range(400)
    ]
    with hub.open(root) as opened:
        places = {(record.client, record.shard, record.sequence): record.timestamp // 1000 for record in opened.read()}
        (reader,) = opened.readers()
    assert reader.name == "table" and reader.lag is not None and reader.lag.records == 0
    origins = {(row["record"]["topic"], row["record"]["partition"], row["record"]["offset"]): row["event_time"] for row in found}
    assert {place: round(time.timestamp() * 1e6) for place, time in origins.items()} == places


@pytest.mark.parametrize("fails", ["commit", "readers"])
def test_what_was_not_reported_is_not_repeated(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    with TableAppender(AppendSource(root), str(tmp_path / "t"), schema=SCHEMA) as appender, monkeypatch.context() as patch:
        owner, name = (appender.shards, "commit") if fails == "readers" else (appender.table, "_flush")
        patch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            appender.run(once=True)
    append(root, tmp_path / "t")
    assert rows_of(tmp_path / "t") == list(range(300))


def test_of_two_at_once_one_is_overtaken_and_each_record_is_there_once(root: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "t")
    with TableAppender(AppendSource(root), target, schema=SCHEMA) as first, TableAppender(AppendSource(root), target) as second:
        commit = second.table.commit

        def overtaken(*words: Any, **options: Any) -> int:
            second.table.commit = commit  # type: ignore[method-assign]
            first.run(once=True)
            return commit(*words, **options)

        second.table.commit = overtaken  # type: ignore[method-assign, assignment]
        assert second.step() == 0
        fill(root, range(300, 310))
        assert second.run(once=True).records == 10
    assert rows_of(tmp_path / "t") == list(range(310))
    Table(target).vacuum(0, everything=True)  # removes the files of the step that was overtaken
    files = {path.name for path in (tmp_path / "t").rglob("*.parquet")}
    assert files == {Path(name).name for name in deltalake.DeltaTable(tmp_path / "t").file_uris()}


def test_undecodable_records_are_kept_once_or_are_an_error(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    with shard.open(root, prefix="JFK") as shards:
        shards.append(b'{"row": "x"}', key=b"bad")
    with pytest.raises(BadRecords, match=r"KVSPOOL_BAD_RECORD\] topic JFK, partition \d, offset \d+: .*row"):
        append(root, tmp_path / "t", schema=SCHEMA, keep_bad=False)
    with TableAppender(AppendSource(root), str(tmp_path / "t"), schema=SCHEMA) as appender, monkeypatch.context() as patch:
        patch.setattr(appender.table, "commit", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            appender.step()
    done = append(root, tmp_path / "t")
    assert (done.records, done.rows, done.bad) == (301, 300, 1)
    (bad,) = parquet.read_table(tmp_path / "t_bad").to_pylist()
    assert (bad["topic"], bad["key"], bad["value"]) == ("JFK", b"bad", b'{"row": "x"}')


def test_a_new_log_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    for number in range(2):
        with kvspool.create(tmp_path / "log", format="kvj") as log:
            log.append_many([b'{"row": %d}' % row for row in range(number * 10, number * 10 + 5)])
        append(tmp_path / "log", tmp_path / "t", schema="row int")
        (tmp_path / "log").rename(tmp_path / f"old{number}")
    assert rows_of(tmp_path / "t") == [*range(5), *range(10, 15)]


def test_lost_records_are_an_error_or_are_counted(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        log.append_many([b"v" * 50] * 10)
        append(tmp_path / "log", tmp_path / "t", codec="raw", name="")
        log.append_many([b"v" * 50] * 200)
        first = log.stats().first_sequence
    with pytest.raises(DataLossError, match=r"KVSPOOL_DATA_LOSS\] topic 'log', partition 0"):
        append(tmp_path / "log", tmp_path / "t", codec="raw", name="")
    done = append(tmp_path / "log", tmp_path / "t", codec="raw", name="", fail_on_data_loss=False)
    assert done.lost == first - 10 and Table(tmp_path / "t").info().rows == 10 + 210 - first


def test_a_log_that_ends_before_the_tables_position_is_refused(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", format="kvj") as log:
        log.append_many([b"early"] * 10)
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    with kvspool.open(tmp_path / "log") as log:
        log.append_many([b"late"] * 10)
    assert append(tmp_path / "log", tmp_path / "t", codec="raw").records == 20
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "copy").rename(tmp_path / "log")
    with kvspool.open(tmp_path / "log") as log:
        for _ in range(2):  # also while it has nothing that the table lacks
            with pytest.raises(DataLossError, match=r"KVSPOOL_OFFSET_CHANGED\] topic 'log', partition 0: .* before 20, .* ends at 1\d"):
                append(tmp_path / "log", tmp_path / "t", codec="raw")
            log.append_many([b"other"] * 5)


def test_a_durable_reader_holds_back_what_is_not_in_the_table(tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy="raise") as log:
        with TableAppender(AppendSource(tmp_path / "log"), str(tmp_path / "t"), codec="raw") as appender:
            log.append_many([b"v" * 50] * 20)
            with pytest.raises(kvspool.errors.KvspoolError):
                log.append_many([b"v" * 50] * 200)
            count = log.stats().next_sequence
            assert appender.run(once=True).records == count
            log.append_many([b"v" * 50] * 20)
            assert appender.run(once=True).records == count + 20
    assert Table(tmp_path / "t").info().rows == count + 20


def test_a_reader_that_was_not_moved_moves_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy="raise") as log:
        with TableAppender(AppendSource(tmp_path / "log"), str(tmp_path / "t"), codec="raw") as appender, monkeypatch.context() as patch:
            with pytest.raises(kvspool.errors.SpoolFull):
                while True:
                    log.append(b"v" * 50)
            patch.setattr(appender.shards, "commit", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
            with pytest.raises(OSError, match="Input/output"):
                appender.run(once=True)
        with pytest.raises(kvspool.errors.SpoolFull):
            log.append(b"v" * 50)
        assert append(tmp_path / "log", tmp_path / "t", codec="raw").records == 0
        log.append(b"v" * 50)  # there is room, although no record was appended to the table


def test_members_of_a_group_share_the_shards_and_one_that_is_killed_is_replaced(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvspool.cli", "table", "append", str(root), str(tmp_path / "t"), "--group", "g", "--json"]
    command += ["--schema", SCHEMA, "--every", "0", "--rows", "50"]

    def members() -> list[int]:
        with hub.open(root) as opened:
            return sorted(len(member.shards) for group in opened.groups() for member in group.members)

    def until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    append(root, tmp_path / "t", schema=SCHEMA, name="")
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as first,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as second,
    ):
        until(lambda: members() == [2, 2])
        for at in range(300, 500, 20):
            fill(root, range(at, at + 20))
        until(lambda: len(rows_of(tmp_path / "t")) > 300)
        first.kill()
        until(lambda: members() == [4])
        fill(root, range(500, 600))
        until(lambda: len(rows_of(tmp_path / "t")) == 600)
        second.terminate()
        assert second.wait(PATIENCE) == 0
    assert rows_of(tmp_path / "t") == list(range(600))
    with hub.open(root) as opened:
        (reader,) = opened.readers()
    assert reader.name == "g" and reader.lag is not None and reader.lag.records == 0


def test_a_log_and_a_set_without_a_prefix_have_a_group_too_and_selected_topics_none(root: Path, tmp_path: Path) -> None:
    values = [b'{"row": %d}' % row for row in range(40)]
    with kvspool.create(tmp_path / "log", format="kvj") as log, shard.create(tmp_path / "set", bits=1, capacity="64KiB") as shards:
        log.append_many(values)
        shards.append_many(values, keys=[b"%d" % row for row in range(40)])
        for name, source in (("log", log), ("set", shards)):
            assert append(tmp_path / name, tmp_path / f"table of {name}", schema="row int", group="g").records == 40
            assert rows_of(tmp_path / f"table of {name}") == list(range(40))
            (group,) = source.groups()
            assert (group.name, group.members, group.lag.records) == ("g", [], 0)
    with pytest.raises(ValueError, match="the group 'g' shares all shards of .*root: leave out the topics"):
        TableAppender(AppendSource(root, ("JFK",)), str(tmp_path / "t"), schema=SCHEMA, group="g")


def test_other_rows_than_the_tables_are_an_error_that_names_both(root: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="/t is new, and codec json needs a schema"):
        append(root, tmp_path / "t")
    append(root, tmp_path / "t", schema="row int")
    fill(root, range(300, 310))
    with pytest.raises(TableError, match=r"the rows have the column carrier, string, and .*/t has none"):
        append(root, tmp_path / "t", schema=SCHEMA)
    with pytest.raises(TableError, match=r"column row is integer in .*/t, and string in the rows"):
        append(root, tmp_path / "t", schema="row string", evolve=True)
    append(root, tmp_path / "t", schema=SCHEMA, evolve=True)
    found = {row["row"]: row["carrier"] for row in table_of(tmp_path / "t")}
    assert len(found) == 310 and found[0] is None and found[300] == flight(300)["carrier"]


def test_the_command_follows_a_root_through_a_sigkill(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvspool.cli", "table", "append", str(root), str(tmp_path / "t"), "--schema", SCHEMA, "--json"]
    for first in (300, 400):
        with subprocess.Popen([*command, "--every", "0", "--rows", "40"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["records"] > 0
            fill(root, range(first, first + 100))
            assert json.loads(process.stdout.readline())["commits"] == 2
            process.send_signal(signal.SIGKILL)
            process.stdout.close()
            assert process.wait() == -signal.SIGKILL
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["lag"] == 0:
                process.terminate()
        assert process.wait() == 0
    assert rows_of(tmp_path / "t") == list(range(500))


def test_a_stop_ends_a_follower_after_its_commit(root: Path, tmp_path: Path) -> None:
    with TableAppender(AppendSource(root), str(tmp_path / "t"), schema=SCHEMA) as appender:
        thread = threading.Thread(target=lambda: appender.run(every=0, report=lambda done: appender.stop()))
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert rows_of(tmp_path / "t") == list(range(300))


def test_the_command_shows_a_table(root: Path, tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "t")
    run("table", "append", root, path, "--schema", "infer", "--once", "--partition-by", "carrier")
    found = json.loads(run("table", path, "--json").out.splitlines()[-1])
    assert (found["rows"], found["partition_by"], found["last"]["by"]) == (300, ["carrier"], "table")
    assert found["columns"]["row"] == "int64" and found["bytes"] > 0 and found["files"] == 3
    assert f"{path}: version 1, 300 rows, 3 files" in run("table", path).out
