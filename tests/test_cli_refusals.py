"""Wrong uses of the command: each ends with its code and one sentence in the words of the command, and changes no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Row, Run, table

import kvspool
from kvspool import queue
from kvspool.cli import words
from kvspool.spool import format

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a log of each kind, a queue, a truncated log, a file, and a directory with a file."""
    place = tmp_path_factory.mktemp("place")
    kvspool.create(place / "spool", capacity=4096).close()
    kvspool.create(place / "sej", format="sej").close()
    kvspool.create(place / "truncated", capacity=4096).close()
    os.truncate(place / "truncated" / format.DATA_FILE, 100)
    queue.create(place / "queue").close()
    (place / "full").mkdir()
    (place / "full" / "file").touch()
    return place


REFUSED = {
    # Words.
    "no command": ("", 2, "Commands:"),
    "a mistyped command": ("tial x", 2, "there is no command tial; did you mean tail?"),
    "an unknown command": ("nonsense", 2, "there is no command nonsense; kvspool --help lists all"),
    "a mistyped option": ("tail x --folow", 2, "kvspool tail: error: there is no option --folow; did you mean --follow?"),
    "a mistyped value": ("create x --codec jsn", 2, "--codec is json, msgpack or keyed, not 'jsn'; did you mean json?"),
    "a mistyped option, and a word too many": ("create x --capacty=1 y", 2, "there is no option --capacty; did you mean --capacity?"),
    "no command of queues": ("queue", 2, "put"),
    "a mistyped command of queues": ("queue pat x", 2, "there is no command pat; did you mean put?"),
    "a condition that is none": ("tail x --where 'data.n = 1'", 2, "argument --where: 'data.n = 1' is no condition"),
    "an age without a unit": ("tail x --since 10", 2, "an age has a unit, as 30s, 10m, 12h or 7d, not '10'"),
    # Values of options.
    "no path": ("create", 2, "PATH is missing"),
    "a capacity that is no size": ("create x --capacity many", 2, "--capacity"),
    "a capacity of nothing": ("create x --capacity 0", 2, "capacity"),
    "a mode that is not octal": ("create x --mode 9", 2, "--mode"),
    "a mode with rights that logs don't have": ("create x --mode 777", 2, "mode"),
    "an unknown codec": ("create x --codec pickle", 2, "--codec is json, msgpack or keyed"),
    "an unknown policy": ("create x --policy drop", 2, "--policy"),
    "an expiry of readers without a policy": ("create x --reader-expiry 5", 2, "expiry"),
    "an expiry of readers of nothing": ("create x --policy raise --reader-expiry 0", 2, "expiry"),
    "an interval of flushes without a durability": ("create x --sync-interval 1", 2, "interval"),
    "a type that is no byte": ("append x --type 256", 2, "--type"),
    "a batch of nothing": ("append x --batch 0", 2, "--batch"),
    "a key, and a field with keys": ("append x --key a --key-field b", 2, "--key-field"),
    "a field with keys of lines that are no JSON": ("append x --key-field b", 2, "--json-lines"),
    "a start that is no time": ("read x --start soon", 2, "--start"),
    "a start that is no number of 64 bits": (f"read x --start {'9' * 5000}", 2, "--start"),
    "a start before 1970": ("read x --start 1969-12-31", 2, "--start"),
    "a start after the last time": ("read x --start 9999-01-01", 2, "--start"),
    "a limit below zero": ("read x --limit -1", 2, "--limit"),
    "two forms": ("read x --json --values", 2, "--values"),
    "a timeout that is no number": ("tail x --timeout nan", 2, "--timeout"),
    "a timeout that is a word": ("tail x --timeout soon", 2, "--timeout"),
    "a count that is a word": ("tail x -n few", 2, "-n"),
    "an interval of a page of nothing": ("stats spool --watch --interval 0", 2, "--interval"),
    "a floor below zero": ("create x --format sej --floor=-1", 2, "floor"),
    "a floor that is a word": ("create x --format sej --floor=many", 2, "floor"),
    "a floor whose number is none": ("create x --format sej --floor=records:x", 2, "floor"),
    "a floor of an unknown unit": ("create x --format sej --floor=tons:3", 2, "floor"),
    "an empty floor": ("create x --format sej --floor=", 2, "floor"),
    # Options of another kind of log.
    "a capacity of a journal": ("create x --format sej --capacity 1MiB", 2, "--capacity is not an option of a journal"),
    "a policy of a journal": ("create x --format sej --policy block", 2, "--policy is not an option of a journal"),
    "segments of a spool": ("create x --segment-bytes 1MiB", 2, "--segment-bytes is not an option of a spool"),
    "retention of a spool": ("create x --max-age 3d", 2, "retention is for journals"),
    "a codec that a format doesn't have": ("create x --format sej --codec keyed", 2, "keyed"),
    "segments of nothing": ("create x --format sej --segment-bytes 0", 2, "1 to 9223372036854775807 bytes"),
    # Paths.
    "reading what doesn't exist": ("read nothing", 3, "does not exist; `kvspool create` makes a log"),
    "following what doesn't exist": ("tail nothing", 3, "does not exist"),
    "counting what doesn't exist": ("stats nothing", 3, "does not exist"),
    "appending to what doesn't exist": ("append nothing", 3, "does not exist"),
    "flushing what doesn't exist": ("sync nothing", 3, "does not exist"),
    "the size of what doesn't exist": ("du nothing", 3, "does not exist"),
    "a queue that doesn't exist": ("queue get nothing", 3, "`kvspool queue put` makes one"),
    "a directory that is no log": ("read full", 4, "neither a log"),
    "a file that is no log": ("stats /etc/passwd", 4, "/etc/passwd"),
    "a truncated log": ("stats truncated", 5, "truncated"),
    "creating a log again": ("create spool", 3, "exists already; choose another path"),
    "creating a log with other settings": ("create spool --exist-ok --capacity 1MiB", 3, "Choose another path, or leave out"),
    "creating a journal over files": ("create full --format kvj", 3, "choose another path"),
    "creating a log in no directory": ("create none/log", 1, "create it first"),
    # Operations that a kind of log doesn't have.
    "trimming a queue": ("trim queue --max-bytes 1", 4, "see `kvspool queue`"),
    "trimming a spool": ("trim spool --max-bytes 1", 2, "overwrites its oldest records"),
    "trimming by no rule": ("trim sej", 2, "--max-bytes"),
    "trimming after the end": ("trim sej --before 99", 2, "99"),
    "resizing a journal": ("resize sej 1MiB", 2, "is a journal, not a spool: it has no capacity; kvspool trim"),
    "salvaging a journal": ("salvage sej elsewhere", 2, "kvspool repair removes the damage"),
    "rates of a journal": ("stats sej --watch", 2, "which has no rates"),
    "slots of a journal": ("readers sej --delete-slot 1", 2, "no slots"),
    "producers of a queue": ("producers queue", 2, "producers belong to one spool or journal"),
    "deleting a reader that isn't there": ("readers spool --delete none", 2, "none"),
    "deleting a reader without a name": ("readers spool --delete ''", 2, "name"),
    "a log that isn't there": ("rm none", 3, "none does not exist; `kvspool ls` shows the logs of a directory"),
    "a directory that isn't there": ("ls none", 1, "none does not exist, or its directory doesn't; check the path"),
    "a size of nothing": ("du none", 3, "none does not exist; `kvspool ls` shows the logs of a directory"),
    "a reader that isn't there": ("readers spool --delete bob", 2, "has no durable reader 'bob'; `kvspool readers` lists them"),
    "a task list that isn't there": ("tasks spool bob", 2, "has no task list 'bob'; `kvspool tasks` lists them"),
    "a group that isn't there": ("group spool bob", 2, "has no group 'bob'; `kvspool group` lists them"),
    "no target": ("copy spool", 2, "kvspool copy: error: DST is missing; kvspool copy --help has examples"),
    "an option without its value": ("read x --key", 2, "--key needs a value; kvspool read --help has examples"),
    "two words too few": ("get", 2, "PATH and SEQUENCE are missing; kvspool get --help has examples"),
    "an option unlike any other, with a value": ("tail x --zzz 3", 2, "there is no option --zzz; kvspool tail --help lists all"),
    "two words too many": ("get x 1 --json y z", 2, "unknown arguments: y z; kvspool get --help has examples"),
    "an age in an unknown unit": ("read x --start -5x", 2, "a start is earliest, latest, a sequence, an age such as -5m"),
    "a directory as a queue": ("queue get .", 2, "is a directory, not a queue; if it is a log, see `kvspool append` and `kvspool read`"),
    "putting into a directory": ("queue put .", 2, "is a directory, not a queue"),
    "a value as a word": ("append spool x", 2, "unknown argument: x; append reads standard input: echo VALUE | kvspool append PATH"),
    "a value of a queue as a word": ("queue put queue x", 2, "queue put reads standard input: echo VALUE | kvspool queue put PATH"),
    "an unknown field": ("tail spool --where 'dat.n == 1'", 2, "there is no field dat; did you mean data?; a record has data, value, key"),
    "a comparison with =": ("tail spool --where 'key = 1'", 2, "is no condition: invalid syntax"),
    "a duration in an unknown unit": ("trim sej --max-age 3y", 2, "or a duration such as 30s, 10m, 12h or 7d, not '3y'"),
    "an age of segments in an unknown unit": ("archive sej --older-than 3y", 2, "argument --older-than: a number of seconds"),
    "one word of two": ("readers spool --set bob", 2, "--set needs NAME and START; kvspool readers --help has examples"),
    "the address of a hub": ("tail grpc://hub:7070", 2, "a path on this host, not 'grpc://hub:7070'; kvspool ship hub://"),
    "dead letters of a list that isn't there": ("tasks spool bob --dead", 2, "has no task list 'bob'; `kvspool tasks` lists them"),
    "putting back what isn't there": ("tasks spool bob --requeue", 2, "has no task list 'bob'; `kvspool tasks` lists them"),
    "forgetting a producer that isn't there": ("producers spool --forget p", 2, "has no producer 'p'; `kvspool producers` lists them"),
    "a reader of a journal that isn't there": ("readers sej --delete bob", 2, "has no reader 'bob'; `kvspool readers`, or of a hub root"),
    "a directory that holds no log": ("rm full", 4, "neither a log nor a directory of logs; `kvspool ls` shows the logs of a directory"),
    "man pages in a file": ("man /etc/passwd", 1, "/etc/passwd exists already; choose another path"),
    "man pages below a file": ("man /etc/passwd/x", 1, "a part of /etc/passwd/x is a file, not a directory; check the path"),
    "the directory as a file": ("import full spool", 1, "full is a directory; give a file"),
    "an import of other lines": ("import /etc/passwd spool", 2, "0 records were imported before; `kvspool export` writes such lines"),
    "no shell": ("completion", 2, "SHELL is missing"),
    "two starts": ("tail spool --start 1 --since 5m", 2, "argument --since: not allowed with argument --start"),
    "a sequence after the end": ("get spool 10", 2, "10"),
    "a start after the end": ("read spool --start 11", 2, "11"),
}


