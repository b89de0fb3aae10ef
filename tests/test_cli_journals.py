"""The command with journals: every verb that takes a log, and those that are for journals alone."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from commands import Run

import kvspool
from kvspool.cli import append, checks
from kvspool.journal import Floor, Journal, Retention

EACH, SIZE = 10, 36


pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """A journal of three full segments and one of five records."""
    with kvspool.create(tmp_path / "log", format="sej", segment_bytes=EACH * SIZE) as made:
        made.append_many([b"%010d" % number for number in range(35)], timestamp=1_700_000_000_000_000_000)
        yield made


def flip(log: Journal, base: int, number: int) -> None:
    path = log.segments_apart().path_of(base)
    data = bytearray(path.read_bytes())
    data[number * SIZE + 19] ^= 4
    path.write_bytes(data)


# Making and filling.


def test_create(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "made"
    options = ("--max-bytes", "1GiB", "--max-age", "12h", "--by-readers", "--floor", "records:10,segments:2,bytes:1KiB", "--force")
    stats = run("create", path, "--format", "sej", "--segment-bytes", "4MiB", "--durability", "disk", *options, "--json").object
    assert (stats["format"], stats["records"], stats["durability"]) == ("sej", 0, "disk")
    with kvspool.open(path, format="sej") as log:
        assert log.format.limits() == {"segment_bytes": 4 << 20}
        floor = Floor(records=10, segments=2, bytes=1024)
        assert log.retention == Retention(max_bytes=1 << 30, max_age=43200.0, by_consumers=True, floor=floor, force=True)
    assert run("create", tmp_path / "plain", "--format", "sej").out == f"created {tmp_path / 'plain'}: a journal in the format sej\n"
    with kvspool.open(tmp_path / "plain", format="sej") as log:
        assert log.retention is None


def test_append(run: Run, log: Journal) -> None:
    options = ("--json-lines", "--key-field", "n", "--type", 3, "--durable", "--json")
    appended = run("append", log.path, *options, given=b'{"n": 1}\n{"n": 2}\n').object
    assert appended == {"appended": 2, "first_sequence": 35, "last_sequence": 36, "synced": True}
    first, second = log.read(35)
    assert (first.value, first.key, first.type, second.key) == (b'{"n":1}', b"1", 3, b"2")
    assert log.stats().synced_sequence == 37


def test_append_says_what_a_format_has_no_room_for(run: Run, log: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "line 1: a key of 128 bytes" in run("append", log.path, "--key", "k" * 128, code=2, given=b"x\n").err
    monkeypatch.setattr(append, "LONGEST_LINE", 10)
    assert "longer than 10 B" in run("append", log.path, code=2, given=b"x" * 11).err
    assert log.end() == 35


# Reading.


def test_read_and_tail(run: Run, log: Journal) -> None:
    assert run("read", log.path, "--values", "--limit", 2).out == "0000000000\n0000000001\n"
    assert run("read", log.path, "--start", 34, "--json").object["sequence"] == 34
    assert [one["sequence"] for one in run("tail", log.path, "-n", 3, "--json").objects] == [32, 33, 34]
    assert run("tail", log.path, "-n", 1, "-f", "--timeout", "0.1", "--values").out == "0000000034\n"
    log.trim(before=20)
    gap, record = run("read", log.path, "--start", 5, "--limit", 1, "--json").objects
    assert gap["gap"]["reason"] == "trimmed" and record["sequence"] == 20
    run("read", log.path, "--start", 5, "--gaps", "raise", code=7)


def test_stats(run: Run, log: Journal) -> None:
    log.reader("slow").close()
    assert run("stats", log.path, "--json").object["segments"] == 4
    assert "slow (35 behind)" in run("stats", log.path).out


def test_sync(run: Run, log: Journal) -> None:
    assert run("sync", log.path, "--json").object["synced_sequence"] == 35


# Durable readers.


@pytest.mark.parametrize("command", ["readers", "offsets"])
def test_readers_and_offsets_are_one_command(run: Run, log: Journal, command: str) -> None:
    assert run(command, log.path, "--set", "a", 12).out == "the reader 'a' continues at sequence 12\n"
    assert run(command, log.path, "--json").objects == [{"name": "a", "sequence": 12, "lag": 23, "problem": ""}]
    (log.path / "ofs/b.ofs").write_bytes(b"x")
    out = run(command, log.path).out
    assert "23" in out and "doesn't have" in out
    run(command, log.path, "--delete", "b")
    run(command, log.path, "--delete", "a")
    run(command, log.path, "--delete", "a", code=2)


@pytest.mark.parametrize(
    ("start", "sequence"), [("latest", 35), ("earliest", 0), ("7", 7), ("2001-01-01", 0), ("2262-01-01T00:00:00Z", None), ("36", None)]
)
def test_a_reader_is_set_to_any_start(run: Run, log: Journal, start: str, sequence: int | None) -> None:
    if sequence is None:
        assert run("offsets", log.path, "--set", "a", start, code=2).err
    else:
        assert run("offsets", log.path, "--set", "a", start).out == f"the reader 'a' continues at sequence {sequence}\n"
        assert log.readers()[0].sequence == sequence


def test_a_reader_of_a_spool_is_set_too(run: Run, tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "spool", capacity=4096) as spool:
        spool.append_many([b"x"] * 5)
        for start, sequence in (("3", 3), ("latest", 5), ("earliest", 0)):
            assert run("readers", spool.path, "--set", "a", start).out == f"the reader 'a' continues at sequence {sequence}\n"
            assert spool.readers()[0].sequence == sequence
        with spool.reader("a"):
            run("readers", spool.path, "--set", "a", "0", code=6)


# Trimming.


def test_trim_dry_run_shows_each_segment_and_why(run: Run, log: Journal) -> None:
    with log.reader("slow") as reader:
        reader.seek(15)
        reader.commit()
    out = run("trim", log.path, "--max-bytes", SIZE, "--floor", 25, "--dry-run").out
    assert "would go" in out and "'slow' has yet to read it" in out and "the last segment always stays" in out
    assert "would remove 1 segment: 10 records" in out
    assert len(log.bases()) == 4
    report = run("trim", log.path, "--max-bytes", SIZE, "--floor", 25, "--dry-run", "--force", "--json").object
    assert [(one["base"], one["goes"]) for one in report["plan"]["segments"]] == [(0, True), (10, True), (20, False), (30, False)]
    assert report["left_behind"] == [{"name": "slow", "first": 15, "last": 19}]


def test_trim(run: Run, log: Journal) -> None:
    log.reader("slow").close()
    assert run("trim", log.path, "--before", 20, "--json").object["removed_segments"] == 0
    out = run("trim", log.path, "--before", 15, "--force").out
    assert "removed 1 segment: 10 records, 360 B" in out and "'slow' loses sequences 0 to 9" in out
    assert run("trim", log.path, "--max-age", "1d", "--floor", "segments:2", "--force", "--json").object["first_sequence"] == 20


def test_trim_sets_rules_and_forgets_them(run: Run, log: Journal) -> None:
    run("offsets", log.path, "--set", "all", "latest")
    assert run("trim", log.path, "--by-readers", "--set", "--floor", "segments:2", "--json").object["removed_segments"] == 2
    assert log.retention == Retention(by_consumers=True, floor=Floor(segments=2))
    assert run("trim", log.path, "--floor", "segments:1", "--json").object["removed_segments"] == 0  # the journal's own floor holds
    assert run("trim", log.path, "--set").out == f"{log.path}: segments are no longer removed automatically\n"
    assert log.retention is None


# Damage.


def test_verify_and_repair(run: Run, log: Journal) -> None:
    assert run("verify", log.path).out == "35 sound records (1.2 KiB), 0 damaged\n"
    flip(log, 10, 3)
    (log.path / "jnl/foreign").write_bytes(b"")
    out = run("verify", log.path, code=5).out
    assert "damaged: 36 bytes at position 108 of 000000000000000a.jnl: sequence 13\n" in out
    assert "an unknown file name: foreign" in out
    out = run("repair", log.path, code=5).out
    assert "removed 36 bytes from 000000000000000a.jnl at position 108, where sequence 13 should be; they are kept in" in out
    assert "a segment now begins at sequence 14" in out and "missing at position 108" in out
    assert run("repair", log.path, "--json", code=5).object["removed"] == []


def test_doctor(run: Run, log: Journal) -> None:
    found = {check.name: check for check in checks.of_log(log.path)}
    assert found["records"].found == "35 read, whole and in order; there are no checksums"
    before = sorted(log.path.rglob("*"))
    list(checks.of_place(log.path))
    assert sorted(log.path.rglob("*")) == before
    log.close()
    (log.path / "jnl.lck").unlink()
    path = log.path / "jnl/000000000000001e.jnl"
    path.write_bytes(path.read_bytes()[:SIZE] + b"\xff" * 100)
    (check,) = (check for check in checks.of_log(log.path) if check.name == "log")
    assert check.state == "fail" and f"kvspool repair {log.path}" in check.advice


def test_times_are_those_of_the_records(run: Run, log: Journal) -> None:
    line = run("read", log.path, "--limit", 1).out
    assert line.startswith(datetime.fromtimestamp(1_700_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S"))
