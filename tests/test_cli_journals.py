"""The command with journals: every verb that takes a log, and those that are for journals alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import kvspool
from kvspool.cli import append, checks, main
from kvspool.journal import Floor, Journal, Retention

EACH, SIZE = 10, 36


pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """A journal of three full segments and one of five records."""
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=EACH * SIZE) as made:
        made.append_many([b"%010d" % number for number in range(35)], timestamp=1_700_000_000_000_000_000)
        yield made


@pytest.fixture
def run(capsysbinary: pytest.CaptureFixture[bytes]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        done = capsysbinary.readouterr()
        return code, done.out.decode(), done.err.decode()

    return call


def told(answer: tuple[int, str, str]) -> Any:
    assert answer[0] == 0, answer
    return json.loads(answer[1])


def flip(log: Journal, base: int, number: int) -> None:
    path = log.segments_apart().path_of(base)
    data = bytearray(path.read_bytes())
    data[number * SIZE + 19] ^= 4
    path.write_bytes(data)


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """Give standard input of this process some bytes."""
    with ExitStack() as opened:

        def put(data: bytes) -> None:
            (tmp_path / "input").write_bytes(data)
            monkeypatch.setattr("sys.stdin", opened.enter_context((tmp_path / "input").open(encoding="utf-8")))

        yield put


# Making and filling.


def test_create(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "made"
    options = ("--max-bytes", "1GiB", "--max-age", "12h", "--by-readers", "--floor", "records:10,segments:2,bytes:1KiB", "--force")
    stats = told(run("create", path, "--format", "sej", "--segment-bytes", "4MiB", "--durability", "disk", *options, "--json"))
    assert (stats["format"], stats["records"], stats["durability"]) == ("sej", 0, "disk")
    with kvspool.open(path, format="sej") as log:
        assert log.format.limits() == {"segment_bytes": 4 << 20}
        floor = Floor(records=10, segments=2, bytes=1024)
        assert log.retention == Retention(max_bytes=1 << 30, max_age=43200.0, by_consumers=True, floor=floor, force=True)
    assert run("create", tmp_path / "plain", "--format", "sej")[1] == f"created {tmp_path / 'plain'}: a journal in the format sej\n"
    with kvspool.open(tmp_path / "plain", format="sej") as log:
        assert log.retention is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "sej", "--capacity", "1MiB"), "--capacity is not an option of a journal"),
        (("--format", "sej", "--policy", "block"), "--policy is not an option of a journal"),
        (("--segment-bytes", "1MiB"), "--segment-bytes is not an option of a spool"),
        (("--max-age", "3d"), "retention is for journals"),
        (("--format", "sej", "--codec", "keyed"), "keyed"),
        (("--format", "sej", "--segment-bytes", "0"), "1 to 9223372036854775807 bytes"),
    ],
)
def test_create_refuses_what_means_nothing(run: Any, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    code, _, err = run("create", tmp_path / "made", *options)
    assert code == 2 and words in err and not (tmp_path / "made").exists()


@pytest.mark.parametrize("floor", ["-1", "many", "records:x", "tons:3", ""])
def test_a_floor_that_makes_no_sense(run: Any, tmp_path: Path, floor: str) -> None:
    code, _, err = run("create", tmp_path / "made", "--format", "sej", f"--floor={floor}")
    assert code == 2 and "floor" in err


def test_append(run: Any, log: Journal, give: Any) -> None:
    give(b'{"n": 1}\n{"n": 2}\n')
    answer = run("append", log.path, "--json-lines", "--key-field", "n", "--type", 3, "--durable", "--json")
    assert told(answer) == {"appended": 2, "first_sequence": 35, "last_sequence": 36, "synced": True}
    first, second = log.read(35)
    assert (first.value, first.key, first.type, second.key) == (b'{"n":1}', b"1", 3, b"2")
    assert log.stats().synced_sequence == 37


def test_append_says_what_a_format_has_no_room_for(run: Any, log: Journal, give: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    give(b"x\n")
    code, _, err = run("append", log.path, "--key", "k" * 128)
    assert code == 2 and "line 1: a key of 128 bytes" in err
    monkeypatch.setattr(append, "LONGEST_LINE", 10)
    give(b"x" * 11)
    code, _, err = run("append", log.path)
    assert code == 2 and "longer than 10 B" in err
    assert log.end() == 35


# Reading.


def test_read_and_tail(run: Any, log: Journal) -> None:
    assert run("read", log.path, "--values", "--limit", 2)[1] == "0000000000\n0000000001\n"
    assert json.loads(run("read", log.path, "--start", 34, "--json")[1])["sequence"] == 34
    assert [json.loads(line)["sequence"] for line in run("tail", log.path, "-n", 3, "--json")[1].splitlines()] == [32, 33, 34]
    assert run("tail", log.path, "-n", 1, "-f", "--timeout", "0.1", "--values")[1] == "0000000034\n"
    log.trim(before=20)
    gap, record = run("read", log.path, "--start", 5, "--limit", 1, "--json")[1].splitlines()
    assert json.loads(gap)["gap"]["reason"] == "trimmed" and json.loads(record)["sequence"] == 20
    assert run("read", log.path, "--start", 5, "--gaps", "raise")[0] == 7


def test_stats(run: Any, log: Journal) -> None:
    log.reader("slow").close()
    assert told(run("stats", log.path, "--json"))["segments"] == 4
    code, out, _ = run("stats", log.path)
    assert code == 0 and "slow (35 behind)" in out
    code, _, err = run("stats", log.path, "--watch")
    assert code == 2 and "which has no rates" in err


def test_sync(run: Any, log: Journal) -> None:
    assert told(run("sync", log.path, "--json"))["synced_sequence"] == 35


# Durable readers.


@pytest.mark.parametrize("command", ["readers", "offsets"])
def test_readers_and_offsets_are_one_command(run: Any, log: Journal, command: str) -> None:
    assert run(command, log.path, "--set", "a", 12)[1] == "the reader 'a' continues at sequence 12\n"
    assert [json.loads(line) for line in run(command, log.path, "--json")[1].splitlines()] == [
        {"name": "a", "sequence": 12, "lag": 23, "problem": ""}
    ]
    (log.path / "ofs/b.ofs").write_bytes(b"x")
    code, out, _ = run(command, log.path)
    assert code == 0 and "23" in out and "doesn't have" in out
    assert run(command, log.path, "--delete", "b")[0] == 0
    assert run(command, log.path, "--delete", "a")[0] == 0
    assert run(command, log.path, "--delete", "a")[0] == 2
    code, _, err = run(command, log.path, "--delete-slot", 1)
    assert code == 2 and "no slots" in err


@pytest.mark.parametrize(
    ("start", "sequence"), [("latest", 35), ("earliest", 0), ("7", 7), ("2001-01-01", 0), ("2262-01-01T00:00:00Z", None), ("36", None)]
)
def test_a_reader_is_set_to_any_start(run: Any, log: Journal, start: str, sequence: int | None) -> None:
    code, out, err = run("offsets", log.path, "--set", "a", start)
    if sequence is None:
        assert code == 2 and err
    else:
        assert (code, out) == (0, f"the reader 'a' continues at sequence {sequence}\n")
        assert log.readers()[0].sequence == sequence


def test_a_reader_of_a_spool_is_set_too(run: Any, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "spool", capacity=4096) as spool:
        spool.append_many([b"x"] * 5)
        for start, sequence in (("3", 3), ("latest", 5), ("earliest", 0)):
            assert run("readers", spool.path, "--set", "a", start)[1] == f"the reader 'a' continues at sequence {sequence}\n"
            assert spool.readers()[0].sequence == sequence
        with spool.reader("a"):
            assert run("readers", spool.path, "--set", "a", "0")[0] == 6


# Trimming.


def test_trim_dry_run_shows_each_segment_and_why(run: Any, log: Journal) -> None:
    with log.reader("slow") as reader:
        reader.seek(15)
        reader.commit()
    code, out, _ = run("trim", log.path, "--max-bytes", SIZE, "--floor", 25, "--dry-run")
    assert code == 0 and "would go" in out and "'slow' has yet to read it" in out and "the last segment always stays" in out
    assert "would remove 1 segment: 10 records" in out
    assert len(log.bases()) == 4
    report = told(run("trim", log.path, "--max-bytes", SIZE, "--floor", 25, "--dry-run", "--force", "--json"))
    assert [(one["base"], one["goes"]) for one in report["plan"]["segments"]] == [(0, True), (10, True), (20, False), (30, False)]
    assert report["left_behind"] == [{"name": "slow", "first": 15, "last": 19}]


def test_trim(run: Any, log: Journal) -> None:
    code, _, err = run("trim", log.path)
    assert code == 2 and "--max-bytes" in err
    log.reader("slow").close()
    assert told(run("trim", log.path, "--before", 20, "--json"))["removed_segments"] == 0
    out = run("trim", log.path, "--before", 15, "--force")[1]
    assert "removed 1 segment: 10 records, 360 B" in out and "'slow' loses sequences 0 to 9" in out
    assert told(run("trim", log.path, "--max-age", "1d", "--floor", "segments:2", "--force", "--json"))["first_sequence"] == 20
    assert run("trim", log.path, "--before", 99)[0] == 2


def test_trim_sets_rules_and_forgets_them(run: Any, log: Journal) -> None:
    run("offsets", log.path, "--set", "all", "latest")
    assert told(run("trim", log.path, "--by-readers", "--set", "--floor", "segments:2", "--json"))["removed_segments"] == 2
    assert log.retention == Retention(by_consumers=True, floor=Floor(segments=2))
    assert told(run("trim", log.path, "--floor", "segments:1", "--json"))["removed_segments"] == 0  # the journal's own floor holds
    assert run("trim", log.path, "--set")[1] == f"{log.path}: segments are no longer removed automatically\n"
    assert log.retention is None


def test_trim_of_a_spool_is_refused(run: Any, tmp_path: Path) -> None:
    kvspool.create(tmp_path / "spool", capacity=4096).close()
    code, _, err = run("trim", tmp_path / "spool", "--max-bytes", 1)
    assert code == 2 and "overwrites its oldest records" in err


# Damage.


def test_verify_and_repair(run: Any, log: Journal) -> None:
    assert run("verify", log.path)[:2] == (0, "35 records are sound (1.2 KiB), 0 damaged\n")
    flip(log, 10, 3)
    (log.path / "jnl/foreign").write_bytes(b"")
    code, out, _ = run("verify", log.path)
    assert code == 5
    assert "damaged: 36 bytes at position 108 of 000000000000000a.jnl: sequences 13 to 13\n" in out
    assert "an unknown file name: foreign" in out
    code, out, _ = run("repair", log.path)
    assert code == 5 and "removed 36 bytes from 000000000000000a.jnl at position 108, where sequence 13 should be; they are kept in" in out
    assert "a segment now begins at sequence 14" in out and "missing at position 108" in out
    assert json.loads(run("repair", log.path, "--json")[1])["removed"] == []


def test_doctor(run: Any, log: Journal) -> None:
    found = {check.name: check for check in checks.of_log(log.path, [])}
    assert found["records"].found == "35 read, whole and in order; there are no checksums"
    before = sorted(log.path.rglob("*"))
    list(checks.of_place(log.path))
    assert sorted(log.path.rglob("*")) == before
    log.close()
    (log.path / "jnl.lck").unlink()
    path = log.path / "jnl/000000000000001e.jnl"
    path.write_bytes(path.read_bytes()[:SIZE] + b"\xff" * 100)
    (check,) = (check for check in checks.of_log(log.path, []) if check.name == "log")
    assert check.state == "fail" and f"kvspool repair {log.path}" in check.advice


@pytest.mark.parametrize(
    ("arguments", "words"), [(("resize", "{}", "1MiB"), "kvspool trim"), (("salvage", "{}", "elsewhere"), "kvspool repair")]
)
def test_what_is_for_spools_alone_says_what_to_do_instead(run: Any, log: Journal, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run(*(argument.format(log.path) for argument in arguments))
    assert code == 2 and "is a journal, not a spool" in err and words in err


def test_times_are_those_of_the_records(run: Any, log: Journal) -> None:
    line = run("read", log.path, "--limit", 1)[1]
    assert line.startswith(datetime.fromtimestamp(1_700_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S"))
