"""The commands of a sharded log: real processes where standard input counts, calls of `main` for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shard
from kvspool.cli import main
from shard import route
from shard.cli import open_log

COMMAND = [sys.executable, "-m", "kvspool.cli"]


def run(*arguments: object, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *map(str, arguments)], input=given, capture_output=True, check=False)


def objects(text: str | bytes) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with a set of four shards and no prefix."""
    shard.create(tmp_path / "root", bits=2, capacity="64KiB").close()
    return tmp_path / "root"


def test_create_makes_a_set_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    arguments = ["--prefix", "p", "--bits", "2", "--capacity", "64KiB", "--codec", "msgpack", "--mode", "640"]
    assert main(["shard", "create", str(root), *arguments]) == 0
    out, err = capfd.readouterr()
    assert (out, err) == (f"created {root}: p.2.000 to p.2.003, 4 x 64.0 KiB, 256.0 KiB in all, structured values as msgpack\n", "")
    assert (root / "p.2.000" / "spool.ctl").stat().st_mode & 0o777 == 0o640
    with shard.open(root) as shards:
        assert (shards.prefix, shards.bits) == ("p", 2)
        assert {(stats.capacity, stats.codec) for stats in shards.stats()} == {(65536, "msgpack")}


def test_create_of_a_single_shard_names_it_and_json_gives_its_stats(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "create", str(tmp_path), "--prefix", "p", "--bits", "0", "--capacity", "8KiB"]) == 0
    assert capfd.readouterr().out == f"created {tmp_path}: p, 8.0 KiB in all, structured values as json\n"
    assert main(["shard", "create", str(tmp_path), "--bits", "1", "--capacity", "8KiB", "--json"]) == 0
    (stats,) = objects(capfd.readouterr().out)
    assert [(one["path"], one["capacity"]) for one in stats] == [(str(tmp_path / f"1.00{index}"), 8192) for index in range(2)]


def test_create_of_what_is_there_ends_with_3_unless_it_may_be(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "create", str(root), "--bits", "2"]) == 3
    assert "has a shard set with prefix '' already" in capfd.readouterr().err
    assert main(["shard", "create", str(root), "--bits", "2", "--exist-ok"]) == 0
    assert main(["shard", "create", str(root), "--bits", "3"]) == 4
    assert "has 2 bits already, not 3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bits", "11"], "a whole number from 0 to 10, not '11'"),
        (["--bits", "two"], "a whole number from 0 to 10, not 'two'"),
        ([], "--bits"),
        (["--bits", "1", "--prefix", "../x"], "a prefix may have only the characters"),
        (["--bits", "1", "--prefix", "p\n"], "a prefix may have only the characters"),
        (["--bits", "0"], "a single shard without bits needs a prefix"),
        (["--bits", "1", "--capacity", "0"], "a capacity is 4096 bytes to"),
        (["--bits", "1", "--capacity", "big"], "a size is a number with a unit"),
        (["--bits", "1", "--mode", "9"], "a mode is octal digits"),
        (["--bits", "1", "--mode", "777"], "mode is 0o600 with rights for others added"),
    ],
)
def test_create_with_wrong_arguments_ends_with_2_and_makes_no_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["shard", "create", str(tmp_path / "root"), *arguments]) == 2
    assert words in " ".join(capfd.readouterr().err.split())
    assert list(tmp_path.rglob("spool.*")) == []


