"""Rows with columns of every type that a table may have, for tests."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
EVERYTHING = pa.schema(
    [
        *(("i8", pa.int8()), ("i64", pa.int64()), ("f32", pa.float32()), ("f64", pa.float64()), ("s", pa.string()), ("b", pa.bool_())),
        *(("x", pa.binary()), ("t", pa.timestamp("us", "UTC")), ("day", pa.date32()), ("dec", pa.decimal128(20, 4))),
        *(("a", pa.list_(pa.int32())), ("m", pa.map_(pa.string(), pa.float64())), ("st", pa.struct([("lat", pa.float64())]))),
        *(("p", pa.string()), ("q", pa.date32()), ("r", pa.int32()), ("u", pa.timestamp("us", "UTC")), ("v", pa.bool_())),
    ]
)
BY = ("p", "q", "r", "u", "v")
TEXTS = ["plain", "a/b=c d%", "ü\u2028'\"", "..", None, "x" * 240, "100%25", "~tilde+plus&?#"]


def everything() -> list[dict[str, Any]]:
    found = []
    for row in range(40):
        text = TEXTS[row % len(TEXTS)]
        moment = AT + timedelta(days=row % 2, microseconds=123456 * (row % 2))
        row_f64 = {9: math.inf, 5: math.nan}.get(row, -row / 3)
        found.append({
            "i8": row - 20, "i64": None if row % 7 == 0 else row << 40, "f32": row / 4, "f64": row_f64,
            "s": None if row % 5 == 0 else "é" * row + "\U0010ffff" * (row % 3), "b": row % 2 == 0, "x": b"\xff" * row,
            "t": AT + timedelta(microseconds=row), "day": date(2026, 1, 1) + timedelta(days=row),
            "dec": Decimal(row) * Decimal("1234567890123.4567"), "a": [row, None], "m": [("k", 1.5)],
            "st": {"lat": row / 2}, "p": text, "q": moment.date(), "r": -row % 3, "u": moment, "v": None if row % 4 == 3 else row % 2 == 0,
        })  # fmt: skip
    return found


def told(found: list[dict[str, Any]]) -> list[str]:
    def plain(value: Any) -> Any:
        return value.isoformat() if isinstance(value, datetime) else value

    return sorted(repr([plain(row[field.name]) for field in EVERYTHING]) for row in found)
