"""Delta tables: logs appended to them in one process, without Spark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import count

from cases.case import Bar, Bench, Row, timed
from cases.copies import copied_and_flushed

SCHEMA = "row bigint, carrier string, dep_delay int, tailnum string, distance double"
BARS = {"json": 1.0, "raw": 3.0}  # M/s


def appended(codec: str, bench: Bench) -> Iterator[Row]:
    """`kvspool table append` of 1 M values of 100 bytes of a kvj, codec {}, compared with a copy of the table's files with a flush"""
    import kvspool
    from hub.pipeline.appender import AppendSource, TableAppender

    records, numbers = bench.size(1_000_000, 5000), count()
    with kvspool.create(bench.folder / "log", format="kvj") as log:
        for first in range(0, records, 5000):
            log.append_many([value(row) for row in range(first, first + 5000)])

    def work() -> float:
        table = bench.folder / f"table{next(numbers)}"
        schema = SCHEMA if codec == "json" else ""
        with TableAppender(AppendSource(bench.folder / "log"), str(table), codec=codec, schema=schema, name="") as appender:  # type: ignore[arg-type]
            rate = timed(records, partial(appender.run, once=True))
            if appender.progress.rows != records:
                raise SystemExit(f"{appender.progress.rows} rows were appended, not {records}")
        files = sorted(table.rglob("*.parquet"))
        shutil.rmtree(bench.folder / "files", ignore_errors=True)
        (bench.folder / "files").mkdir()
        for file in files:
            file.rename(bench.folder / "files" / file.name)
        shutil.rmtree(table)
        return rate

    def floor() -> float:
        files = sorted((bench.folder / "files").iterdir())
        return timed(records, lambda: copied_and_flushed(files, bench.folder / "floor"))

    yield bench.row(f"table append, {codec}", "M/s", work, "its files, copied and flushed", floor, Bar(figure=BARS[codec]))


def value(row: int) -> bytes:
    """Return a flight as JSON, about 100 bytes."""
    flight = {"row": row, "carrier": "AA UA DL B6".split()[row % 4], "dep_delay": row % 311 - 10, "tailnum": f"N{row % 4000:05}"}
    return json.dumps({**flight, "distance": row % 2500 + 0.25}).encode()
