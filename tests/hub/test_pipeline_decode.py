"""Values become columns: good rows in order, bad ones kept with where they stood and why."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.pipeline import BadRecords, jsoncolumns
from hub.pipeline.decode import BAD_SCHEMA, BadFile, Decoder, Plan, bad_file, clear_bad, count_bad
from hub.pipeline.schema import ddl, parse_schema

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("type", pa.int32()),
    ]
)
EVERYTHING = (
    "i tinyint, j smallint, k int, l bigint, f float, d double, s string, b boolean, x binary, t timestamp, day date, "
    "a array<int>, m map<string, double>, st struct<lat: double, name: string>"
)


def batch_of(values: list[bytes], topic: str = "JFK", partition: int = 0) -> Any:
    rows = [
        {"key": b"k", "value": value, "topic": topic, "partition": partition, "offset": offset, "timestamp": AT, "type": 0}
        for offset, value in enumerate(values)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def plan_of(codec: str, schema: str = "", *, time: str = "record.timestamp", bad: str = "", fails: bool = False) -> Plan:
    fields = parse_schema(schema) if schema else ()
    return Plan(codec, fields, time, bad, fails, "job")


def split(plan: Plan, values: list[bytes]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    good, bad = Decoder(plan).split(batch_of(values))
    assert bad.schema == BAD_SCHEMA and ddl(plan.columns) == plan.ddl
    return good.to_pylist(), bad.to_pylist()


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_every_kind_of_field_comes_back(codec: str) -> None:
    row = {"i": -128, "j": 32767, "k": -(1 << 31), "l": 1 << 62, "f": 0.5, "d": 1e300, "s": "é", "b": True, "x": b"\xff", "t": AT}
    row |= {"day": date(2026, 1, 31), "a": [1, None], "m": {"p": 1.0}, "st": {"lat": 1.5, "name": None}, "other": 7}
    encode = msgspec.json.encode if codec == "json" else msgspec.msgpack.encode
    (found,), bad = split(plan_of(codec, EVERYTHING), [encode(row)])
    assert bad == []
    assert found.pop("m") == [("p", 1.0)] and row.pop("m") and row.pop("other")
    assert {name: found[name] for name in row} == row
    assert found["record"] == {"key": b"k", "topic": "JFK", "partition": 0, "offset": 0, "timestamp": AT, "type": 0}
    assert found["event_time"] == AT


def test_what_is_missing_or_null_is_null() -> None:
    good, bad = split(plan_of("json", EVERYTHING), [b"{}", msgspec.json.encode(dict.fromkeys("ijklfdsbxtam"))])
    assert bad == [] and all(row[name] is None for row in good for name in row if name not in ("record", "event_time"))


BAD = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b'{"k": "seven"}',
    b'{"k": 2147483648}',
    b'{"k": 1.5}',
    b'{"i": 128}',
    b'{"t": "yesterday"}',
    b'{"x": "not base64!"}',
    b'{"st": {"lat": "north"}}',
    b'{"s": "\xff"}',
    b'{"a": ' + b"[" * 100_000,
    b'{"k": 1}{"k": 2}',
]


def test_bad_rows_are_distinguished_from_good_ones_and_both_stay_in_order() -> None:
    values = [b'{"k": %d}' % place if place % 2 else BAD[place // 2] for place in range(2 * len(BAD))]
    good, bad = split(plan_of("json", EVERYTHING), values)
    assert [row["k"] for row in good] == list(range(1, 2 * len(BAD), 2))
    assert [row["record"]["offset"] for row in good] == list(range(1, 2 * len(BAD), 2))
    assert [row["value"] for row in bad] == BAD
    assert [row["offset"] for row in bad] == list(range(0, 2 * len(BAD), 2))
    assert all(row["reason"] and row["topic"] == "JFK" and row["timestamp"] == AT for row in bad)
    assert "$.k" in bad[4]["reason"]


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b'{"k": 1}', b'{"s": "x"}', b'{"s": "\\ud800"}']), max_size=20))
def test_every_row_is_either_good_or_bad_whatever_the_values_are(values: list[bytes]) -> None:
    for codec in ("json", "msgpack", "keyed", "text", "raw"):
        good, bad = split(plan_of(codec, "k int, s string, t timestamp" if codec not in ("text", "raw") else ""), values)
        assert sorted([row["record"]["offset"] for row in good] + [row["offset"] for row in bad]) == list(range(len(values)))


def test_text_and_raw_values_are_one_column() -> None:
    good, bad = split(plan_of("text"), [b"caf\xc3\xa9", b"\xff", b""])
    assert [row["text"] for row in good] == ["café", ""] and [row["value"] for row in bad] == [b"\xff"]
    good, bad = split(plan_of("raw"), [b"\xff", b""])
    assert [row["value"] for row in good] == [b"\xff", b""] and bad == []


def test_the_time_of_a_row_may_be_a_field() -> None:
    (found,), _ = split(plan_of("json", "at timestamp", time="at"), [b'{"at": "2020-02-02T02:02:02Z"}'])
    assert found["event_time"] == datetime(2020, 2, 2, 2, 2, 2, tzinfo=UTC)


def test_a_row_without_the_field_that_is_its_time_is_bad() -> None:
    values = [b"x", b'{"k": 1}', b'{"k": 2, "at": "2020-02-02T02:02:02Z"}', b'{"at": null}']
    (found,), bad = split(plan_of("json", "k int, at timestamp", time="at"), values)
    assert (found["k"], found["record"]["offset"]) == (2, 2)
    assert [row["offset"] for row in bad] == [0, 1, 3] and [row["reason"] for row in bad[1:]] == ["no at", "no at"]


def test_a_time_that_is_too_far_ahead_of_when_the_record_was_written_is_bad() -> None:
    times = ("2026-02-01T12:00:00Z", "2026-02-01T12:00:00.000001Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z")
    values = [b'{"at": "%s"}' % time.encode() for time in times]
    plan = plan_of("json", "at timestamp", time="at")
    good, bad = split(plan._replace(ahead=86400.0), [b"x", *values, b"{}"])
    assert [row["record"]["offset"] for row in good] == [1, 4]
    assert [row["offset"] for row in bad] == [0, 2, 3, 5] and bad[3]["reason"] == "no at"
    assert bad[2]["reason"] == f"at is 9999-12-31 23:59:59+00:00, too far ahead of {AT}, when the record was written"
    good, bad = split(plan._replace(ahead=1e30), values)
    assert (len(good), bad) == (4, [])


def test_a_value_that_can_not_be_the_name_of_a_folder_is_bad_if_it_is_to_be_one() -> None:
    room = 255 - len("Name=")
    fits = ["", "x" * room, "é" * (room // 2), "/" * (room // 3), "\x01" + "x" * (room - 3), None, "..", "a\u2028b"]
    wrong = ["x" * (room + 1), "é" * (room // 2 + 1), "/" * (room // 3 + 1), "\x01" + "x" * (room - 2), "a\0b"]
    values = [msgspec.json.encode({"name": name, "other": name}) for name in (*fits, *wrong)]
    plan = plan_of("json", "name string, other string")
    good, bad = split(plan._replace(folders=("Name", "elsewhere")), values)
    assert [row["name"] for row in good] == fits and [row["offset"] for row in bad] == [len(fits) + place for place in range(5)]
    assert bad[0]["reason"] == f"name takes {room + 1} bytes in the name of a folder, where {room} fit, and is in [sink] partition_by"
    assert bad[4]["reason"] == "name has a NUL, which names of folders can't have, and is in [sink] partition_by"
    assert len(split(plan, values)[0]) == len(values)
    good, bad = split(plan_of("raw")._replace(folders=("value",)), [b"x" * 249, b"x" * 250, b"\xff" * 84, b"\0"])
    assert ([len(row["value"]) for row in good], len(bad)) == ([249], 3)


def test_a_field_may_be_called_anything() -> None:
    plan = plan_of("json", "`flight-no` int, `class` string, f0 int, `a b` int")
    (found,), bad = split(plan, [b'{"flight-no":1,"class":"x","f0":2,"a b":3}'])
    assert (found["flight-no"], found["class"], found["f0"], found["a b"], bad) == (1, "x", 2, 3, [])


def test_keyed_values_are_plain_messagepack_and_bad_if_their_keys_are_lost() -> None:
    packed = msgspec.msgpack.encode({"k": 7})
    good, bad = split(plan_of("keyed", "k int"), [packed, msgspec.msgpack.encode({0: 7})])
    assert [row["k"] for row in good] == [7]
    assert "Expected `str`" in bad[0]["reason"]


# Arrow's parser, for batches that leave no doubt.

FLAT = "i tinyint, k int, l bigint, f float, d double, s string, b boolean, t timestamp"
NUMBERS = st.one_of(st.integers(-(1 << 70), 1 << 70), st.integers(-200, 200), st.floats(allow_nan=False, allow_infinity=False))
TIMES = ("2020-02-02T02:02:02Z", "2020-02-30T02:02:02Z", "2020-02-02T02:02:02.123456+01:30", "2020-02-02T02:02:02", "2020-02-02", "x")
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), st.sampled_from(TIMES))
NAMES = st.sampled_from(["i", "k", "l", "f", "d", "s", "b", "t", "z"])
NESTED = st.one_of(st.lists(SCALARS, max_size=2), st.dictionaries(st.text(max_size=2), SCALARS, max_size=2))
OBJECTS = st.dictionaries(NAMES, st.one_of(SCALARS, NESTED))
TEXTS = st.one_of(
    OBJECTS.map(json.dumps),
    OBJECTS.map(lambda row: json.dumps(row, ensure_ascii=False)),
    st.sampled_from(
        ["", "{", "{}", "{}{}", "{} {}", '{"k":', '{"k":1}}', '{"s":"}', '"}', '{"k":1}{"k":2}', '{"k":1,"k":2}', '{"k":{}', " {}", "[]"]
    ),
    st.sampled_from(['{"s":"\\ud800"}', '{"s":"a\nb"}', '{"s":\n"a"}', '{"s":1}', '{"z":"\\u0000"}', '{"s":"\\u0000"}', "\ufeff{}"]),
    st.sampled_from(['{"k":01}', '{"k":1e3}', '{"k":1.0}', '{"d":1e400}', '{"d":NaN}', '{"f":1e39}', '{"k":1,}', '{"k":-0}', '{"d":-0}']),
    st.sampled_from(['{"k":"1"}', '{"z":[1,{"a":"}"}]}', '{/**/"k":1}']),
)
PLAIN = {"k": st.integers(-9, 9), "s": st.text(max_size=3), "d": st.floats(-9, 9), "t": st.just(TIMES[0])}
ALIKE = st.fixed_dictionaries({}, optional=PLAIN)


@given(st.one_of(st.lists(TEXTS, min_size=1, max_size=4), st.lists(ALIKE.map(json.dumps), min_size=1, max_size=4)), st.booleans())
def test_arrows_parser_gives_what_the_decoder_of_objects_gives_or_leaves_it_to_that(texts: list[str], is_broken: bool) -> None:
    values = [text.encode(errors="surrogatepass") for text in texts]
    if is_broken:
        values[0] = values[0].replace(b'"z"', b'"\xff"')
    plan = plan_of("json", FLAT)
    found = jsoncolumns.columns(pa.array(values, pa.binary()), plan.fields)
    if found is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsoncolumns, "columns", lambda *_: None)
        good, bad = split(plan, values)
    assert bad == []
    names = "i k l f d s b t".split()
    assert [{name: row[name] for name in names} for row in good] == pa.table(found, names=names).to_pylist()


def test_arrows_parser_takes_plain_objects_and_leaves_others() -> None:
    fields = parse_schema("k int, s string, t timestamp")
    for value in ('{"k":1,"z":[{}],"s":"é","t":"2020-02-02T02:02:02.5Z"}', "{}", '{"k":null,"s":null}'):
        assert jsoncolumns.columns(pa.array([value.encode()] * 3), fields) is not None
    doubtful = [b"", b"{}{}", b"[]", b'{"k":"1"}', b'{"s":"\xff"}', b'{"\xff":1}', b'{"k":1.5}', b'{"k":3000000000}', b'{"t":"2020-02-02"}']
    for wrong in (*doubtful, None):
        assert jsoncolumns.columns(pa.array([b"{}", wrong, b"{}"], pa.binary()), fields) is None
    assert jsoncolumns.columns(pa.array([b"{}"]), parse_schema("a array<int>")) is None


# The folder of bad rows.


def test_bad_rows_are_in_a_file_of_their_task_and_a_replay_replaces_it(tmp_path: Path) -> None:
    plan = plan_of("json", "k int", bad=str(tmp_path / "bad"))
    for _ in range(2):
        kept = BadFile(bad_file(tmp_path / "bad", "job", 12, 3))
        (good,) = plan.decode([batch_of([b'{"k": 1}', b"x"]), batch_of([b"y"])], kept)
        assert good.num_rows == 1
    assert [path.name for path in (tmp_path / "bad").iterdir()] == ["job.0000000012-00003.parquet"]
    assert [row["value"] for row in parquet.read_table(kept.path).to_pylist()] == [b"x", b"y"]
    assert kept.path.stat().st_mode & 0o777 == 0o600
    assert [count_bad(tmp_path / folder, "job", batch) for folder, batch in (("bad", 12), ("bad", 11), ("none", 0))] == [2, 0, 0]
    list(plan.decode([batch_of([b'{"k": 1}'])], BadFile(bad_file(tmp_path / "bad", "job", 12, 3))))  # with another schema, perhaps
    assert list((tmp_path / "bad").iterdir()) == []


def test_jobs_that_share_a_bad_folder_leave_each_other_alone(tmp_path: Path) -> None:
    for job in ("a", "a-0000000001", "b"):
        list(plan_of("json", "k int").decode([batch_of([b"x"])], BadFile(bad_file(tmp_path, job, 1, 0))))
    (tmp_path / ".a.0000000001-00007.parquet.99").touch()  # of a task that was killed
    clear_bad(tmp_path, "a", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0000000001.0000000001-00000.parquet", "b.0000000001-00000.parquet"]
    assert [count_bad(tmp_path, job, 1) for job in ("a", "a-0000000001", "b")] == [0, 1, 1]


def test_a_task_that_fails_leaves_no_file(tmp_path: Path) -> None:
    plan = plan_of("json", "k int", bad=str(tmp_path / "bad"))

    def batches() -> Any:
        yield batch_of([b"x", b'{"k": 1}'])
        raise OSError("the log is gone")

    with pytest.raises(OSError, match="gone"):
        list(plan.decode(batches(), BadFile(bad_file(tmp_path / "bad", "job", 0, 0))))
    assert list((tmp_path / "bad").iterdir()) == []


def test_a_job_may_fail_instead(tmp_path: Path) -> None:
    plan = plan_of("json", "k int", bad=str(tmp_path / "bad"), fails=True)
    with pytest.raises(BadRecords, match=r"\[KVSPOOL_BAD_RECORD\] topic JFK, partition 0, offset 1: "):
        list(plan.decode([batch_of([b'{"k": 1}', b"x"])], BadFile(bad_file(tmp_path / "bad", "job", 0, 0))))


def test_a_large_batch_with_one_bad_row(tmp_path: Path) -> None:
    values = [b'{"k": %d}' % place for place in range(5000)]
    place = random.Random(7).randrange(5000)
    values[place] = b"x"
    good, bad = split(plan_of("json", "k int"), values)
    assert (len(good), [row["offset"] for row in bad]) == (4999, [place])
