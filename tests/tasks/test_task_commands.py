"""The commands `kvspool tasks` and `kvspool work`."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hub
import kvspool
import shard
from kvspool import system
from kvspool.cli import main
from kvspool.tasks.stats import workers_of

KINDS = ("spool", "kvj", "set", "hub")


def made(path: Path, kind: str) -> Any:
    """Create a log, a shard set or a hub root; return the handle that appends."""
    if kind == "set":
        return shard.create(path, bits=1, capacity="1MiB")
    if kind == "hub":
        return hub.create(path).create_client("A", bits=1, format="kvj")
    return kvspool.create(path, **({"capacity": "1MiB"} if kind == "spool" else {"format": kind}))


def opened(path: Path, kind: str) -> Any:
    return {"set": shard.open, "hub": hub.open}.get(kind, kvspool.open)(path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_shows_lists_and_dead_letters_and_puts_them_back(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = made(tmp_path / "log", kind)
    for at in range(6):
        writer.append({"at": at}, key=b"%d" % at)
    path = str(tmp_path / "log")
    assert main(["tasks", path]) == 0
    assert "no task list" in capsys.readouterr().out
    with opened(tmp_path / "log", kind) as log, log.tasks("t") as worker:
        tasks: list[Any] = []
        while found := worker.take(10):
            tasks += found
        tasks[0].reject("bad\x1b[2J")
        worker.ack_many(tasks[1:3])
        assert main(["tasks", path, "t", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["taken"], report["dead"], len(report["workers"])) == (3, 1, 1)
        assert report["workers"][0]["tasks"] == 3
        assert main(["tasks", path]) == 0
        assert "t: 3 with 1 worker," in capsys.readouterr().out
    assert main(["tasks", path, "t", "--dead", "--json"]) == 0
    letter = json.loads(capsys.readouterr().out)
    assert (letter["tasks"], letter["deliveries"], letter["sequence"]) == ("t", 1, tasks[0].sequence)
    assert main(["tasks", path, "t", "--dead"]) == 0
    shown = capsys.readouterr().out
    assert "bad" in shown and "│" not in shown  # plain columns
    assert "\x1b" not in shown
    assert main(["tasks", path, "t", "--requeue"]) == 0
    assert "put 1 record of 't' back" in capsys.readouterr().out
    assert main(["tasks", path, "t", "--requeue"]) == 0
    assert "put 0 records" in capsys.readouterr().out
    with opened(tmp_path / "log", kind) as log, log.tasks("t") as worker:
        values = [(task.key, task.data) for task in worker.follow(timeout=0)]
        assert (tasks[0].key, tasks[0].data) in values
        assert len(values) == 4


def test_a_worker_of_several_shards_is_one_whatever_it_does_at_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shard.create(tmp_path / "set", bits=2, capacity="64KiB") as shards, shards.tasks("t"):
        states = itertools.cycle(("sleeping", "running", "disk sleep"))
        monkeypatch.setattr(type(system.port), "process_state", lambda port, pid: next(states))
        found = shards.task_stats()
        assert len({one.workers[0].process for one in found}) == 3
        assert len(workers_of(found)) == 1


def test_wrong_uses_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "log", "spool").close()
    path = str(tmp_path / "log")
    assert main(["tasks", path, "nothing"]) == 2
    assert main(["tasks", path, "--dead"]) == 2
    assert main(["work", path, "t"]) == 2
    kvspool.queue.ChunkQueue.create(tmp_path / "queue").close()
    assert main(["tasks", str(tmp_path / "queue")]) == 2
    assert main(["work", str(tmp_path / "queue"), "t", "--", "true"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("kind", KINDS)
def test_work_runs_a_command_for_each_record(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    writer = made(tmp_path / "log", kind)
    for at in range(8):
        writer.append(b"value %d" % at, key=b"key %d" % at)
    script = 'cat > "$OUT/$KVSPOOL_KEY"; echo " $KVSPOOL_SEQUENCE $KVSPOOL_SHARD $KVSPOOL_DELIVERIES" >> "$OUT/$KVSPOOL_KEY"'
    (tmp_path / "out").mkdir()
    os.environ["OUT"] = str(tmp_path / "out")
    command = ["work", str(tmp_path / "log"), "t", "--workers", "3", "--timeout", "0.5", "--json", "--", "sh", "-c", script]
    assert main(command) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["done"], summary["retried"], summary["dead"]) == (8, 0, 0)
    for at in range(8):
        assert (tmp_path / "out" / f"key {at}").read_text().startswith(f"value {at} ")
    with opened(tmp_path / "log", kind) as log:
        assert all(one.low == one.next for one in log.task_stats())


def test_a_command_that_fails_is_repeated_and_then_a_dead_letter_with_its_words(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with made(tmp_path / "log", "spool") as log:
        log.append_many([b"good", b"bad"])
        script = "read value; if [ $value = bad ]; then echo no way >&2; exit 7; fi"
        command = ["work", str(log.path), "t", "--timeout", "0.5", "--max-deliveries", "2", "--delay", "0.05", "--", "sh", "-c", script]
        assert main(command) == 0
        (letter,) = log.dead_letters("t")
        assert (letter.value, letter.deliveries, letter.error) == (b"bad", 2, "exit code 7: no way")
    assert b"1 done, 1 retried, 1 dead letter in" in capfdbinary.readouterr().out


def test_ctrl_c_ends_it_after_the_running_command(tmp_path: Path) -> None:
    with made(tmp_path / "log", "spool") as log:
        log.append_many([b"one", b"two", b"three"])
        script = f"touch {tmp_path}/begun; sleep 1; touch {tmp_path}/done-$KVSPOOL_SEQUENCE"
        command = [sys.executable, "-m", "kvspool.cli", "work", str(log.path), "t", "--", "sh", "-c", script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert b"1 done" in out
        assert b"ending after the running commands" in errors
        assert (tmp_path / "done-0").exists()
        assert not (tmp_path / "done-1").exists()
        assert log.task_stats()[0].low == 1


def test_a_killed_work_takes_its_commands_along(tmp_path: Path) -> None:
    with made(tmp_path / "log", "spool") as log:
        log.append_many([b"one", b"two"])
        script = f"sleep 1000 & echo $! > {tmp_path}/ids-$KVSPOOL_SEQUENCE; wait"  # with a child in its process group
        command = [sys.executable, "-m", "kvspool.cli", "work", str(log.path), "t", "--workers", "2", "--", "sh", "-c", script]
        process = subprocess.Popen(command)
        files = [tmp_path / "ids-0", tmp_path / "ids-1"]
        while not all(one.exists() and one.read_text().endswith("\n") for one in files):
            assert process.poll() is None
        while noted(process.pid) < 2:
            assert process.poll() is None
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while any(is_running(int(one.read_text())) for one in files):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with log.tasks("t") as worker:
            assert sorted(task.deliveries for _ in range(2) for task in worker.take(1)) == [2, 2]


def noted(pid: int) -> int:
    """Return how many commands the other process of a `kvspool work` knows: it has a descriptor for each."""
    children = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    count = 0
    for child in children:
        try:
            names = [os.readlink(file) for file in Path(f"/proc/{child}/fd").iterdir()]
        except FileNotFoundError:
            continue
        count += names.count("anon_inode:[pidfd]")
    return count


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
