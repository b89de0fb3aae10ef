"""The command `kvspool`: real processes for what only they show (signals, pipes, terminals), calls of `main` for the rest."""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from commands import Run

import kvspool
from kvspool import Gap, Record, Spool, system
from kvspool.cli import checks, lines, main, options, output, plugins, queues, stats, summary
from kvspool.engine import locks
from kvspool.engine import stats as engine_stats
from kvspool.kernel import frames
from kvspool.record import Codec
from kvspool.spool import format
from kvspool.system import filesystems

COMMAND = [sys.executable, "-m", "kvspool.cli"]
HOSTILE = "\x1b]0;owned\x07\r\n\x9b31m\u202eevil\x00"


def spawn(*arguments: object, given: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *map(str, arguments)], input=given, capture_output=True, check=False, **options)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Spool]:
    with kvspool.create(tmp_path / "log", capacity="64KiB") as made:
        yield made


pytestmark = pytest.mark.usefixtures("no_plugins")


def objects(text: str | bytes) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def damage(log: Spool, needle: bytes) -> None:
    """Change a byte of a value where it is stored."""
    with open(log.path / format.DATA_FILE, "r+b") as file:
        at = file.read().index(needle)
        file.seek(at)
        file.write(bytes([needle[0] ^ 1]))


# The command as a whole.


def test_installed_command_shows_its_version() -> None:
    command = Path(sys.executable).with_name("kvspool")
    if not command.exists():
        pytest.skip("the command is not installed")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"kvspool {kvspool.__version__}"


