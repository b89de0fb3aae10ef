"""Programs of users pass `mypy --strict` and pyright: one for any kind of log, the examples, and the Python lines of the pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GIVEN = {
    "database": "import sqlite3, typing; database: sqlite3.Connection = typing.cast(typing.Any, None)",
    "deltalake": "import deltalake",
    "df": "from typing import Any; df: Any = None",
    "duckdb": "import duckdb",
    "fetch": "from typing import Any; fetch: Any = None",
    "handle": "from typing import Any; handle: Any = None",
    "hub": "import hub, hub.spark",
    "itertools": "import itertools",
    "kvspool": "import kvspool",
    "log": "import typing; from kvspool import Log; log: Log = typing.cast(typing.Any, None)",
    "mirror": "import typing; from kvspool.journal import Journal; mirror: Journal = typing.cast(typing.Any, None)",
    "pandas": "import pandas",
    "polars": "import polars",
    "pyarrow": "import pyarrow",
    "root": "import typing; from hub import HubRoot; root: HubRoot = typing.cast(typing.Any, None)",
    "render": "from typing import Any; render: Any = None",
    "results": "results: list[int] = []",
    "send": "from typing import Any; send: Any = None",
    "server": "from typing import Any; server: Any = None",
    "source": "import typing; from kvspool.spool import Spool; source: Spool = typing.cast(typing.Any, None)",
    "spark": "from typing import Any; spark: Any = None",
    "table": "import pyarrow, typing; table: pyarrow.Table = typing.cast(typing.Any, None)",
    "token": "token: str = ''",
    "window": "from typing import Any; window: Any = None",
    "RemoteHub": "from hub import RemoteHub",
    "Security": "from hub import Security",
}
"""Names that a page's lines use and other lines, or its text, have introduced."""

UNTYPED = ("frames", "tables")  # pages about packages whose types pyright doesn't know, or that say None too often
IGNORED = ("UnknownMemberType", "UnknownVariableType", "UnknownArgumentType", "MissingTypeStubs", "UnusedImport", "DuplicateImport")

CONFIG = """
[mypy]
strict = true
ignore_missing_imports = true

# Not under test here.
[mypy-duckdb.*,pandas.*,polars.*,pyarrow.*,pyspark.*]
follow_imports = skip
"""

CREATE = """
import kvspool

spool = kvspool.create("events", capacity="64MiB")
print(spool.capacity)
journal = kvspool.create("history", format="kvj", segment_bytes="128MiB")
print(journal.archive().segments)
"""

PROGRAM_ON_MANY_LOGS = """
import asyncio

import hub
import kvspool
import shard
from shard import Readable, Writable


def fill(log: Writable) -> None:
    log.append({"user": 7}, key="seven", type=1, timeout=2.5, durable=True)
    log.append_many([b"one", "two"], keys=["k", None], timeout=1)
    with log.writer(timeout=1) as writer:
        writer.append(b"one", key=b"k")
        writer.append_many([b"two"], keys=["k"])
    log.sync()


def look(log: Readable) -> None:
    for record in log.read("latest", limit=10, on_gap="skip", isolation="synced"):
        print(record.sequence, record.data)
    with log.follow(timeout=1, spin=0.001) as following:
        print(next(following).key, following.missed)
    print(len(log), log.path.name, [len(value) for value in log.read_values()], [one.time for one in log.last(3)], log.closed)


async def follow(log: Readable) -> None:
    async for record in log.follow_async(timeout=1):
        print(record.sequence)


with kvspool.open("log") as log, shard.open("set") as shards, hub.open("root") as root:
    for target in (log, shards):
        fill(target)
    for source in (log, shards, root):
        look(source)
        asyncio.run(follow(source))
    for one in shards.read({0: 7}):
        print(one.shard)
    for each in root.follow(timeout=1, spin=0.1):
        print(each.client)
    for item in root.read(on_gap="yield"):
        print(item.count if isinstance(item, kvspool.Gap) else item.client)
    with root.reader("r") as reader:
        print([each.client for each in reader.read()], reader.commit())
    print(shards.get(*shards.append(b"one")).shard, root.get("JFK", 0, 7).client, shards.capabilities)
"""


def programs() -> dict[str, str]:
    """Return the Python lines of the pages, each block with what it is given, and the programs of this test; by file name."""
    typed = (ROOT / "tests/contract/typed_program.py").read_text(encoding="utf-8")
    found = {"create": CREATE, "program": typed, "program_on_many_logs": PROGRAM_ON_MANY_LOGS}
    found |= {f"example_{path.stem}": path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            needed = [
                line for name, line in GIVEN.items() if re.search(rf"(?<![\w.\"']){name}\b(?!=)", block) and not _defines(block, name)
            ]
            found[f"{page.stem.lower().replace('-', '_')}_{number}"] = "\n".join([*needed, block])
    return found


def _defines(block: str, name: str) -> bool:
    """Return whether lines import a name, or assign it before they use it."""
    lines = re.findall(rf"^.*(?<![\w.\"']){name}\b(?!=).*$", block, re.MULTILINE)
    return bool(lines) and bool(re.match(rf"(import|from) .*\b{name}\b|{name}(, \w+)* = (?!.*\b{name}\b)|.* as {name}:", lines[0]))


def test_programs_of_users_pass_pyright(tmp_path: Path) -> None:
    """In the strict mode. Names of other packages without types may be unknown, and pieces of pages need no use for what they import."""
    pytest.importorskip("pyright")
    for name, lines in programs().items():
        if not name.startswith(UNTYPED):
            (tmp_path / f"{name}.py").write_text(lines, encoding="utf-8")
    rules = {f"report{rule}": False for rule in IGNORED}
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], **rules}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("0 errors"), done.stdout + done.stderr


def test_programs_of_users_pass_mypy(tmp_path: Path) -> None:
    for name, lines in programs().items():
        (tmp_path / f"{name}.py").write_text(lines, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path / 'cache'}", "."]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout.startswith("Success: no issues found"), done.stdout + done.stderr