def test_append_puts_each_line_into_the_shard_of_its_key(root: Path) -> None:
    lines = b"".join(b'{"n": %d, "user": "u%d"}\n' % (at, at % 9) for at in range(2500))
    done = run("shard", "append", root, "--json-lines", "--key-field", "user", "--type", "7", "--sync", "--json", given=lines)
    assert (done.returncode, done.stderr) == (0, b"")
    (summary,) = objects(done.stdout)
    with shard.open(root) as shards:
        records = list(shards)
        stats = shards.stats()
    assert summary == {
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


def test_append_of_lines_without_a_key_takes_turns(root: Path) -> None:
    done = run("shard", "append", root, given=b"one\ntwo\nthree\n\xff\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"appended 4 records to 4 of 4 shards\n")
    with shard.open(root) as shards:
        assert sorted(record.value for record in shards) == [b"one", b"three", b"two", b"\xff"]
        assert {record.key for record in shards} == {None}


def test_append_with_one_key_goes_to_one_shard(root: Path) -> None:
    done = run("shard", "append", root, "--key", "hello", "--sync", given=b"a\nb")
    assert done.stderr == b"appended 2 records to 1 of 4 shards, on disk\n"
    with shard.open(root) as shards:
        home = route.shard_of(b"hello", 2)
        assert [(record.shard, record.data) for record in shards] == [(home, "a"), (home, "b")]


def test_append_of_nothing_says_so(root: Path) -> None:
    assert run("shard", "append", root).stderr == b"appended 0 records\n"


def test_a_bad_line_ends_append_with_2_and_nothing_of_its_batch_is_there(root: Path) -> None:
    done = run("shard", "append", root, "--json-lines", "--batch", "2", given=b'{"n": 1}\n{"n": 2}\n{"n": 3}\nnonsense\n')
    assert done.returncode == 2
    assert b"appended 2 records to 2 of 4 shards" in done.stderr
    assert b"line 4 is not JSON" in done.stderr
    done = run("shard", "append", root, "--json-lines", given=b'1\n"%s"\n' % (b"x" * 20_000))
    assert done.returncode == 2
    with shard.open(root) as shards:
        assert sorted(record.data["n"] for record in shards) == [1, 2]


def test_append_asks_for_the_prefix_of_several_sets(root: Path) -> None:
    shard.create(root, prefix="p", bits=1, capacity="64KiB").close()
    done = run("shard", "append", root, given=b"v\n")
    assert done.returncode == 2
    assert b"several shard sets; give a prefix: '', 'p'" in done.stderr
    assert run("shard", "append", root, "--prefix", "p", given=b"v\n").returncode == 0
    assert run("shard", "append", root, "--prefix", "", given=b"v\n").returncode == 0
    for prefix in ("", "p"):
        with shard.open(root, prefix=prefix) as shards:
            assert [record.data for record in shards] == ["v"]
    assert run("shard", "append", root, "--prefix", "q", given=b"v\n").returncode == 3
    assert run("shard", "append", root, "--key-field", "k", given=b"v\n").returncode == 2


@pytest.mark.parametrize(
    ("key", "bits", "words"),
    [
        ("hello", 0, "shard 0 of 1: p (hash 6334)"),
        ("hello", 4, "shard 4 of 16: p.4.004 (hash 6334)"),
        ("", 10, "shard 217 of 1024: p.a.0d9 (hash 1cd9)"),
        ("key-000000001", 10, "shard 452 of 1024: p.a.1c4 (hash 2dc4)"),
    ],
)
def test_of_tells_the_shard_of_a_key(capfd: pytest.CaptureFixture[str], key: str, bits: int, words: str) -> None:
    assert main(["shard", "of", key, "--bits", str(bits), "--prefix", "p"]) == 0
    assert capfd.readouterr().out == words + "\n"


def test_of_as_json_agrees_with_where_append_goes(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with shard.open(root) as shards:
        place = shards.append("v", key="schlüssel".encode())
    assert main(["shard", "of", "schlüssel", "--bits", "2", "--json"]) == 0
    (found,) = objects(capfd.readouterr().out)
    assert (found["shard"], found["shards"], found["directory"]) == (place.shard, 4, f"2.00{place.shard}")
    assert found["hash"] & 3 == place.shard


def test_of_without_bits_or_prefix_ends_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "of", "k", "--bits", "0"]) == 2
    assert "needs a prefix" in capfd.readouterr().err


def test_read_tail_and_stats_take_a_root_of_shards(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with shard.open(root) as shards:
        for at in range(30):
            shards.append({"n": at}, key=b"%d" % at)
    assert main(["read", str(root), "--json"]) == 0
    found = objects(capfd.readouterr().out)
    assert sorted(one["value"]["n"] for one in found) == list(range(30))
    assert all(one["shard"] == route.shard_of(one["key"].encode(), 2) for one in found)
    assert main(["tail", str(root), "-n", "5", "--json"]) == 0
    assert [one["value"]["n"] for one in objects(capfd.readouterr().out)] == list(range(25, 30))
    assert main(["tail", str(root), "-n", "3", "--follow", "--timeout", "0", "--json"]) == 0
    assert [one["value"]["n"] for one in objects(capfd.readouterr().out)][-3:] == [27, 28, 29]
    assert main(["stats", str(root), "--json"]) == 0
    (stats,) = objects(capfd.readouterr().out)
    assert sum(one["records"] for one in stats) == 30
    assert main(["stats", str(root)]) == 0
    out = capfd.readouterr().out
    assert [index for index in range(4) if f"2.00{index}" not in out] == []


def test_an_incomplete_set_ends_read_with_4(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (root / "2.001").iterdir():
        path.unlink()
    (root / "2.001").rmdir()
    assert main(["read", str(root)]) == 4
    assert "1 of the 4 shards of prefix '' are missing: 2.001" in capfd.readouterr().err


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


@pytest.mark.parametrize("command", [[], ["create"], ["append"], ["of"]], ids=str)
def test_help_explains_with_examples(capfd: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main(["shard", *command, "--help"]) == 0
    out = capfd.readouterr().out
    assert "Examples:" in out
    assert f"kvspool shard {' '.join(command)}".strip() in out


def test_the_command_alone_prints_its_help_and_ends_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["shard"]) == 2
    assert "create" in capfd.readouterr().err
