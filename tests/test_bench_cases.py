"""Every case of `tools/bench` runs, with next to nothing to do, and yields rows with figures. The cases with Spark are tested apart."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))
CASES = importlib.import_module("cases.catalogue").CASES
sys.path.remove(str(TOOLS))
NAMES = [name for name in CASES if not name.startswith("spark-")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Run all cases in one process, and return what each has printed."""
    paths = os.pathsep.join([str(ROOT), str(TOOLS)])
    done = subprocess.run(
        [sys.executable, "-m", "cases", "--short", *NAMES],
        cwd=tmp_path_factory.mktemp("bench"), env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        lines[said["case"]].append(said)
    yield lines


@pytest.mark.parametrize("name", NAMES)
def test_a_case_measures_kvspool_and_its_floor(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    if left_out := [said["left_out"] for said in found[name] if "left_out" in said]:
        pytest.skip(left_out[0])
    rows = [said["row"] for said in found[name]]
    assert rows
    for row in rows:
        [[ours, floor]] = row["pairs"]
        assert math.isfinite(ours) and ours > 0, row
        assert (floor is None) == (row["peer"] == "")
        assert floor is None or math.isfinite(floor) and floor > 0, row
