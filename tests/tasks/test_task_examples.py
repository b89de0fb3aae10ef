"""The examples in docs/tasks.md, run as they are printed."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import kvspool
from kvspool.tasks import layout

PAGES = Path(__file__).parents[2] / "docs"


def example(heading: str) -> str:
    """Return the first example after a heading of the page."""
    text = f"\n{(PAGES / 'tasks.md').read_text('utf-8')}".partition(f"\n{heading}\n")[2]
    return text.partition("```python\n")[2].partition("```")[0]


def test_the_first_example_acknowledges_and_retries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def render(data: Any) -> None:
        seen.append(data)
        if data == "end":
            raise KeyboardInterrupt
        if seen.count(data) < 3:
            raise RuntimeError(f"no {data}")

    with kvspool.create(tmp_path / "log") as log:
        log.append_many(["a", "end"])
        with pytest.raises(KeyboardInterrupt):
            exec(example("# Tasks"), {"log": log, "render": render})
    assert seen == ["a", "a", "a", "end"]
    assert sum("RuntimeError: no a" in one.message for one in caplog.records) == 2


def test_each_effect_in_sqlite_happens_once(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "sums.db", isolation_level=None)
    database.execute("CREATE TABLE done (sequence INTEGER PRIMARY KEY)")
    database.execute("CREATE TABLE sums (total INTEGER)")
    database.execute("INSERT INTO sums VALUES (0)")
    source = example("## Exactly once").replace("worker.follow()", "worker.follow(timeout=0)")
    with kvspool.create(tmp_path / "log") as log:
        log.append_many([b"%d" % at for at in range(10)])
        lost = source.replace("        task.ack()\n", "        pass\n")
        exec(lost, {"log": log, "database": database})
        exec(source, {"log": log, "database": database})
        assert log.task_stats()[0].low == 10
    assert database.execute("SELECT total FROM sums").fetchone() == (45,)
    database.close()


def test_the_pool_of_workers_handles_each_record_once(tmp_path: Path) -> None:
    import subprocess
    import sys

    with kvspool.create(tmp_path / "events") as log:
        log.append_many([b"%d" % at for at in range(100)])
    source = f"import os\nimport kvspool\n{example('## A pool of workers')}"
    # One write for a line: `print` makes two of it, if Python doesn't buffer, and other processes write between them.
    source = source.replace("results.append(int(task.value) ** 2)", "os.write(1, task.value + b'\\n')")
    (tmp_path / "pool.py").write_text(source)
    out = subprocess.run([sys.executable, "pool.py"], cwd=tmp_path, capture_output=True, check=True, timeout=60).stdout
    assert sorted(map(int, out.split())) == list(range(100))


def test_the_web_application_consumes_in_its_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sent: list[Any] = []

    async def send(data: Any) -> None:
        sent.append(data)

    names: dict[str, Any] = {"kvspool": kvspool, "send": send}
    exec(example("## asyncio and FastAPI"), names)

    async def application() -> None:
        with kvspool.create("events") as log:
            web = pytest.importorskip("starlette.applications").Starlette(lifespan=names["lifespan"])  # FastAPI's class is one of its kind
            async with web.router.lifespan_context(web):
                log.append("mail")
                for _ in range(200):
                    if sent:
                        break
                    await asyncio.sleep(0.05)

    asyncio.run(application())
    assert sent == ["mail"]


@pytest.mark.parametrize("record", [layout.HEADER, layout.WORKER, layout.LIST, layout.SLOT], ids=lambda one: one.record.__name__)
def test_the_page_has_the_table_of_each_layout(record: Any) -> None:
    assert record.table() in (PAGES / "formats" / "tasks.md").read_text("utf-8")


def test_the_example_header_of_the_page_is_what_is_written() -> None:
    page = (PAGES / "formats" / "tasks.md").read_text("utf-8")
    hexadecimal = re.findall(r"```hex\n(.*?)```", page, re.DOTALL)[0]
    header = layout.TaskHeader("t", 64, False, bytes(range(16)))
    assert bytes.fromhex(hexadecimal) == layout.pack_header(header)
    assert layout.parse_header(bytes.fromhex(hexadecimal)) == header