@table(REFUSED)
def test_a_wrong_use_ends_with_its_code_and_one_sentence_and_changes_no_file(place: Path, row: Row, run: Run) -> None:
    row.check_refusal(run, place)


@pytest.mark.parametrize("name", ["read", "append"])
def test_a_process_ends_with_the_code_too(tmp_path: Path, name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "kvspool.cli", name, tmp_path / "nothing"], input=b"", capture_output=True)
    assert done.returncode == 3
    assert b"does not exist" in done.stderr.splitlines()[-1] and b"Traceback" not in done.stderr


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
        (
            "x is one log, not a hub root; kvspool.open opens it",
            "x is one log, not a hub root; `kvspool stats` shows it, and `kvspool hub serve` makes a hub root",
        ),
        ("'w' is a task list of x: use tasks('w'), or delete it with delete_tasks", "'w' is a task list of x; `kvspool tasks` shows it"),
        ("Is a directory: x", "x is a directory; give a file"),
        (
            "Permission denied: x",
            "Permission denied: x; check the rights of the file and its directories, or run the command as their owner",
        ),
        ("No space left on device", "No space left on device; free some space on the disk"),
        ("give them as options, or create a journal with kvspool.create", "`kvspool create` makes a journal"),
        (
            "x holds shards: open one shard set in it with shard.open, or all of them with hub.open",
            "x holds shards: give the path of one of them, or see `kvspool shard`",
        ),
    ],
)
def test_a_phrase_of_the_library_becomes_one_of_the_command(message: str, said: str) -> None:
    assert words.of_command(message) == said
