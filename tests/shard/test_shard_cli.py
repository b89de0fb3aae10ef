"""The commands of a sharded log: real processes where standard input counts, calls of `main` for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Run

import shard
from shard import route
from shard.cli import open_log


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with a set of four shards and no prefix."""
    shard.create(tmp_path / "root", bits=2, capacity="64KiB").close()
    return tmp_path / "root"


def test_create_makes_a_set_and_says_so(tmp_path: Path, run: Run) -> None:
    root = tmp_path / "root"
    arguments = ["--prefix", "p", "--bits", "2", "--capacity", "64KiB", "--codec", "msgpack", "--mode", "640"]
    out, err = run("shard", "create", root, *arguments)
    assert (out, err) == (f"created {root}: p.2.000 to p.2.003, 4 x 64.0 KiB, 256.0 KiB in all, structured values as msgpack\n", "")
    assert (root / "p.2.000" / "spool.ctl").stat().st_mode & 0o777 == 0o640
    with shard.open(root) as shards:
        assert (shards.prefix, shards.bits) == ("p", 2)
        assert {(stats.capacity, stats.codec) for stats in shards.stats()} == {(65536, "msgpack")}


def test_create_of_a_single_shard_names_it_and_json_gives_its_stats(tmp_path: Path, run: Run) -> None:
    shown = run("shard", "create", tmp_path, "--prefix", "p", "--bits", "0", "--capacity", "8KiB").out
    assert shown == f"created {tmp_path}: p, 8.0 KiB in all, structured values as json\n"
    (stats,) = run("shard", "create", tmp_path, "--bits", "1", "--capacity", "8KiB", "--json").objects
    assert [(one["path"], one["capacity"]) for one in stats] == [(str(tmp_path / f"1.00{index}"), 8192) for index in range(2)]


def test_create_of_what_is_there_is_done_if_it_may_be(root: Path, run: Run) -> None:
    run("shard", "create", root, "--bits", "2", "--exist-ok")


def test_append_puts_each_line_into_the_shard_of_its_key(root: Path, run: Run) -> None:
    lines = b"".join(b'{"n": %d, "user": "u%d"}\n' % (at, at % 9) for at in range(2500))
    done = run("shard", "append", root, "--json-lines", "--key-field", "user", "--type", "7", "--sync", "--json", given=lines)
    assert done.err == ""
    with shard.open(root) as shards:
        records = list(shards)
        stats = shards.stats()
    assert done.object == {
        "appended": 2500,
        "shards": {Path(one.path).name: one.records for one in stats if one.records},
        "synced": True,
    }
    assert sorted(record.data["n"] for record in records) == list(range(2500))
    for record in records:
        assert record.key == record.data["user"].encode()
        assert record.shard == route.shard_of(record.key, 2)
        assert record.type == 7
    assert all(one.synced_sequence == one.next_sequence for one in stats)


def test_append_of_lines_without_a_key_takes_turns(root: Path, run: Run) -> None:
    assert run("shard", "append", root, given=b"one\ntwo\nthree\n\xff\n") == ("", "appended 4 records to 4 of 4 shards\n")
    with shard.open(root) as shards:
        assert sorted(record.value for record in shards) == [b"one", b"three", b"two", b"\xff"]
        assert {record.key for record in shards} == {None}


def test_append_with_one_key_goes_to_one_shard(root: Path, run: Run) -> None:
    done = run("shard", "append", root, "--key", "hello", "--sync", given=b"a\nb")
    assert done.err == "appended 2 records to 1 of 4 shards, on disk\n"
    with shard.open(root) as shards:
        home = route.shard_of(b"hello", 2)
        assert [(record.shard, record.data) for record in shards] == [(home, "a"), (home, "b")]


def test_append_of_nothing_says_so(root: Path, run: Run) -> None:
    assert run("shard", "append", root).err == "appended 0 records\n"


def test_a_bad_line_ends_append_with_2_and_nothing_of_its_batch_is_there(root: Path, run: Run) -> None:
    lines = b'{"n": 1}\n{"n": 2}\n{"n": 3}\nnonsense\n'
    done = run("shard", "append", root, "--json-lines", "--batch", "2", code=2, given=lines)
    assert "appended 2 records to 2 of 4 shards" in done.err
    assert "line 4 is not JSON" in done.err
    run("shard", "append", root, "--json-lines", code=2, given=b'1\n"%s"\n' % (b"x" * 20_000))
    with shard.open(root) as shards:
        assert sorted(record.data["n"] for record in shards) == [1, 2]


def test_append_asks_for_the_prefix_of_several_sets(root: Path, run: Run) -> None:
    shard.create(root, prefix="p", bits=1, capacity="64KiB").close()
    assert "several shard sets; give a prefix: '', 'p'" in run("shard", "append", root, code=2, given=b"v\n").err
    run("shard", "append", root, "--prefix", "p", given=b"v\n")
    run("shard", "append", root, "--prefix", "", given=b"v\n")
    for prefix in ("", "p"):
        with shard.open(root, prefix=prefix) as shards:
            assert [record.data for record in shards] == ["v"]


@pytest.mark.parametrize(
    ("key", "bits", "words"),
    [
        ("hello", 0, "shard 0 of 1: p (hash 6334)"),
        ("hello", 4, "shard 4 of 16: p.4.004 (hash 6334)"),
        ("", 10, "shard 217 of 1024: p.a.0d9 (hash 1cd9)"),
        ("key-000000001", 10, "shard 452 of 1024: p.a.1c4 (hash 2dc4)"),
    ],
)
def test_of_tells_the_shard_of_a_key(run: Run, key: str, bits: int, words: str) -> None:
    assert run("shard", "of", key, "--bits", bits, "--prefix", "p").out == words + "\n"


def test_of_as_json_agrees_with_where_append_goes(root: Path, run: Run) -> None:
    with shard.open(root) as shards:
        place = shards.append("v", key="schlüssel".encode())
    (found,) = run("shard", "of", "schlüssel", "--bits", "2", "--json").objects
    assert (found["shard"], found["shards"], found["directory"]) == (place.shard, 4, f"2.00{place.shard}")
    assert found["hash"] & 3 == place.shard


def test_read_tail_and_stats_take_a_root_of_shards(root: Path, run: Run) -> None:
    with shard.open(root) as shards:
        for at in range(30):
            shards.append({"n": at}, key=b"%d" % at)
    found = run("read", root, "--json").objects
    assert sorted(one["value"]["n"] for one in found) == list(range(30))
    assert all(one["shard"] == route.shard_of(one["key"].encode(), 2) for one in found)
    assert [one["value"]["n"] for one in run("tail", root, "-n", "5", "--json").objects] == list(range(25, 30))
    assert [one["value"]["n"] for one in run("tail", root, "-n", "3", "--follow", "--timeout", "0", "--json").objects][-3:] == [27, 28, 29]
    (stats,) = run("stats", root, "--json").objects
    assert sum(one["records"] for one in stats) == 30
    out = run("stats", root).out
    assert [index for index in range(4) if f"2.00{index}" not in out] == []


def test_only_a_single_set_without_prefix_is_opened_as_a_shard_set(root: Path, tmp_path: Path) -> None:
    log = open_log(root)
    assert log is not None
    with log:
        assert log.bits == 2
    assert open_log(tmp_path) is None
    assert open_log(tmp_path / "none") is None
    (tmp_path / "file").touch()
    assert open_log(tmp_path / "file") is None
    shard.create(root, prefix="p", bits=1, capacity=4096).close()
    assert open_log(root) is None
