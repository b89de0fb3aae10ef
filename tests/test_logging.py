"""`kvspool.logging`: messages of the module logging and of structlog as records, and their lines in the command."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Run

import kvspool
from kvspool.logging import Handler, StructlogProcessor, message

pytestmark = pytest.mark.usefixtures("no_plugins")

KILLED = """
import logging, os, signal, sys
import kvspool.logging
logging.basicConfig(level="INFO", handlers=[kvspool.logging.Handler(sys.argv[1], capacity="1MiB")])
for number in range(100):
    logging.getLogger("worker").info("step %d", number, extra={"worker": int(sys.argv[2])})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def app(tmp_path: Path) -> Iterator[tuple[logging.Logger, Path]]:
    """A logger whose messages are in a log, and the path of the log."""
    logger = logging.Logger("app", logging.DEBUG)
    handler = Handler(tmp_path / "logs" / "app", capacity="256KiB")
    logger.addHandler(handler)
    yield logger, tmp_path / "logs" / "app"
    handler.close()


def records(path: Path) -> list[kvspool.Record]:
    with kvspool.open(path) as log:
        return list(log.read())


def test_a_message_is_a_record_with_its_fields(app: tuple[logging.Logger, Path]) -> None:
    logger, path = app
    before = time.time_ns()
    logger.warning("%d users", 7, extra={"user": {"id": 7}, "path": Path("/x")}, stack_info=True)
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
    first, second = records(path)
    assert (first.key, first.type) == (b"app", logging.WARNING) and abs(first.timestamp - before) < 60e9
    assert {name: first.data[name] for name in ("level", "logger", "message", "process", "function", "extra")} == {
        "level": "WARNING",
        "logger": "app",
        "message": "7 users",
        "process": os.getpid(),
        "function": "test_a_message_is_a_record_with_its_fields",
        "extra": {"user": {"id": 7}, "path": "/x"},
    }
    assert first.data["stack"].startswith("Stack (most recent call last)")
    assert second.data["level"] == "ERROR" and second.data["exception"].rstrip().endswith("ValueError: wrong")


def test_messages_of_killed_processes_are_all_there(tmp_path: Path) -> None:
    """Each process is killed by SIGKILL right after its last call of the logger."""
    path = tmp_path / "log"
    workers = [subprocess.Popen([sys.executable, "-c", KILLED, path, str(worker)]) for worker in range(3)]
    assert [worker.wait(60) for worker in workers] == [-signal.SIGKILL] * 3
    found = [record.data for record in records(path)]
    for worker in range(3):
        assert [one["message"] for one in found if one["extra"] == {"worker": worker}] == [f"step {number}" for number in range(100)]


