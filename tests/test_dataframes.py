"""docs/frames.md is run, line by line: a log becomes a frame of pandas, polars and DuckDB, and its statements on their types are true."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvspool
import shard

pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
duckdb = pytest.importorskip("duckdb")

PAGE = (Path(__file__).parent.parent / "docs" / "frames.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FLIGHTS = [("AA", 5), ("UA", 17), ("AA", None), ("DL", -3)]


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the logs that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    with kvspool.create("events", capacity=65536) as log:
        for number, (carrier, delay) in enumerate(FLIGHTS):
            value = json.dumps({"carrier": carrier, "delay": delay}).encode()
            log.append(value, key=carrier.encode() if number else None, type=number, timestamp=1_700_000_000_123_456_789 + number)
    with shard.create("flights", prefix="p", bits=1, capacity=65536) as shards:
        for number in range(100):
            shards.append(b"%d" % number, key=b"%d" % number)
    return tmp_path


def run(count: int) -> dict[str, Any]:
    """Run the first examples of the page, as one program; return its variables."""
    names: dict[str, Any] = {}
    for example in EXAMPLES[:count]:
        exec(example, names)
    names["log"].close()
    return names


def test_a_log_becomes_a_frame_in_one_line_each(events: Path) -> None:
    with kvspool.open("events") as log:
        values = [record.value for record in log.read()]
    assert run(1)["frame"]["value"].tolist() == values
    frame = run(2)["frame"]
    assert frame["value"].to_list() == values
    assert frame["key"].to_list() == [None, b"UA", b"AA", b"DL"]
    assert run(3)["longest"] == [(max(map(len, values)),)]


def test_the_columns_become_what_the_page_says(events: Path) -> None:
    names = run(3)
    records = names["records"]
    rows = [line.strip("| ").split(" | ") for line in PAGE.split("|---|---|---|---|---|\n")[1].split("\n\n")[0].splitlines()]
    first = records.to_pandas(), polars.from_arrow(records), duckdb.sql("FROM records")
    types = dict(zip(first[2].columns, first[2].types, strict=True))
    for column, arrow, pandas_type, polars_type, duckdb_type in rows:
        assert str(records.schema.field(column).type).replace("tz=", "") == arrow.partition(", null")[0]
        assert str(first[0][column].dtype) == pandas_type.partition(" (")[0]
        assert str(first[1][column].dtype).replace("time_unit='ns', time_zone='UTC'", "ns, UTC") == polars_type
        assert str(types[column]) == duckdb_type.partition(" (")[0]
    assert first[0]["timestamp"][0].value == first[1]["timestamp"].dt.epoch("ns")[0] == 1_700_000_000_123_456_789
    assert duckdb.sql("SELECT epoch_ns(timestamp) FROM records").fetchall()[0] == (1_700_000_000_123_456_789,)


def test_nulls_stay_nulls_without_an_object_for_a_row(events: Path) -> None:
    frame = run(4)["frame"]
    assert str(frame["key"].dtype) == "binary[pyarrow]"
    assert frame["key"].isna().tolist() == [True, False, False, False]


WITHOUT_PANDAS = """
import sys

class NoPandas:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoPandas())
import kvspool
log = kvspool.open("events")
{example}
print(rows)
try:
    table.to_pylist()
except ValueError as error:
    print("pandas" in str(error))
"""


def test_rows_become_dicts_without_pandas(events: Path) -> None:
    program = WITHOUT_PANDAS.format(example=EXAMPLES[4])
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    rows, needs_pandas = done.stdout.splitlines()
    with kvspool.open("events") as log:
        fields = ("sequence", "timestamp", "type", "key", "value")
        assert ast.literal_eval(rows) == [{name: getattr(record, name) for name in fields} for record in log.read()]
    assert needs_pandas == "True", "the page says so"


def test_json_in_values_becomes_columns(events: Path) -> None:
    names = run(7)
    assert names["delays"].rows() == FLIGHTS
    assert names["late"] == [("AA", 5), ("DL", -3), ("UA", 17)]


def test_shards_become_one_table_and_frames_become_records(events: Path) -> None:
    names = run(len(EXAMPLES))
    assert sorted(names["table"]["value"].to_pylist()) == sorted(b"%d" % number for number in range(100))
    with kvspool.open("events") as log:
        assert [(record.key, record.value) for record in log.read(len(FLIGHTS))] == [(b"a", b"1"), (b"b", b"2"), (None, b"3")]


def test_every_example_was_run() -> None:
    assert len(EXAMPLES) == 10
