"""Commands that find records and logs: ranges, filters, `get`, `ls`, `du`; and what the command says about mistakes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from commands import Run

import kvspool
import shard
from kvspool import Record, queue
from kvspool.cli import options
from kvspool.cli.where import Where
from kvspool.record import Codec

pytestmark = pytest.mark.usefixtures("no_plugins")
NOON = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()) * 10**9
COMMAND = [sys.executable, "-m", "kvspool.cli"]


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    """A log of ten records, a minute apart from 12:00, with keys a and b in turn."""
    with kvspool.create(tmp_path / "events", capacity="64KiB") as log:
        for number in range(10):
            log.append(
                {"n": number, "user": {"id": number % 3}}, key=b"ab"[number % 2 : number % 2 + 1], timestamp=NOON + number * 60 * 10**9
            )
    yield tmp_path / "events"


@pytest.fixture
def sequences(run: Run) -> Callable[..., list[int]]:
    """Run a command with --json, and return the sequences that it printed."""
    return lambda *arguments: [item["sequence"] for item in run(*arguments, "--json").objects]


# Ranges and filters.


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--start 7", [7, 8, 9]),
        ("--end 2", [0, 1]),
        ("--start 3 --end 5", [3, 4]),
        ("--start 2026-01-31T12:08:00Z", [8, 9]),
        ("--end 2026-01-31T12:02:00Z", [0, 1]),
        ("--start -1s", []),
        ("--start 4 --end -1d --limit 2", [4, 5]),
        ("--key a", [0, 2, 4, 6, 8]),
        ("--key a --limit 2", [0, 2]),
        ("--key a --limit 0", []),
        ("--key b --end 4", [1, 3]),
        ("--where data.n>7", [8, 9]),
        ("--key a --where data.user.id==0", [0, 6]),
    ],
)
def test_read_prints_the_records_of_a_range_that_match(
    events: Path, sequences: Callable[..., list[int]], arguments: str, expected: list[int]
) -> None:
    assert sequences("read", events, *arguments.split()) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--last 2", [8, 9]),
        ("--key a -n 2", [6, 8]),
        ("--where data.n<3 -n 2", [1, 2]),
        ("--since 2026-01-31T12:08:00", [8, 9]),
        ("--since 10m", []),
        ("--since 2026-01-31 --key b --where data.n>5", [7, 9]),
        ("-f --timeout 0 --where data.n==9 -n 1", [9]),
        ("-f --timeout 0 --since 2026-01-31T12:09:00Z", [9]),
    ],
)
def test_tail_prints_the_last_records_that_match(
    events: Path, sequences: Callable[..., list[int]], arguments: str, expected: list[int]
) -> None:
    assert sequences("tail", events, *arguments.split()) == expected


@pytest.mark.parametrize(("text", "seconds"), [("-30s", 30), ("-5m", 300), ("-1.5h", 5400), ("-7D", 604800)])
def test_an_age_is_a_time_before_now(text: str, seconds: float) -> None:
    for parse in (options.start, options.end, options.since):
        found = parse(text)
        assert isinstance(found, datetime)
        assert seconds <= (datetime.now(UTC) - found).total_seconds()
    assert abs((options.since(text[1:]) - options.since(text)).total_seconds()) < 60


@pytest.mark.parametrize("text", ["-5", "-m", "--5m", "-5w", "-infm", "-1e400d", "-9999999d"])
def test_an_impossible_age_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.start(text)


def test_export_and_copy_have_the_same_range(events: Path, tmp_path: Path, run: Run) -> None:
    span = ["--start", "2026-01-31T12:02:00Z", "--end", "2026-01-31T12:06:00Z", "--limit", "3"]
    assert [item["sequence"] for item in run("export", events, *span).objects] == [2, 3, 4]
    run("copy", events, tmp_path / "part", "--format", "kvj", *span)
    with kvspool.open(tmp_path / "part") as part:
        assert [record.sequence for record in part.read()] == [2, 3, 4]


RECORD = Record(3, NOON, 2, b"user7", b'{"n": 1, "tags": ["a", "b"], "user": {"id": 7, "get": "x"}, "none": null}', Codec.JSON)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("data.n == 1", True),
        ("data['n'] == 1 and key == 'user7'", True),
        ("data.user.id == 7 or data.n == 9", True),
        ("not data.n == 1", False),
        ("'a' in data.tags", True),
        ("'c' not in data.tags", True),
        ("data.tags[1] == 'b' and data.tags[-1] == 'b'", True),
        ("data.n in [1, 2, 3]", True),
        ("0 < data.n <= 1", True),
        ("data.missing == None and data.none is null", True),
        ("data.missing.deeper[3] > 3", False),
        ("data.n > 'text'", False),
        ("data.user.get == 'x'", True),  # a member, not Python's method
        ("type == 2 and sequence == 3 and codec == 'json'", True),
        ("time == '2026-01-31T12:00:00Z' and time < '2026-02-01'", True),
        ("'2026-02-01' > time", True),
        ("time == 'soon'", False),
        ("key in 'user7, user8'", True),
        ("value == 5", False),
        ("shard == 3", False),
        ("-1 < data.n", True),
        ("true", True),
    ],
)
def test_a_condition_is_true_or_false_of_a_record(condition: str, expected: bool) -> None:
    assert Where(condition).matches(RECORD) is expected


def test_a_condition_on_a_value_that_is_no_data_sees_its_bytes() -> None:
    assert Where("data == 'plain'").matches(Record(0, 0, 0, None, b"plain"))
    assert not Where("data.a == 1").matches(Record(0, 0, 0, None, b"\xff"))
    assert not Where("data.a == 1").matches(Record(0, 0, 0, None, b"{", Codec.JSON))


@pytest.mark.parametrize(
    "condition",
    [
        "__import__('os').system('x')",
        "data.n ** 99999999",
        "'a' * 10",
        "[x for x in data]",
        "lambda: 1",
        "data[0:2] == 1",
        "(x := 1)",
        "f'{data}'",
        "data.n == 1; 1",
        "print",
        "",
        "(" * 3000 + ")" * 3000,
        "1 " + "and 1 " * 1000,
        "__class__ == 1",
        "data == `x`",
    ],
)
def test_anything_but_a_comparison_is_no_condition(condition: str) -> None:
    with pytest.raises(ValueError):
        Where(condition)


def test_a_condition_reaches_no_attribute_of_an_object() -> None:
    assert not Where("data.__class__").matches(RECORD)
    assert not Where("key.__class__ or time.tzinfo or sequence.real").matches(RECORD)


# One record, and all logs.


def test_get_prints_records_by_their_sequences(events: Path, sequences: Callable[..., list[int]], run: Run) -> None:
    assert sequences("get", events, 4, 2) == [4, 2]
    assert run("get", events, "3", "--values").out == '{"n":3,"user":{"id":0}}\n'


def test_get_says_that_a_record_was_overwritten(log: kvspool.Spool, run: Run) -> None:
    log.append_many([bytes(500)] * 20)
    captured = run("get", log.path, "0", code=7)
    assert "overrun" in captured.err and not captured.out


def test_a_log_of_several_logs_has_times_to_select(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    import shard.cli
    from kvspool.cli import plugins

    shard.create(tmp_path / "set", prefix="", bits=1).close()
    monkeypatch.setattr(plugins, "load", lambda: [shard.cli])
    run("read", tmp_path / "set", "--start", "-5m")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a spool, a journal below it, a queue, a shard set, and a damaged log."""
    kvspool.create(tmp_path / "a", capacity=4096).close()
    (tmp_path / "below").mkdir()
    with kvspool.create(tmp_path / "below" / "b", format="kvj") as log:
        log.append_many([b"x"] * 3)
    with queue.create(tmp_path / "q") as jobs:
        jobs.put(b"job")
    kvspool.create(tmp_path / "bad", capacity=4096).close()
    os.truncate(tmp_path / "bad" / "spool.dat", 10)
    (tmp_path / "empty" / "dir").mkdir(parents=True)
    shard.create(tmp_path / "set", bits=1, format="kvj").close()
    return tmp_path