def test_a_forked_child_logs_with_the_parents_handler(app: tuple[logging.Logger, Path]) -> None:
    logger, path = app
    logger.info("parent")
    child = os.fork()
    if child == 0:
        logger.info("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [(record.data["message"], record.data["process"]) for record in records(path)] == [("parent", os.getpid()), ("child", child)]


@pytest.mark.parametrize(
    ("text", "arguments", "shown"),
    [
        ("%d", ("no number",), "%d ('no number',) ("),
        ("%(name)s", ({"other": 1},), "%(name)s {'other': 1} ("),
        ("lone \ud800", (), "lone"),
        ("x" * 200_000, (), "... (200,000 characters)"),
    ],
)
def test_a_message_that_can_t_be_formatted_or_stored_whole_is_stored(
    app: tuple[logging.Logger, Path], text: str, arguments: tuple[Any, ...], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, path = app
    monkeypatch.setattr(message, "LONGEST", 10_000)
    logger.error(text, *arguments)
    (record,) = records(path)
    assert shown in record.data["message"]


def test_messages_of_a_level_are_on_disk_when_the_logger_returns(tmp_path: Path) -> None:
    handler = Handler(tmp_path / "log", durable="ERROR", format="kvj")
    logger = logging.Logger("app")
    logger.addHandler(handler)
    logger.warning("later")
    with kvspool.open(tmp_path / "log") as log:
        assert log.stats().synced_sequence == 0
        logger.error("now")
        assert log.stats().synced_sequence == 2
    handler.close()


def test_a_message_of_a_signal_handler_during_an_append_is_appended_with_the_next_one(
    app: tuple[logging.Logger, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, path = app
    logger.info("one")
    target = logger.handlers[0]._target  # type: ignore[attr-defined]
    real = target._append
    monkeypatch.setattr(target, "_append", lambda *_: (_ for _ in ()).throw(kvspool.errors.Reentered("in a signal handler")))
    logger.info("two")
    monkeypatch.setattr(target, "_append", real)
    logger.info("three")
    assert sorted(record.data["message"] for record in records(path)) == ["one", "three", "two"]


def test_a_log_that_can_t_be_opened_costs_the_message_and_not_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    logger = logging.Logger("app")
    logger.addHandler(Handler(tmp_path / "file" / "log"))
    logger.error("lost")
    assert "--- Logging error ---" in capsys.readouterr().err
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.error("lost")
    assert capsys.readouterr().err == ""


def test_a_closed_handler_opens_the_log_again(app: tuple[logging.Logger, Path]) -> None:
    logger, path = app
    logger.info("one")
    logger.handlers[0].close()
    logger.info("two")
    assert [record.data["message"] for record in records(path)] == ["one", "two"]


def test_an_event_of_structlog_is_a_record_and_is_passed_to_the_renderer(tmp_path: Path) -> None:
    structlog = pytest.importorskip("structlog")
    shown: list[Any] = []
    processor = StructlogProcessor(tmp_path / "log", durable="error")
    logger = structlog.wrap_logger(
        structlog.PrintLogger(),
        processors=[structlog.processors.add_log_level, processor, lambda _, __, event: shown.append(dict(event)) or "line"],
        wrapper_class=structlog.BoundLogger,
    ).bind(user=7)
    logger.info("login", path=Path("/x"))
    logger.error("failed", exception="Traceback")
    first, second = records(tmp_path / "log")
    assert first.data == {"level": "INFO", "logger": "", "message": "login", "process": os.getpid(), "extra": {"user": 7, "path": "/x"}}
    assert (second.type, second.data["exception"]) == (logging.ERROR, "Traceback")
    assert shown[0] == {"user": 7, "path": Path("/x"), "level": "info", "event": "login"}
    processor.close()


def test_tail_shows_messages_as_lines(app: tuple[logging.Logger, Path], run: Run) -> None:
    logger, path = app
    logger.info("started", extra={"port": 80, "host": "\x1b[31mevil"})
    try:
        raise ValueError("wrong\x1b")
    except ValueError:
        logger.exception("failed")
    with kvspool.open(path) as log:
        log.append(b"\xff", type=50)
        log.append({"no": "message"}, type=50)
    first, second, *further = run("tail", path, "--logs").out.splitlines()
    assert first.endswith(rf"INFO      app  started  port=80  host=\x1b[31mevil  [{os.getpid()}]")
    assert "ERROR     app  failed" in second and further[0] == "    Traceback (most recent call last):"
    assert any(line == "    ValueError: wrong\\x1b" for line in further) and '{"no":"message"}' in further[-1]
    shown = run("tail", path, "--logs", "--where", "type >= 40 and data.level == 'ERROR'", "--color", "always").out
    assert "\x1b[31mERROR" in shown and "started" not in shown


SERVER = """
import json, sys
import uvicorn
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})
if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_config=json.load(open("logging.json")), lifespan="off")
"""


@pytest.mark.parametrize("server", ["uvicorn", "gunicorn"])
def test_the_recipe_of_the_page_logs_the_requests_of_a_server(server: str, tmp_path: Path) -> None:
    """The configuration is the one in docs/logging.md; the server is killed right after its answer."""
    pytest.importorskip(server)
    import socket

    page = (Path(__file__).parents[1] / "docs" / "logging.md").read_text(encoding="utf-8")
    (tmp_path / "logging.json").write_text(page.partition(f"```json {server}\n")[2].partition("```")[0])
    (tmp_path / "app.py").write_text(
        SERVER if server == "uvicorn" else 'def app(environ, start):\n    start("200 OK", [])\n    return [b"hello"]\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = {
        "uvicorn": [sys.executable, "app.py", str(port)],
        "gunicorn": [sys.executable, "-m", "gunicorn", "-b", f"127.0.0.1:{port}", "--log-config-json", "logging.json", "app:app"],
    }[server]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as process:
        try:
            assert answer(port) == b"hello"
            logged = wait_for_access(tmp_path / "logs" / "web")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert "GET / HTTP/1.1" in logged["message"] and logged["level"] == "INFO"


def answer(port: int) -> bytes:
    """Return the server's answer, once it listens."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as response:
                return bytes(response.read())
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


def wait_for_access(path: Path) -> dict[str, Any]:
    """Return the message about the request, which servers log after their answer."""
    with kvspool.open(path) as log:
        for record in log.follow(timeout=30):
            if "GET /" in json.dumps(record.data):
                return dict(record.data)
    raise AssertionError("no message about the request")
