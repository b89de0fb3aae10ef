"""The cases of `tools/bench spark` run, with few records, and each says how it compares."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore:.*pandas:FutureWarning"),
    pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers run on the compiled twin"),
]
TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def spark_cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return tools/spark_cases.py as a module."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("spark_cases")


CASES = {
    "read": ["JSON lines"] * 2 + ["Parquet"] * 2 + ["Parquet, all used"] * 2 + ["Parquet"] * 2,
    "hub": ["the same files, local"] * 2,
    "sink": ["Parquet"],
    "table": ["Parquet"],
    "catch-up": ["one batch query"],
    "overhead": ["a micro-batch of the rate source"],
    "latency": ["a micro-batch of the rate source"] * 2,
    "idle": ["rate source, 1 row a second"],
    "failover": ["", ""],
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_measures_us_and_its_floor(spark: SparkSession, spark_cases: ModuleType, tmp_path: Path, name: str) -> None:
    results = list(spark_cases.cases(tmp_path, 1, lambda case: case == f"spark {name}", spark_cases.SHORT, spark))
    assert [result["floor"] for result in results] == CASES[name]
    for result in results:
        assert result["case"].startswith(f"spark {name}: ")
        figures = [figure for pair in result["pairs"] for figure in pair if figure is not None]
        assert figures and all(math.isfinite(figure) and figure > 0 for figure in figures), result
