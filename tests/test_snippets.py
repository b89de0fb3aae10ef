"""The Python lines of pages run as they are printed, with short waits; other tests run those of the remaining pages.

`tests/test_operation.py` runs programs with a name. Pages about data frames, tasks, groups, logging, OpenTelemetry, clusters and Spark have
tests of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hub
import kvspool
import shard

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers are tested with the compiled twin")
ROOT = Path(__file__).resolve().parents[1]
Names = dict[str, Any]


class Row(NamedTuple):
    """A row of a user's source."""

    value: bytes
    key: bytes


def blocks(page: str) -> list[str]:
    """Return the blocks of Python of a page; waits of seconds are short."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [re.sub(r"timeout=\d", "timeout=0.05", block) for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Names]]:
    """Run a page's blocks in one namespace and an empty directory: `run(page, *numbers, **names)`; returns the names at the end."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def run_blocks(page: str, *numbers: int, **names: Any) -> Names:
            found = blocks(page)
            namespace: Names = {"kvspool": kvspool, "hub": hub, "__name__": "page", **names}
            for number in numbers or range(len(found)):
                exec(compile(found[number], f"{page}, block {number}", "exec"), namespace)
            for one in namespace.values():
                if isinstance(one, kvspool.Log | shard.ShardSet | hub.HubRoot):
                    stack.callback(one.close)
            return namespace

        yield run_blocks


def test_the_lines_of_the_readme(run: Callable[..., Names], capsys: pytest.CaptureFixture[str]) -> None:
    names = run("README.md", 0)
    assert names["table"].num_rows == len(names["log"]) == 5
    assert "{'user': 7, 'event': 'login'}" in capsys.readouterr().out


def test_the_lines_of_the_page_of_spools(run: Callable[..., Names]) -> None:
    names = run("docs/spool.md")
    assert names["table"].num_rows == len(names["log"]) == 1005


def test_the_lines_of_the_page_of_journals(run: Callable[..., Names], tmp_path: Path) -> None:
    with kvspool.create(tmp_path / "source") as source, kvspool.create(tmp_path / "mirror", format="kvj") as mirror:
        source.append_many([b"one", b"two"], keys=[b"k", None])
        names = run("docs/journals.md", table=pa.table({"value": [b"one", b"two"]}), source=source, mirror=mirror)
        assert [record.value for record in mirror.read()] == [b"one", b"two"]
    assert names["table"].num_rows == 3 and [one.name for one in names["log"].readers()] == ["billing"]


def test_the_lines_of_the_page_of_logs(run: Callable[..., Names], tmp_path: Path) -> None:
    kvspool.create(tmp_path / "events").close()
    names = run("docs/log.md")
    assert not (tmp_path / "events").exists() and not (tmp_path / "events.old").exists()
    with kvspool.create(tmp_path / "source") as source, kvspool.create(tmp_path / "target", format="fflg") as target:
        source.append(b"value", key=b"k")
        names["copy_newest"](source, target)
        assert [record.value for record in target.read()] == [b"value"]


def test_the_lines_of_the_page_of_shards(run: Callable[..., Names], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.create(tmp_path / "root").close()
    names = run("docs/shards.md")
    assert "JFK" in capsys.readouterr().out
    with kvspool.create(tmp_path / "target") as target:
        names["copy_newest"](names["shards"], target)
        assert [record.key for record in target.read()] == [b"N14228"]


def test_the_lines_of_the_page_of_producers(run: Callable[..., Names], tmp_path: Path) -> None:
    rows = [[Row(b"%d" % number, b"k")] * 2 for number in range(3)]

    class EndOfSource(Exception):
        pass

    def fetch(number: int) -> list[Row]:
        if number == len(rows):
            raise EndOfSource
        return rows[number]

    kvspool.create(tmp_path / "events").close()
    for _ in range(2):  # the second time from where the first has ended
        with pytest.raises(EndOfSource):
            run("docs/producers.md", fetch=fetch, itertools=itertools)
    with kvspool.open(tmp_path / "events") as log:
        assert len(log) == 6


def test_the_lines_of_the_page_of_queues(run: Callable[..., Names]) -> None:
    assert run("docs/queue.md")["queue"].path.name == "jobs"


def test_the_lines_of_the_page_of_asyncio(run: Callable[..., Names], capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(run("docs/asyncio.md", 0)["main"]())
    assert capsys.readouterr().out == "{'user': 7}\nb'one'\nb'two'\n"
    run("docs/asyncio.md", 1)
    assert capsys.readouterr().out == "{'user': 7}\nb'one'\nb'two'\nb'from a task'\nTrue\n"
    pytest.importorskip("trio")
    run("docs/asyncio.md", 2)
    assert capsys.readouterr().out == "{'user': 7}\nb'one'\nb'two'\nb'from a task'\n"


def test_the_lines_of_the_page_of_opentelemetry(run: Callable[..., Names], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)  # it can't be taken back
    names = run("docs/opentelemetry.md", 0)
    with names["provider"].get_tracer("page").start_as_current_span("span") as span:
        pass
    names["provider"].shutdown()
    with kvspool.open(tmp_path / "telemetry") as log:
        [record] = log.read()
        assert record.key == b"traces" and b"shop" in record.value
        log.delete_reader("otlp")
    kvspool.rename(tmp_path / "telemetry", tmp_path / "first")
    exporter = run("docs/opentelemetry.md", 1)["exporter"]
    exporter.export([span])
    exporter.shutdown()
    with kvspool.open(tmp_path / "telemetry") as log:
        assert len(log) == 1 and log.retention.by_consumers


def test_the_lines_of_the_pages_of_copies_and_archives(run: Callable[..., Names], tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    with kvspool.create(tmp_path / "events", format="kvj") as log:
        log.append_many([b"value"] * 10)
    assert run("docs/copy.md")["report"].records == 10
    assert run("docs/archives.md")["report"].bytes_after <= run("docs/archives.md")["report"].bytes_before


def test_the_lines_of_the_pages_of_a_hub(run: Callable[..., Names], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hub.security.access import Access
    from hub.server.server import HubServer
    from hub.web import page

    with hub.create(tmp_path / "flights") as root:
        with root.create_client("jfk", bits=0, format="kvj") as shards:
            shards.append_many([b"value"] * 2000)  # more than the position that the page commits
        assert run("docs/hub-readers.md", 0)["record"].sequence == 1999
        run("docs/hub-readers.md", 1, root=root)
        assert [one.name for one in root.readers()] == ["spark"]
    with HubServer(tmp_path / "flights", access=Access.anonymous(), listen=("127.0.0.1", 0), least_free=0) as server:
        own = hub.RemoteHub
        run("docs/hub-readers.md", 2, RemoteHub=lambda location, security: own(server.location), Security=hub.Security, token="kvs_")
        bind = page._bind
        monkeypatch.setattr(page, "_bind", lambda listen: bind((listen[0], 0)))  # at any free port
        assert run("docs/hub-page.md", server=server)["page"].address[1] > 0
