"""Each record of a batch is in its shard once, whatever was appended in between, and in whatever order the batch is repeated."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from parts import leave_part

import shard
from shard import ShardSet, route


@pytest.fixture(params=["spool", "kvj"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    options = {"format": "kvj"} if request.param == "kvj" else {"capacity": "64KiB"}
    with shard.create(tmp_path, prefix="p", bits=2, **options) as found:
        yield found


def found(shards: ShardSet) -> Counter[Any]:
    return Counter((record.key, record.data) for record in shards)


ROWS = [(None if at % 3 == 0 else b"key-%d" % (at % 7), f"value-{at}") for at in range(100)]


def test_a_batch_goes_to_the_same_shards_each_time_with_or_without_keys(shards: ShardSet) -> None:
    producer = shards.producer("a")
    rows = list(ROWS)
    for turn in range(3):
        done = producer.append_many([value for _, value in rows], keys=[key for key, _ in rows], batch=1)
        assert sum(one.records for one in done.values()) == 100
        assert all(one.repeated == (turn > 0) for one in done.values())
        random.Random(turn).shuffle(rows)
        shards.append("between")
    assert found(shards) == Counter([*ROWS, *[(None, "between")] * 3])
    for record in shards:
        if record.data != "between":
            assert record.shard == route.shard_of(record.value if record.key is None else record.key, 2)


def test_rows_of_a_table_go_where_the_same_values_go(shards: ShardSet) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"key": [key for key, _ in ROWS], "value": [value for _, value in ROWS]})
    done = shards.producer("a").append_arrow(table, batch=1, codec=1)
    assert shards.producer("a").append_many([value for _, value in ROWS], keys=[key for key, _ in ROWS], batch=1).keys() == done.keys()
    assert found(shards) == Counter(ROWS)
    for name in ("key", "value"):
        only = pa.table({"value": table.column(name).drop_null()})
        assert sum(one.records for one in shards.producer(name).append_arrow(only, batch=1).values()) == len(only)


def test_what_was_left_in_one_shard_is_completed(shards: ShardSet) -> None:
    at = route.shard_of(b"k", 2)
    leave_part(shards.shards[at], "a", ["1", "2", "3"], 1, 2, [b"k"] * 3)
    shards.append("between", key=b"k")
    done = shards.producer("a").append_many(["3", "2", "1", "x"], keys=[b"k", b"k", b"k", b"other"], batch=1)
    assert done[at].records >= 3
    assert found(shards) == Counter({(b"k", "1"): 1, (b"k", "2"): 1, (b"k", "3"): 1, (b"other", "x"): 1, (b"k", "between"): 1})


def test_what_is_no_batch_is_refused(shards: ShardSet) -> None:
    with pytest.raises(ValueError, match="2 values, but 1 keys"):
        shards.producer("a").append_many(["x", "y"], keys=[b"k"], batch=1)
    with pytest.raises(TypeError, match="a key must be bytes, str or None, not int"):
        shards.producer("a").append_many(["x"], keys=[7], batch=1)  # type: ignore[list-item]
    assert not list(shards)