def test_help_names_every_command_and_exit_code(run: Run) -> None:
    shown = run("--help").out
    assert all(re.search(rf"^    {name} ", shown, re.M) for name in ("create", "append", "read", "tail", "readers", "stats", "doctor"))
    classes = [kvspool.KvspoolError]
    for found in classes:
        classes.extend(found.__subclasses__())
    assert all(re.search(rf"^  {code}  ", shown, re.M) for code in {0, 130, *(found.exit_code for found in classes)})


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, kvspool.cli; print(sorted({'rich.console', 'pyarrow', 'asyncio', 'pyspark'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_held_lock_is_6(log: Spool, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(queues, "open_log", functools.partial(kvspool.open, timeout=0))
    with locks.appending(log._live().append_lock, 0, lambda: "nobody"):
        run("append", log.path, code=6, given=b"x\n")
    assert list(log.read()) == []


def test_system_error_is_1_and_one_sentence(tmp_path: Path, run: Run) -> None:
    error = run("create", tmp_path / "no\x1b" / "log", code=1).err
    assert error.count("\n") == 1 and "create it first" in error and "\x1b" not in error


def test_full_disk_under_the_output_is_1(log: Spool) -> None:
    log.append("x")
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "read", log.path], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"No space left" in done.stderr and b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


def test_system_error_names_file_and_occasion(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        error = PermissionError(13, "Permission denied", "/some/file")
        error.add_note("while trying")
        raise error

    monkeypatch.setattr(kvspool, "open", fail)
    assert run("stats", "x", code=1).err == (
        "kvspool: Permission denied: /some/file; while trying; check the rights of the file and its directories, or run the command as "
        "their owner\n"
    )


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(kvspool, "open", fail)
    with pytest.raises(ZeroDivisionError):
        run("stats", "x")


# create


def test_create_makes_a_log(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "log"
    assert "1.0 MiB" in run("create", path, "--capacity", "1MiB", "--codec", "msgpack", "--mode", "640").out
    assert (path / format.DATA_FILE).stat().st_mode & 0o777 == 0o640
    with kvspool.open(path) as log:
        assert (log.stats().capacity, log.stats().codec) == (1 << 20, "msgpack")


def test_create_says_whether_the_log_was_there(tmp_path: Path, run: Run) -> None:
    for said in ("created", "opened"):
        assert run("create", tmp_path / "log", "--capacity", "4096", "--exist-ok").out.startswith(f"{said} {tmp_path / 'log'}: 4.0 KiB")


def test_create_as_json(tmp_path: Path, run: Run) -> None:
    made = run("create", tmp_path / "log", "--capacity", "4096", "--json").object
    assert made["capacity"] == 4096 and made["path"] == str(tmp_path / "log")


def test_create_on_an_unsafe_file_system_is_3_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(filesystems, "of", lambda path: "nfs4")
    path = str(tmp_path / "log")
    run("create", path, "--capacity", "4096", code=3)
    run("create", path, "--capacity", "4096", "--allow-unsafe-fs")


# append


def test_append_stores_lines_as_text(log: Spool) -> None:
    done = spawn("append", log.path, "--key", "k", "--type", 7, given=b"one\ntwo\n\nnot UTF-8 \xff\nlast")
    assert done.returncode == 0 and b"appended 5 records: sequences 0 to 4" in done.stderr and done.stdout == b""
    records = list(log.read())
    assert [record.data for record in records] == ["one", "two", "", b"not UTF-8 \xff", "last"]
    assert {(record.key, record.type) for record in records} == {(b"k", 7)}


def test_append_of_nothing(log: Spool, run: Run) -> None:
    assert run("append", log.path).err == "appended 0 records\n"


def test_append_json_lines_with_keys(log: Spool, run: Run) -> None:
    lines = b'{"u": "a", "n": 1}\n{"u": 2}\n{"u": null}\n{"u": [1, "x"]}\n'
    said = run("append", log.path, "--json-lines", "--key-field", "u", "--sync", "--json", given=lines).object
    assert said == {"appended": 4, "first_sequence": 0, "last_sequence": 3, "synced": True}
    assert [(record.key, record.data) for record in log.read()] == [
        (b"a", {"u": "a", "n": 1}),
        (b"2", {"u": 2}),
        (None, {"u": None}),
        (b'[1,"x"]', {"u": [1, "x"]}),
    ]
    assert log.stats().synced_sequence == 4


@pytest.mark.parametrize("bad", [b"{", b"", b"1 2", b'"\xff"', b"[" * 100_000, b'{"v": 1}', b"[]"])
def test_append_stops_at_a_bad_line(log: Spool, run: Run, bad: bytes) -> None:
    given = b'{"u":1}\n{"u":2}\n{"u":3}\n' + bad + b'\n{"u":5}\n'
    said, error = run("append", log.path, "--json-lines", "--key-field", "u", "--batch", "2", code=2, given=given).err.splitlines()
    assert said == "appended 2 records: sequences 0 to 1"
    assert "line 4 " in error
    assert [record.data for record in log.read()] == [{"u": 1}, {"u": 2}]


@pytest.mark.parametrize(("lines", "named"), [(b"x\n" + b"y" * 20_000 + b"\n", "lines 1 to 2"), (b"y" * 20_000, "line 1")])
def test_append_names_the_lines_that_the_log_refuses(log: Spool, lines: bytes, named: str, run: Run) -> None:
    assert f"{named}: a record of 20000 bytes" in run("append", log.path, code=2, given=lines).err
    assert list(log.read()) == []


def test_append_refuses_a_line_without_end(log: Spool) -> None:
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run([*COMMAND, "append", log.path], stdin=endless, capture_output=True, check=False)
    assert done.returncode == 2 and b"line 1 is longer than 64.0 KiB" in done.stderr


def test_append_without_standard_input_is_2(log: Spool, run: Run) -> None:
    run("append", log.path, code=2, given=None)


def test_append_does_not_wait_for_the_end_of_its_input(log: Spool) -> None:
    with subprocess.Popen([*COMMAND, "append", log.path], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        records = log.follow()
        for line in ("one", "two"):
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
            assert next(records).data == line
        process.stdin.write(b"three, not ended")
        process.stdin.flush()
        process.stdin.close()
        assert next(records).data == "three, not ended"
        records.close()
        assert b"appended 3 records" in process.stderr.read()
    assert process.returncode == 0


def test_interrupted_append_says_what_was_appended(log: Spool) -> None:
    with subprocess.Popen([*COMMAND, "append", log.path], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        with closing(log.follow(limit=1)) as records:
            assert next(records).data == "one"
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
    assert process.returncode == 130
    assert b"Traceback" not in error


def test_append_shows_progress_where_it_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(summary, "PATIENCE", 0)
    growing = summary.Summary(shows_progress=True)
    growing.add(range(0, 2))
    growing.add(range(5, 7))
    growing.print(Namespace(json=False, durable=True))
    assert "appended 4 records: sequences 0 to 6, with records of other writers in between, on disk" in capsys.readouterr().err


def test_line_reader_keeps_batches_small() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"a\nb\nc\nd")
        os.close(writing)
        batches = list(lines.LineReader(reading, most=2, longest=100).batches())
    finally:
        os.close(reading)
    assert [(batch.first, batch.lines) for batch in batches] == [(1, [b"a", b"b"]), (3, [b"c", b"d"])]


def test_line_reader_counts_bytes_too(tmp_path: Path) -> None:
    path = tmp_path / "input"
    line = b"x" * (lines.BATCH_BYTES // 2)
    path.write_bytes(b"\n".join([line] * 3))
    fd = os.open(path, os.O_RDONLY)
    try:
        batches = list(lines.LineReader(fd, most=1000, longest=len(line)).batches())
    finally:
        os.close(fd)
    assert [len(batch.lines) for batch in batches] == [2, 1]
    assert [line == each for batch in batches for each in batch.lines] == [True] * 3


# read


def test_read_prints_a_line_for_each_record(log: Spool, run: Run) -> None:
    log.append({"user": 7}, key=b"seven", type=3)
    log.append("text")
    log.append(b"\xff\x00", key=b"")
    first, second, third = run("read", log.path).out.splitlines()
    assert re.fullmatch(r'20\d\d-\d\d-\d\dT[\d:.]{15}Z  +0  type=3  seven  \{"user":7\}', first)
    assert second.endswith("       1  -  text")
    assert third.endswith("""       2  ""  b'\\xff\\x00'""")


def test_read_with_start_and_limit(log: Spool, run: Run) -> None:
    base = 1_700_000_000_000_000_000
    for number in range(10):
        log.append(str(number), timestamp=base + number * 1_000_000_000)

    def read(*arguments: str) -> list[str]:
        return run("read", log.path, "--values", *arguments).out.split()

    assert read("--start", "7") == ["7", "8", "9"]
    assert read("--start", "7", "--limit", "1") == ["7"]
    assert read("--start", "latest") == []
    assert read("--limit", "0") == []
    assert read("--start", "2023-11-14T22:13:28Z") == ["8", "9"]
    assert read("--start", "2023-11-14T22:13:28") == ["8", "9"]
    assert read("--start", "2023-11-15T00:13:28+02:00") == ["8", "9"]


def test_read_takes_the_time_that_it_prints(log: Spool, run: Run) -> None:
    for number in range(3):
        log.append(str(number), timestamp=1_700_000_000_000_001_999 + number * 1000)
    when = run("read", log.path).out.splitlines()[1].split()[0]
    assert run("read", log.path, "--start", when, "--values").out.split() == ["1", "2"]


def test_read_as_json_has_everything(log: Spool, run: Run) -> None:
    log.append({"a": [1, None]}, key=b"k", type=9, timestamp=1_700_000_000_123_456_789)
    log.append("text")
    log.append(b"bytes")
    log.append(b"\xff", key=b"\xfe")
    first, *others = run("read", log.path, "--json").objects
    assert first == {
        "sequence": 0,
        "timestamp": 1_700_000_000_123_456_789,
        "time": "2023-11-14T22:13:20.123456Z",
        "type": 9,
        "codec": "json",
        "key": "k",
        "value": {"a": [1, None]},
    }
    assert [(other["codec"], other["key"], other["value"]) for other in others] == [
        ("text", None, "text"),
        ("raw", None, "bytes"),
        ("raw", {"base64": "/g=="}, {"base64": "/w=="}),
    ]


def test_read_of_messagepack(tmp_path: Path, run: Run) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, codec="msgpack") as log:
        log.append({"a": 1, "b": b"\xff"})
        log.append(msgspec.msgpack.Ext(5, b"x"))
        plain = run("read", log.path).out.splitlines()
        first, second = run("read", log.path, "--json").objects
        stored = [record.value for record in log.read()]
    assert plain[0].endswith('{"a":1,"b":"/w=="}') and plain[1].endswith(repr(stored[1]))
    assert first["value"] == {"a": 1, "b": "/w=="}
    assert base64.b64decode(second["value"]["base64"]) == stored[1]


def test_read_of_values_returns_bytes(log: Spool, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log.append_many([b"\x1b\xff", "text"])
    assert main(["read", str(log.path), "--values"]) == 0
    assert capfdbinary.readouterr().out == b"\x1b\xff\ntext\n"


def test_read_cuts_long_values(log: Spool, run: Run) -> None:
    log.append("x" * 5000)
    assert run("read", log.path).out.endswith("x" * output.LONGEST + "… (4.9 KiB)\n")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_hostile_records_cannot_write_control_characters(log: Spool, form: list[str], run: Run) -> None:
    log.append(HOSTILE, key=HOSTILE.encode())
    log.append({HOSTILE: HOSTILE})
    log.append(HOSTILE.encode() + b"\xff")
    shown = run("read", log.path, *form).out
    assert len(shown.splitlines()) == shown.count("\n") == 3
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", shown)
    if form:
        assert objects(shown)[0]["value"] == HOSTILE and objects(shown)[1]["value"] == {HOSTILE: HOSTILE}


def test_undecodable_and_unknown_values_are_shown_as_bytes() -> None:
    broken = Record(0, 0, 0, None, b"{", Codec.JSON)
    unknown = Record(1, 0, 0, None, b"?", 77)
    assert output._members(broken)["value"] == {"base64": "ew=="}
    assert output._members(unknown)["codec"] == 77 and output._members(unknown)["value"] == {"base64": "Pw=="}
    assert output.parts(broken)[-1][0] == "{" and output.parts(unknown)[-1][0] == "?"


def test_path_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xe9"
    for command in (["create", "--capacity", "4096", "--json"], ["stats", "--json"], ["stats"]):
        done = subprocess.run([*COMMAND, command[0], path, *command[1:]], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        if "--json" in command:
            assert os.fsencode(json.loads(done.stdout)["path"]) == path


def overrun(log: Spool) -> None:
    """Append so much that the first records are gone."""
    for _ in range(20):
        log.append_many([b"x" * 1000] * 10)


def test_gap_is_shown_in_its_place(log: Spool, run: Run) -> None:
    overrun(log)
    first = log.stats().first_sequence
    gap, record = run("read", log.path, "--start", "0", "--json", "--limit", "1").objects
    assert gap == {"gap": {"first": 0, "last": first - 1, "reason": "overrun", "count": first, "path": str(log.path)}}
    assert record["sequence"] == first
    assert f"{first} records lost (overrun)" in run("read", log.path, "--start", "0", "--limit", "1").out.splitlines()[0]
    captured = run("read", log.path, "--start", "0", "--limit", "1", "--values")
    assert captured.out == "x" * 1000 + "\n" and "records lost" in captured.err


def test_gap_can_be_raised_or_skipped(log: Spool, run: Run) -> None:
    overrun(log)
    captured = run("read", log.path, "--start", "0", "--gaps", "raise", code=7)
    assert captured.out == "" and "records lost (overrun)" in captured.err
    assert all("sequence" in item for item in run("read", log.path, "--start", "0", "--gaps", "skip", "--json").objects)


def test_reader_that_had_enough_ends_the_command_quietly(log: Spool) -> None:
    for _ in range(5):
        log.append_many([b"x" * 400] * 30)
    command = [*COMMAND, "read", log.path, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, pipesize=4096) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"{"
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == 0
    assert b"Traceback" not in error and b"roken" not in error


def on_terminal(*arguments: object, **environment: str) -> bytes:
    """Return what a command writes to a terminal."""
    master, slave = os.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    try:
        subprocess.run(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=slave,
            check=True,
            env={**clean, "TERM": "xterm", "COLUMNS": "100", **environment},
        )
        return os.read(master, 1 << 16)
    finally:
        os.close(slave)
        os.close(master)


def test_colours_only_on_a_terminal(log: Spool) -> None:
    log.append(HOSTILE * 20, key=b"[bold]k[/bold]")
    plain = spawn("read", log.path).stdout
    assert b"\x1b" not in plain
    shown = on_terminal("read", log.path)
    assert b"\x1b[33m       0\x1b[0m" in shown and b"[bold]k[/bold]" in shown
    assert shown.count(b"\n") == 1  # cut to the width
    assert b"\x1b]" not in shown and "\x9b".encode() not in shown
    assert b"\x1b[33m" not in on_terminal("read", log.path, NO_COLOR="1")


def test_ascii_terminal_gets_escapes(log: Spool) -> None:
    log.append("é… \u4e2d")
    done = spawn("read", log.path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.endswith(b"\\xe9\\u2026 \\u4e2d\n")


# tail


def test_tail_prints_the_last_records(log: Spool, run: Run) -> None:
    def tail(*arguments: str) -> list[str]:
        return run("tail", log.path, "--values", *arguments).out.split()

    assert tail() == []
    log.append_many([str(number) for number in range(50)])
    assert tail() == [str(number) for number in range(40, 50)]
    assert tail("-n", "2") == ["48", "49"]
    assert tail("-n", "0") == []
    assert tail("-n", "100") == [str(number) for number in range(50)]


def test_tail_looks_further_back_where_records_were_lost(log: Spool, run: Run) -> None:
    log.append_many([b"value-%03d-" % number * 5 for number in range(50)])
    for number in range(41, 50):
        damage(log, b"value-%03d-" % number)
    first, second, third = run("tail", log.path, "-n", "3", "--json").objects
    assert (first["sequence"], second["sequence"]) == (39, 40)
    assert (third["gap"]["first"], third["gap"]["last"]) == (41, 49)
    assert [item["sequence"] for item in run("tail", log.path, "-n", "3", "--gaps", "skip", "--json").objects] == [39, 40]
    assert [item["sequence"] for item in run("tail", log.path, "-n", "3", "--gaps", "raise", "--json", code=7).objects] == [39, 40]


def test_tail_follows_until_the_timeout(log: Spool, run: Run) -> None:
    log.append_many(["a", "b", "c"])
    assert run("tail", log.path, "-n", "2", "-f", "--timeout", "0", "--values").out == "b\nc\n"
    assert run("tail", log.path, "-n", "0", "-f", "--timeout", "0", "--values").out == ""


def test_tail_follows_what_another_process_appends_until_interrupted(log: Spool) -> None:
    log.append("first")
    command = [*COMMAND, "tail", log.path, "-f", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["value"] == "first"
        assert spawn("append", log.path, given=b"second\nthird\n").returncode == 0
        assert [json.loads(process.stdout.readline())["value"] for _ in range(2)] == ["second", "third"]
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate()
    assert process.returncode == 130
    assert rest == b"" and b"Traceback" not in error and b"Interrupt" not in error


def test_tail_ends_quietly_when_its_pipe_is_closed(log: Spool) -> None:
    log.append("first")
    command = [*COMMAND, "tail", log.path, "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().endswith(b"first\n")
        process.stdout.close()
        log.append("second")
        error = process.stderr.read()
    assert process.returncode == 0
    assert b"Traceback" not in error and b"roken" not in error


# stats


def test_stats_as_table_and_as_json(log: Spool, run: Run) -> None:
    log.append_many([b"x" * 20] * 1200)
    shown = run("stats", log.path).out
    assert "64.0 KiB" in shown and "1,200" in shown and "s ago" in shown and " %" in shown and str(log.path) in shown
    shown, expected = run("stats", log.path, "--json").object, msgspec.to_builtins(log.stats())
    assert not expected.pop("segments") and not expected.pop("readers")  # of journals
    assert shown.pop("rates").keys() == expected.pop("rates").keys()  # they change with the time
    assert shown == expected


def test_json_has_only_the_fields_of_the_kind(log: Spool, tmp_path: Path, run: Run) -> None:
    with log.reader("mail") as reader:
        reader.commit()
    created = run("create", tmp_path / "journal", "--format", "kvj", "--json").object
    found = {}
    for path in (log.path, tmp_path / "journal"):
        found[path.name] = run("stats", path, "--json").object.keys()
    assert found["journal"] == created.keys() >= {"segments", "readers", "log_id"}
    assert found[log.path.name] - found["journal"] == set(engine_stats._OF_SPOOLS)
    assert found["journal"] - found[log.path.name] == {"segments", "readers"}  # a spool's readers are shown by `kvspool readers`


def test_stats_of_an_empty_log(log: Spool, run: Run) -> None:
    assert re.search(r"^first timestamp +- *$", run("stats", log.path).out, re.M)


@pytest.mark.parametrize(
    ("seconds", "words"), [(-9, "in the future"), (1, "1 s ago"), (300, "5 min ago"), (7200, "2 h ago"), (200_000, "2 days ago")]
)
def test_ages(seconds: float, words: str) -> None:
    assert stats._age(seconds) == words


# doctor


def test_doctor_of_a_sound_log(log: Spool, run: Run) -> None:
    log.append_many(["x"] * 1500)
    found = run("doctor", log.path, "--json").object
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert found["ok"] is True
    assert states["locks"] == states["wake-ups"] == states["records"] == states["machine"] == "ok"
    assert all(check["advice"] for check in found["checks"] if check["state"] != "ok")
    assert sorted(os.listdir(log.path)) == sorted([format.CONTROL_FILE, format.DATA_FILE])


def test_doctor_finds_damage(log: Spool, run: Run) -> None:
    log.append_many([b"value-%03d" % number for number in range(50)])
    damage(log, b"value-010")
    shown = run("doctor", log.path, code=1).out
    assert "1 records don't match their checksums" in shown and "49 read" in shown and "1 failed" in shown


def test_doctor_without_a_path() -> None:
    done = spawn("doctor", "--json", env={**os.environ, "KVSPOOL_NO_EXTENSIONS": "1"})
    assert done.returncode == 0, done.stdout
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert states["frame loops"] == "warn" and "records" not in states


def test_doctor_of_places_without_a_log(tmp_path: Path, log: Spool, run: Run) -> None:
    assert "neither a log" in run("doctor", tmp_path).out
    assert "does not exist" in run("doctor", tmp_path / "not" / "there").out
    (tmp_path / "file").touch()
    run("doctor", tmp_path / "file", code=1)
    os.truncate(log.path / format.CONTROL_FILE, 100)
    run("doctor", log.path, code=1)


def test_doctor_finds_an_unsafe_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(filesystems, "of", lambda path: "nfs4")
    run("doctor", tmp_path, code=1)


@pytest.mark.parametrize(("mode", "state"), [(0o777, "warn"), (0o702, "warn"), (0o1777, "ok"), (0o775, "ok"), (0o700, "ok")])
def test_doctor_says_where_anybody_may_write(tmp_path: Path, mode: int, state: str) -> None:
    tmp_path.chmod(mode)
    (found,) = [check for check in checks.of_place(tmp_path) if check.name == "rights"]
    assert found.state == state
    assert state == "ok" or (f"mode {mode:o}" in found.found and found.advice == f"chmod o-w {tmp_path}")


def test_doctor_warns_of_a_file_system_that_copies_on_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(filesystems, "of", lambda path: "btrfs")
    (found,) = [check for check in run("doctor", tmp_path, "--json").object["checks"] if check["name"] == "file system"]
    assert found["state"] == "warn" and "both are refused there" in found["found"] and "use a journal" in found["advice"]
    monkeypatch.setattr(filesystems, "of", lambda path: "zfs")
    (found,) = [check for check in run("doctor", tmp_path, "--json").object["checks"] if check["name"] == "file system"]
    assert found["state"] == "warn" and "disk is full" in found["found"]


def test_doctor_finds_locks_that_do_not_exclude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    class Open(system.Port):
        def try_lock(self, fd: int, at: int) -> bool:
            return True

    with system.replaced(Open()):
        run("doctor", tmp_path, code=1)


def test_doctor_finds_locks_and_wakeups_that_are_refused(tmp_path: Path) -> None:
    class Refusing(system.Port):
        def try_lock(self, fd: int, at: int) -> bool:
            raise OSError(22, "Invalid argument")

        def inotify(self) -> Any:
            raise OSError(38, "Function not implemented")

    with system.replaced(Refusing()):
        states = {check.name: check.state for check in checks.of_place(tmp_path)}
    assert states["locks"] == states["wake-ups"] == "fail"


def test_doctor_finds_too_few_or_silent_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted(system.Port):
        def inotify(self) -> Any:
            raise OSError(24, "Too many open files")

    class Silent(system.Port):
        def wait_readable(self, fd: int, timeout: float) -> bool:
            return False

    monkeypatch.setattr(checks, "WAIT", 0.001)
    for port in (Exhausted(), Silent()):
        with system.replaced(port):
            states = {check.name: check.state for check in checks.of_place(tmp_path)}
        assert states["wake-ups"] == "warn"


def test_doctor_warns_of_a_bare_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Any:
        raise FileNotFoundError

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.sys, "version_info", (3, 99, 0))
    monkeypatch.setattr(checks.shutil, "disk_usage", absent)
    monkeypatch.setattr(checks.metadata, "version", unknown)
    monkeypatch.setattr(checks, "_setting", lambda name: None)
    monkeypatch.setattr(frames, "TWIN", "interpreted")
    monkeypatch.delenv("KVSPOOL_NO_EXTENSIONS", raising=False)
    found = list(checks.of_host())
    warned = {check.name for check in found if check.state == "warn"}
    assert warned >= {"Python", "frame loops", "/dev/shm", "write-back", "pyarrow", "pyspark", "inotify max_user_watches"}
    assert all(check.advice for check in found if check.state != "ok")


def test_doctor_warns_of_low_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_setting", lambda name: 0)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: (1000, 900, 100))
    found = [*checks.of_host(), *checks.of_place(tmp_path)]
    warned = {check.name for check in found if check.state == "warn"}
    assert warned >= {"/dev/shm", "write-back", "free space", "inotify max_user_instances"}


def test_doctor_tells_what_happened_to_records(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def stats(self) -> Any:
            return [type("Stats", (), {"path": "p", "sync_error": 5})()]

        def read(self, **_: Any) -> Iterator[Any]:
            return iter([Gap(0, 4, "overrun"), Gap(5, 9, "machine restart"), Record(10, 0, 0, None, b"")])

        def close(self) -> None:
            pass

    monkeypatch.setattr(kvspool, "open", lambda path: Lost())
    found = {check.name: check.state for check in checks.of_log(Path("p"))}
    assert found == {"disk": "fail", "records": "ok", "overrun": "warn", "machine restart": "warn"}


# Plugins.


class ShardRecord(Record, frozen=True, gc=False):
    shard: int = 0
    client: bytes = b""


class ShardStats(msgspec.Struct, frozen=True):
    path: str
    shard: int
    records: int
    size_bytes: int
    last_timestamp: int


class ManyLogs:
    """A log of several logs, as packages above bring it."""

    start = 1_700_000_000_000_000_000

    def __init__(self, count: int = 30) -> None:
        self.items = [
            ShardRecord(number // 2, self.start + number * 60_000_000_000, 0, b"k", b"v%d" % number, 0, number % 2, b"c\x1b")
            for number in range(count)
        ]

    def read(self, start: Any = "earliest", *, limit: int | None = None, on_gap: str = "raise") -> Iterator[Any]:
        earliest = start == "earliest"
        return iter([item for item in self.items if earliest or (start != "latest" and item.time >= start)][:limit])

    def follow(self, start: Any = "earliest", *, timeout: float | None = None, limit: int | None = None, on_gap: str = "raise") -> Any:
        yield from self.read(start, limit=limit, on_gap=on_gap)

    def stats(self) -> Any:
        return [ShardStats(f"/x/a.1.00{shard}", shard, 1500, 2048, self.items[-1].timestamp if self.items else 0) for shard in (0, 1)]

    def close(self) -> None:
        pass


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a module with the given members as the only plugin."""

    def install(**members: Any) -> None:
        module = ModuleType("some_plugin")
        vars(module).update({"add_commands": lambda subparsers: None, **members})
        monkeypatch.setitem(sys.modules, "some_plugin", module)
        entry_point = metadata.EntryPoint("some", "some_plugin", plugins.GROUP)
        monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [entry_point])

    return install


def test_plugin_adds_commands(plug_in: Callable[..., None], run: Run) -> None:
    def add_commands(subparsers: Any) -> None:
        subparsers.add_parser("gather", help="gather them").set_defaults(run=lambda arguments: 42)

    plug_in(add_commands=add_commands)
    run("gather", code=42)
    assert "gather them" in run("--help").out


def test_plugin_opens_its_logs(plug_in: Callable[..., None], tmp_path: Path, run: Run) -> None:
    plug_in(open_log=lambda path: ManyLogs() if path == tmp_path else None)
    second = run("read", tmp_path, "--limit", "2").out.splitlines()[1]
    assert second.endswith(" 0  shard=1  client=c\\x1b  k  v1")
    record = run("read", tmp_path, "--limit", "1", "--json").object
    assert (record["shard"], record["client"], record["value"]) == (0, "c\x1b", "v0")
    assert [one["shard"] for one in run("stats", tmp_path, "--json").object] == [0, 1]
    shown = run("stats", tmp_path).out
    assert "a.1.001" in shown and "1,500" in shown and "2.0 KiB" in shown
    run("stats", tmp_path / "..", code=4)


def test_tail_of_several_logs_goes_back_in_time(plug_in: Callable[..., None], tmp_path: Path, run: Run) -> None:
    count = 30
    plug_in(open_log=lambda path: ManyLogs(count))

    def tail(*arguments: str) -> list[str]:
        return run("tail", tmp_path, "--values", *arguments).out.split()

    assert tail("-n", "3") == tail("-n", "3", "-f") == ["v27", "v28", "v29"]
    assert len(tail("-n", "1000")) == len(tail("-n", "1000", "-f")) == 30
    assert tail("-n", "0", "-f") == []
    count = 0
    assert tail() == tail("-f") == []


@pytest.mark.parametrize("refusal", [kvspool.errors.NotALog("not mine"), ZeroDivisionError("two\nlines")])
def test_plugin_that_cannot_open_leaves_the_first_error(plug_in: Callable[..., None], tmp_path: Path, run: Run, refusal: Exception) -> None:
    def open_log(path: Path) -> None:
        raise refusal

    plug_in(open_log=open_log)
    *warnings, error = run("stats", tmp_path, code=4).err.splitlines()
    assert "neither a log" in error
    assert len(warnings) == isinstance(refusal, ZeroDivisionError)


def test_damage_of_a_plugins_log_is_reported(plug_in: Callable[..., None], tmp_path: Path, run: Run) -> None:
    def open_log(path: Path) -> None:
        raise kvspool.errors.Corruption("broken")

    plug_in(open_log=open_log)
    run("stats", tmp_path, code=5)


def test_plugin_that_fails_to_add_commands_is_one_line(plug_in: Callable[..., None], log: Spool, run: Run) -> None:
    def add_commands(subparsers: Any) -> None:
        raise RuntimeError("broken\x1b\nfor ever")

    plug_in(add_commands=add_commands)
    shown = run("--help")
    assert shown.err == "kvspool: warning: the plugin some_plugin was left out: RuntimeError: broken\\x1b\n" and "append" in shown.out
    assert run("stats", log.path).err == "", "a command of kvspool's own, with one of its logs, needs no plugin"


def test_plugin_that_cannot_be_imported_does_not_break_the_command(log: Spool, tmp_path: Path) -> None:
    found = tmp_path / "broken-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nbroken = a_broken_plugin\n")
    (tmp_path / "a_broken_plugin.py").write_text("raise ImportError('it lacks something')\n")
    done = spawn("doctor", log.path, "--json", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and json.loads(done.stdout)
    assert b"kvspool: warning: the plugin broken was left out: ImportError: it lacks something\n" in done.stderr


def test_start_is_parsed() -> None:
    assert options.start("12") == 12
    when = options.start("2026-01-31T12:00:00+01:00")
    assert not isinstance(when, (int, str)) and when.utcoffset() == timedelta(hours=1)
