"""Commands that find records and logs: ranges, filters, `get`, `ls`, `du`; and what the command says about mistakes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import kvspool
import shard
from kvspool import Record, queue
from kvspool.cli import main, options, words
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
def sequences(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[int]]:
    """Run a command with --json, and return the sequences that it printed."""

    def run(*arguments: object) -> list[int]:
        assert main([*map(str, arguments), "--json"]) == 0
        return [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()]

    return run


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


def test_export_and_copy_have_the_same_range(events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    span = ["--start", "2026-01-31T12:02:00Z", "--end", "2026-01-31T12:06:00Z", "--limit", "3"]
    assert main(["export", str(events), *span]) == 0
    assert [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()] == [2, 3, 4]
    assert main(["copy", str(events), str(tmp_path / "part"), "--format", "kvj", *span]) == 0
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
    if condition == "print":  # a field that no record has
        assert not Where(condition).matches(RECORD)
        return
    with pytest.raises(ValueError):
        Where(condition)


def test_a_condition_reaches_no_attribute_of_an_object() -> None:
    assert not Where("data.__class__").matches(RECORD)
    assert not Where("key.__class__ or time.tzinfo or sequence.real").matches(RECORD)


# One record, and all logs.


def test_get_prints_records_by_their_sequences(
    events: Path, sequences: Callable[..., list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sequences("get", events, 4, 2) == [4, 2]
    assert main(["get", str(events), "3", "--values"]) == 0
    assert capsys.readouterr().out == '{"n":3,"user":{"id":0}}\n'
    assert main(["get", str(events), "10"]) == 2
    assert "10" in capsys.readouterr().err


def test_get_says_that_a_record_was_overwritten(log: kvspool.Spool, capsys: pytest.CaptureFixture[str]) -> None:
    log.append_many([bytes(500)] * 20)
    assert main(["get", str(log.path), "0"]) == 7
    captured = capsys.readouterr()
    assert "overrun" in captured.err and not captured.out


def test_a_log_of_several_logs_has_no_sequence_to_select(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shard.cli
    from kvspool.cli import plugins

    shard.create(tmp_path / "set", prefix="", bits=1).close()
    monkeypatch.setattr(plugins, "load", lambda: [shard.cli])
    for arguments in (["get", "1"], ["read", "--start", "1"], ["read", "--end", "1"]):
        assert main([arguments[0], str(tmp_path / "set"), *arguments[1:]]) == 2
    assert main(["read", str(tmp_path / "set"), "--start", "-5m"]) == 0


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


def test_ls_lists_all_logs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(place), "--json"]) == 0
    found = {Path(one["path"]).relative_to(place): one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {str(path): (one["kind"], one["records"]) for path, one in found.items()} == {
        "a": ("spool", 0),
        "bad": ("?", None),
        "below/b": ("kvj", 3),
        "q": ("qewqew", 1),
        **{f"set/{path.name}": ("kvj", 0) for path in (place / "set").iterdir()},
    }
    assert found[Path("bad")]["problem"]
    assert main(["ls", str(place)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split("\t")[1:3] == ["spool", "0"]


def test_ls_on_a_terminal_is_a_tree(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvspool.cli.output.is_terminal", lambda: True)
    assert main(["ls", str(place)]) == 0
    shown = capsys.readouterr().out
    assert "├── below" in shown and "│   └── b  kvj: 3 records" in shown and "empty" not in shown


def test_du_shows_the_bytes_on_disk(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["du", str(place / "a"), str(place / "below")]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [Path(path).name for _, path in rows] == ["a", "b"]
    expected = subprocess.run(["du", "-s", "-B1", place / "a" / "spool.dat"], capture_output=True, check=True, text=True).stdout
    assert int(rows[0][0]) > int(expected.split()[0]) >= 4096
    assert main(["du", str(place / "nothing")]) == 3


# Queues.


def test_queue_puts_and_gets_lines(tmp_path: Path) -> None:
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
    assert main(["queue", "get", str(place), "--follow", "--timeout", "0"]) == 0


def test_queue_refuses_a_line_that_is_too_long(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "queue", "put", tmp_path / "q"], input=bytes(70000), capture_output=True, check=False)
    assert done.returncode == 2 and b"line 1 is longer than" in done.stderr
    assert main(["queue"]) == 2


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tial", "x"], "there is no command tial; did you mean tail?"),
        (["nonsense"], "there is no command nonsense; kvspool --help lists all"),
        (["tail", "x", "--folow"], "kvspool tail: error: unknown argument: --folow; did you mean --follow?"),
        (["create", "x", "--codec", "jsn"], "--codec is json, msgpack or keyed, not 'jsn'; did you mean json?"),
        (["create", "x", "--capacty=1", "y"], "unknown arguments: --capacty=1; did you mean --capacity?, y"),
        (["queue", "pat", "x"], "there is no command pat; did you mean put?"),
        (["tail", "x", "--where", "data.n = 1"], "argument --where: 'data.n = 1' is no condition"),
        (["tail", "x", "--since", "10"], "an age has a unit, as 30s, 10m, 12h or 7d, not '10'"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_errors_are_in_the_words_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each phrase of the library is replaced in the error that it is from; none of the results names a function or a parameter."""
    kvspool.create(tmp_path / "log", capacity=4096).close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    kvspool.create(tmp_path / "journal", format="kvj").close()
    with queue.create(tmp_path / "q") as jobs:
        jobs.put(b"x")
        for line, said in (
            ("read nothing", "`kvspool create` makes a log"),
            ("queue get nothing", "`kvspool queue put` makes one"),
            ("create log", "exists already; choose another path"),
            ("create full --format kvj", "choose another path"),
            ("create log --exist-ok --capacity 1MiB", "Choose another path, or leave out"),
            ("verify --help", "kvspool verify"),
            ("trim q --max-bytes 1", "see `kvspool queue`"),
        ):
            name, *rest = line.split()
            at = [str(tmp_path / word) if word in ("nothing", "log", "full", "q") else word for word in rest]
            main([name, *at])
            captured = capsys.readouterr()
            assert said in captured.err + captured.out, line
            assert "kvspool.create" not in captured.err and "kvspool.open" not in captured.err


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("x exists already; hub.open opens it", "x exists already; choose another path"),
        ("x exists already; kvspool.queue.open opens a queue", "x exists already; choose another path"),
        ("x does not exist; hub.create makes a hub root", "x does not exist; `kvspool hub serve` makes a hub root"),
        (
            "set; shard.open opens it already; shard.open opens it",
            "set; shard.open opens it already; choose another path or prefix, or pass --exist-ok",
        ),
        ("choose another one, or lossy=True (--lossy)", "choose another one, or --lossy"),
        ("append=True (--append) copies after them", "--append copies after them"),
        ("or pass allow_unsafe_fs=True if you know", "or pass --allow-unsafe-fs if you know"),
        ('use a journal (format="kvj"), or ext4', "use a journal (--format kvj), or ext4"),
        ("kvspool.repair writes all of it", "`kvspool repair` writes all of it"),
        ("kvspool.copy copies it to another one", "`kvspool copy` copies it to another one"),
        ("x is one log, not a hub root; kvspool.open opens it", "x is one log, not a hub root"),
        ("give them as options, or create a journal with kvspool.create", "`kvspool create` makes a journal"),
        (
            "x holds shards: open one shard set in it with shard.open, or all of them with hub.open",
            "x holds shards: give the path of one of them, or see `kvspool shard`",
        ),
    ],
)
def test_a_phrase_of_the_library_becomes_one_of_the_command(message: str, said: str) -> None:
    assert words.of_command(message) == said


def test_a_table_off_a_terminal_is_plain_columns(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvspool.open(events) as log:
        log.reader("one").close()
    assert main(["readers", str(events)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "reader" and row.split()[0] == "one"
    assert header.isascii() and row.isascii()


def test_colour_can_be_forced(events: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", str(events), "-n", "1", "--color", "always"]) == 0
    assert "\x1b[" in capsys.readouterr().out
    assert main(["tail", str(events), "-n", "1"]) == 0
    assert "\x1b[" not in capsys.readouterr().out
