"""The programs in `examples/` run, and users' tests with the fixtures of `kvspool.testing` do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvspool

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The module examples/sse.py, for a log in a temporary directory."""
    pytest.importorskip("starlette")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
    sys.modules.pop("sse", None)
    import sse

    return sse


def test_a_browser_gets_the_records_after_its_last_event_and_then_new_ones(service, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The stream doesn't end, so the test reads the first events of it."""
    import asyncio

    import httpx

    async def run() -> None:
        async with service.lifespan(service.app):
            transport = httpx.ASGITransport(app=service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                for number in range(3):
                    answer = await client.post("/events", json={"n": number})
                    assert (answer.status_code, answer.json()) == (201, {"sequence": number})
            events = service.stream(service.app.state.log, 1)
            assert [await anext(events), await anext(events)] == ['id: 1\ndata: {"n": 1}\n\n', 'id: 2\ndata: {"n": 2}\n\n']
            waiting = asyncio.create_task(anext(events))
            await service.app.state.log.append({"n": 3})
            assert await waiting == 'id: 3\ndata: {"n": 3}\n\n'
            await events.aclose()

    asyncio.run(run())
    with kvspool.open(tmp_path / "events") as log:
        assert len(list(log.read())) == 4


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "explore.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5 and all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    program = "\n".join(cells)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_messages_and_spans_of_the_telemetry_example_reach_a_collector(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.instrumentation.logging")
    from otlp_server import OtlpServer

    from kvspool.otel.shipper import CollectorShipper

    command = [sys.executable, str(EXAMPLES / "telemetry.py")]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with OtlpServer() as server, CollectorShipper(tmp_path / "telemetry", server.endpoint) as shipper:
        shipper.run(until_empty=True)
    assert sorted(server.items) == ["bought apple", "bought pear", "buy", "buy", "buy", "plum is sold out"]


def test_the_fixtures_give_a_users_test_logs_in_memory(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    conftest, example = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_page.py").write_text(f"import kvspool\n{example}")
    (tmp_path / "test_user.py").write_text(
        "from pathlib import Path\n"
        "def test_one(kvspool_log, make_kvspool_log, kvspool_directory):\n"
        "    kvspool_log.append({'user': 7})\n"
        "    assert [record.data for record in kvspool_log.read()] == [{'user': 7}]\n"
        "    journal = make_kvspool_log(format='kvj')\n"
        "    assert journal.kind == 'kvj' and journal.path.parent == kvspool_directory\n"
        "    assert make_kvspool_log().path != journal.path\n"
        "    Path('place').write_text(str(kvspool_directory))\n"
    )
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
    place = (tmp_path / "place").read_text()
    assert not Path(place).exists()
    assert place.startswith("/dev/shm/") or not os.access("/dev/shm", os.W_OK)