def test_ls_lists_all_logs(place: Path, run: Run) -> None:
    found = {Path(one["path"]).relative_to(place): one for one in run("ls", place, "--json").objects}
    assert {str(path): (one["kind"], one["records"]) for path, one in found.items()} == {
        "a": ("spool", 0),
        "bad": ("?", None),
        "below/b": ("kvj", 3),
        "q": ("qewqew", 1),
        **{f"set/{path.name}": ("kvj", 0) for path in (place / "set").iterdir()},
    }
    assert found[Path("bad")]["problem"]
    assert run("ls", place).out.splitlines()[0].split("\t")[1:3] == ["spool", "0"]


def test_ls_on_a_terminal_is_a_tree(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspool.cli.output.is_terminal", lambda: True)
    shown = run("ls", place).out
    assert "├── below" in shown and "│   └── b  kvj: 3 records" in shown and "empty" not in shown


def test_du_shows_the_bytes_on_disk(place: Path, run: Run) -> None:
    rows = [line.split("\t") for line in run("du", place / "a", place / "below").out.splitlines()]
    assert [Path(path).name for _, path in rows] == ["a", "b"]
    expected = subprocess.run(["du", "-s", "-B1", place / "a" / "spool.dat"], capture_output=True, check=True, text=True).stdout
    assert int(rows[0][0]) > int(expected.split()[0]) >= 4096


# Queues.


def test_queue_puts_and_gets_lines(tmp_path: Path, run: Run) -> None:
    place = tmp_path / "jobs"
    put = subprocess.run([*COMMAND, "queue", "put", place], input=b"one\ntwo\nthree\n", capture_output=True, check=True)
    assert put.stderr == b"put 3 entries\n"
    got = subprocess.run([*COMMAND, "queue", "get", place, "--limit", "2"], capture_output=True, check=True)
    assert got.stdout == b"one\ntwo\n"
    with subprocess.Popen([*COMMAND, "queue", "get", place, "--follow", "--limit", "2"], stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == b"three\n"
        with queue.open(place) as jobs:
            jobs.put(b"four")
        assert waiting.stdout.read() == b"four\n"
    run("queue", "get", place, "--follow", "--timeout", "0")


def test_queue_refuses_a_line_that_is_too_long(tmp_path: Path, run: Run) -> None:
    done = subprocess.run([*COMMAND, "queue", "put", tmp_path / "q"], input=bytes(70000), capture_output=True, check=False)
    assert done.returncode == 2 and b"line 1 is longer than" in done.stderr


# The end of the output, and mistakes.


@pytest.mark.parametrize("arguments", [["tail", "-f", "events"], ["queue", "get", "--follow", "jobs"]])
def test_a_command_that_waits_ends_when_the_reader_of_its_output_does(events: Path, arguments: list[str]) -> None:
    """The log gets no further record: only the closed pipe tells."""
    with queue.create(events.parent / "jobs") as jobs:
        jobs.put(b"a job")
        with subprocess.Popen([*COMMAND, *arguments], cwd=events.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
            assert waiting.stdout is not None and waiting.stderr is not None
            assert waiting.stdout.readline()
            waiting.stdout.close()
            assert waiting.wait(60) == 0
            assert waiting.stderr.read() == b""


def test_a_table_off_a_terminal_is_plain_columns(events: Path, run: Run) -> None:
    with kvspool.open(events) as log:
        log.reader("one").close()
    header, row = run("readers", events).out.splitlines()
    assert header.split()[0] == "reader" and row.split()[0] == "one"
    assert header.isascii() and row.isascii()


def test_colour_can_be_forced(events: Path, run: Run) -> None:
    assert "\x1b[" in run("tail", events, "-n", "1", "--color", "always").out
    assert "\x1b[" not in run("tail", events, "-n", "1").out


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        (["--start", "7"], [7, 8, 9]),
        (["--start", "2", "--limit", "2"], [2, 3]),
        (["--follow", "--start", "2", "--limit", "2"], [2, 3]),
        (["--start", "2026-01-31T12:08:00Z"], [8, 9]),
        (["--last", "3", "--limit", "1"], [7]),
        (["--follow", "--last", "3", "--limit", "2", "--key", "a"], [4, 6]),
        (["--limit", "0"], []),
    ],
)
def test_tail_has_the_start_and_the_limit_of_other_commands(events: Path, words: list[str], sequences: list[int], run: Run) -> None:
    assert [one["sequence"] for one in run("tail", events, "--json", *words).objects] == sequences
