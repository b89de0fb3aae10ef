"""Shard sets and hub roots whose logs are journals: sej's directories, and our own."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

import hub
import kvspool
import shard
from kvspool import Gap
from kvspool.errors import TooLarge, Unsupported
from shard import ShardSet, route


@pytest.mark.parametrize("form", ["sej", "kvj"])
def test_a_set_of_journals(tmp_path: Path, form: str) -> None:
    keys = [b"key-%09d" % number for number in range(64)]
    with ShardSet.create(tmp_path, prefix="p", bits=2, format=form, segment_bytes=300) as shards:
        assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"p.2.000", "p.2.001", "p.2.002", "p.2.003"}
        places = shards.append_many(keys, keys=keys)
        assert sum(map(len, places.values())) == 64
        assert [record.value for record in shards.read()].__len__() == 64
        assert shards.sync() == {index: len(places.get(index, ())) for index in range(4)}
    for index in range(4):
        with kvspool.open(tmp_path / f"p.2.{index:03x}") as log:
            assert log.stats().format == form
            assert {record.key for record in log.read()} == {key for key in keys if route.shard_of(key, 2) == index}


@pytest.mark.parametrize("form", ["sej", "kvj"])
def test_arrow_into_a_set_of_journals(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    keys = [None if number % 5 == 0 else b"key-%09d" % number for number in range(200)]
    columns = {
        "value": [b"%d" % number for number in range(200)],
        "key": pa.array(keys, pa.binary()),
        "timestamp": pa.array(range(-5, 195), pa.int64()),
        "codec": pa.array([number % 2 for number in range(200)], pa.uint8()),
    }
    table = pa.Table.from_batches(pa.table(columns).to_batches(max_chunksize=70))
    with ShardSet.create(tmp_path, prefix="p", bits=2, format=form, segment_bytes=3000) as shards:
        if form == "sej":
            with pytest.raises(Unsupported, match="has no codecs"):
                shards.append_arrow(table)
            assert sum(map(len, shards.shards)) == 0
            table = table.drop_columns(["codec"])
        ranges = shards.append_arrow(table)
        assert sum(len(written) for parts in ranges.values() for written in parts) == 200
        for index, log in enumerate(shards.shards):
            found = list(log)
            assert [record.sequence for record in found] == [number for part in ranges.get(index, ()) for number in part]
            for record in found:
                number = int(record.value)
                assert (record.key, record.timestamp) == (keys[number], number - 5)
                assert record.codec == (number % 2 if form == "kvj" else 0)
                assert record.key is None or route.shard_of(record.key, 2) == index
            assert [int(record.value) for record in found] == sorted(int(record.value) for record in found)
        too_long = pa.table({"value": [b"x"] * 2, "key": [b"k", b"k" * 70000]}).to_batches(max_chunksize=1)
        with pytest.raises(TooLarge):
            shards.append_arrow(pa.Table.from_batches(too_long))
        assert sum(len(list(log)) for log in shards.shards) == 200


def test_arrow_into_a_set_of_both_kinds(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    for index, form in enumerate(("kvj", "spool")):
        kvspool.create(tmp_path / f"p.1.00{index}", format=form).close()  # type: ignore[call-overload]
    with shard.open(tmp_path) as shards:
        keys = [b"%d" % number for number in range(50)]
        shards.append_arrow(pa.table({"value": keys, "key": keys}), codec=kvspool.Codec.TEXT)
        assert sorted(record.key for record in shards.read()) == sorted(keys)
        assert {record.codec for record in shards.read()} == {kvspool.Codec.TEXT}
        assert all(record.shard == route.shard_of(record.key, 1) for record in shards.read())
        for columns, words in (({"timestamp": [-1]}, "before 1970"), ({"codec": [0]}, "codec")):
            with pytest.raises(ValueError, match=words):
                shards.append_arrow(pa.table({"value": [b""], **columns}))


def test_the_names_that_sej_gives_its_shards(tmp_path: Path) -> None:
    for prefix, bits, names in (("p", 10, "p.a.1ff"), ("", 1, "1.000"), ("one", 0, "one")):
        with ShardSet.create(tmp_path / f"{prefix}{bits}", prefix=prefix, bits=bits, format="sej"):
            assert (tmp_path / f"{prefix}{bits}" / names / "jnl").is_dir()


def test_following_continues_through_segments(tmp_path: Path) -> None:
    with ShardSet.create(tmp_path, bits=1, format="sej", segment_bytes=200) as shards:

        def write() -> None:
            with shard.open(tmp_path) as others:
                for number in range(60):
                    others.append(b"%d" % number, key=b"%d" % number)
                    time.sleep(0.001)

        thread = threading.Thread(target=write)
        thread.start()
        with shards.follow(timeout=20, limit=60) as following:
            found = [record.value for record in following]
        thread.join()
    assert sorted(found) == sorted(b"%d" % number for number in range(60))


def test_a_hub_root_of_journals_and_spools(tmp_path: Path) -> None:
    with hub.create(tmp_path / "hub") as root:
        with root.create_client("old", bits=1, capacity=65536) as spools, root.create_client("new", bits=1, format="kvj") as journals:
            spools.append_many([b"%d" % number for number in range(10)])
            journals.append_many([b"%d" % number for number in range(10)])
        assert {(record.client, record.value) for record in root.read()} == {
            (client, b"%d" % number) for client in ("old", "new") for number in range(10)
        }
        assert root.stats().records == 20
        with root.follow(timeout=10) as following:
            for _ in range(20):
                next(following)
            with root.create_client("late", bits=0, format="sej") as late:
                late.append(b"late")
            assert next(following).client == "late"
            shutil.rmtree(tmp_path / "hub/late")
            with root.client("new") as journals:
                journals.append(b"more")
            assert next(following).value == b"more"


def test_trimmed_records_are_gaps(tmp_path: Path) -> None:
    with ShardSet.create(tmp_path, bits=0, prefix="p", format="sej", segment_bytes=100) as shards:
        shards.append_many([b"x" * 50] * 6)
        (tmp_path / "p/jnl/0000000000000000.jnl").unlink()
        found = list(shards.read({0: 0}, on_gap="yield"))
        assert isinstance(found[0], Gap)
        assert (found[0].first, found[0].last) == (0, 1)
