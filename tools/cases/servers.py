"""The cases of `hub_cases` and `spark_cases`, which start their own servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases.case import RATES, Bar, Bench, Row

PROCESSOR = ("client_us", "server_us", "floor_client_us", "floor_server_us")


def hub(name: str, bench: Bench) -> Iterator[Row]:
    """the hub and its shippers on loopback: {}; see tools/hub_cases.py"""
    import hub_cases

    size = bench.size(hub_cases.Size(), hub_cases.SHORT)
    yield from map(row, hub_cases.cases(bench.folder, bench.rounds, f"hub {name}".__eq__, size))


def spark(name: str, bench: Bench) -> Iterator[Row]:
    """Spark with logs: {}; see tools/spark_cases.py"""
    import spark_cases

    size = bench.size(spark_cases.Size(), spark_cases.SHORT)
    yield from map(row, spark_cases.cases(bench.folder, bench.rounds, f"spark {name}".__eq__, size))


def row(result: dict[str, Any]) -> Row:
    """Return the row of a result. It has the rates of all rounds, or already their medians."""
    scale = RATES.get(result["unit"], 1)
    processor = {name: result[name] for name in PROCESSOR} if PROCESSOR[0] in result else None
    rounds = result["pairs"] if "pairs" in result else [(result["rate"], result["floor_rate"])]
    pairs = [(one / scale, None if floor is None else floor / scale) for one, floor in rounds]
    return Row(result["case"], result["unit"], result["floor"], pairs, Bar(**result.get("bar", {})), processor)
