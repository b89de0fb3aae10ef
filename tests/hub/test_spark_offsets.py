"""Offsets as JSON, and the sequences that options stand for: pure functions, so no session is needed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub.spark import offsets
from hub.spark.offsets import EARLIEST, LATEST, Bound, ShardOffsets
from hub.spark.shards import Extent, ShardKey

A0, A1, B0 = ShardKey("a", 0), ShardKey("a", 1), ShardKey("b", 0)
ID, OTHER = "9f3c8a21" * 4, "04d1b7e6" * 4
SHARDS = {A0: Extent(10, 20, ID), A1: Extent(0, 5, OTHER), B0: Extent(7, 7, "")}

topics = st.text("abcJFK_-. ü", max_size=4)
keys = st.builds(ShardKey, topics, st.integers(0, 999))
ids = st.sampled_from([ID, OTHER, ""])
extents = st.builds(lambda first, count, log_id: Extent(first, first + count, log_id), st.integers(0, 50), st.integers(0, 50), ids)
shards = st.dictionaries(keys, extents, max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a0/1logs", max_size=5), inner, max_size=3),
    max_leaves=8,
)


class Lost(Exception):
    """Raised for a loss by a query that may lose nothing."""


def fail(loss: str) -> None:
    raise Lost(loss)


def sequence_at(key: ShardKey, timestamp: int) -> int | None:
    """Return the sequence as if each record's timestamp were its sequence."""
    at = max(timestamp, SHARDS[key].first)
    return at if at < SHARDS[key].end else None


def starting(bound: Bound, report: offsets.Report = fail, is_lenient_on_time: bool = False) -> dict[ShardKey, int]:
    return bound.sequences("starting", SHARDS, sequence_at, report, is_lenient_on_time=is_lenient_on_time)


def ending(bound: Bound, report: offsets.Report = fail) -> dict[ShardKey, int]:
    return bound.sequences("ending", SHARDS, sequence_at, report)


def asked(text: str) -> Bound:
    return Bound(offsets=offsets.parse_text(text, "startingOffsets", EARLIEST))


def test_offsets_are_noted_as_kafka_writes_them_with_the_ids_of_the_logs_in_front() -> None:
    noted = offsets.note({B0: 7, A1: 4, A0: 12}, SHARDS)
    assert json.dumps(noted) == '{"/logs": {"a": {"0": "9f3c8a21", "1": "04d1b7e6"}}, "a": {"0": 12, "1": 4}, "b": {"0": 7}}'
    assert json.dumps(offsets.note({B0: 7}, SHARDS)) == '{"b": {"0": 7}}'
    assert offsets.note({}, SHARDS) == {}


@given(shards, st.randoms())
def test_what_is_noted_is_parsed_to_the_same_and_its_text_does_not_depend_on_the_order(found: dict[ShardKey, Extent], random: Any) -> None:
    ends = {key: extent.end for key, extent in found.items()}
    text = json.dumps(offsets.note(ends, found))
    mixed = list(ends.items())
    random.shuffle(mixed)
    assert json.dumps(offsets.note(dict(mixed), found)) == text
    parsed = offsets.parse(json.loads(text), "the checkpoint")
    assert list(parsed.next.items()) == sorted(ends.items())
    assert parsed.logs == {key: extent.log_id[:8] for key, extent in found.items() if extent.log_id}
    assert offsets.go_on(parsed, found, fail) == ends


@given(json_values)
def test_whatever_a_checkpoint_holds_is_refused_with_its_code_or_is_sound(given: object) -> None:
    try:
        parsed = offsets.parse(given, "the checkpoint")
    except ValueError as error:
        assert str(error).startswith("[KVSPOOL_INVALID_OFFSETS] the checkpoint")
        return
    assert all(isinstance(key, ShardKey) and 0 <= at <= offsets.LARGEST for key, at in parsed.next.items())
    assert parsed.logs.keys() <= parsed.next.keys()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "is an object like"),
        ({"a": 3}, "the checkpoint, 'a' is an object"),
        ({"a": {"x": 3}}, "number of a shard as text, not 'x'"),
        ({"a": {"01": 3}}, "not '01'"),
        ({"a": {"-1": 3}}, "not '-1'"),
        ({"a": {"\u0663": 3}}, "number of a shard"),
        ({"a": {"0": True}}, "is a number"),
        ({"a": {"0": "3"}}, "is a number"),
        ({"a": {"0": -1}}, "is a number 0..2^63-1, not -1"),
        ({"a": {"0": 1 << 63}}, "is a number"),
        ({"/logs": {"b": {"0": "9f3c8a21"}}, "a": {"0": 3}}, "no id of a log of these offsets"),
        ({"/logs": {"a": {"0": "9f3c"}}, "a": {"0": 3}}, "'9f3c' is no id"),
        ({"/logs": {"a": {"0": 5}}, "a": {"0": 3}}, "5 is no id"),
        ({"/logs": [], "a": {"0": 3}}, "the checkpoint, /logs is an object"),
        ({"a": {"0": "x" * 1000}}, "..."),
    ],
)
def test_what_is_wrong_with_offsets_is_said(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=r"^\[KVSPOOL_INVALID_OFFSETS\]") as failure:
        offsets.parse(given, "the checkpoint")
    assert words in str(failure.value) and len(str(failure.value)) < 250


@pytest.mark.parametrize(
    ("noted", "log_id", "same"),
    [("", ID, True), ("", "", True), (ID[:8], ID, True), (ID, ID[:8], True), (ID[:8], OTHER, False), (ID[:8], "", False)],
)
def test_a_log_is_identified_by_the_known_digits(noted: str, log_id: str, same: bool) -> None:
    assert offsets.is_same_log(noted, log_id) is same


@pytest.mark.parametrize(
    ("noted", "code", "words", "then"),
    [
        (ShardOffsets({A0: 15}, {A0: OTHER[:8]}), "LOG_REPLACED", "START_OFFSET_RESET", {A0: 10}),
        (ShardOffsets({A0: 21}, {A0: ID[:8]}), "OFFSET_CHANGED", "offset 21 was to be read next, but the log ends at 20", {A0: 20}),
        (ShardOffsets({A0: 4}, {A0: ID[:8]}), "DATA_LOSS", "topic 'a', partition 0: offsets 4 to 9 are lost", {A0: 10}),
        (ShardOffsets({ShardKey("x", 3): 4, A1: 2}, {}), "PARTITIONS_DELETED", "topic 'x', partition 3 was removed", {A1: 2}),
    ],
)
def test_a_loss_is_reported_with_a_code_and_the_place_or_the_query_continues_after_it(
    noted: ShardOffsets, code: str, words: str, then: dict[ShardKey, int]
) -> None:
    with pytest.raises(Lost, match=rf"^\[KVSPOOL_{code}\]") as failure:
        offsets.go_on(noted, SHARDS, fail)
    assert words in str(failure.value)
    losses: list[str] = []
    assert offsets.go_on(noted, SHARDS, losses.append) == then
    assert losses == [str(failure.value)]


@given(st.dictionaries(keys, st.integers(0, 120), max_size=6), shards)
def test_a_query_continues_within_the_log_and_never_earlier_in_it(
    places: dict[ShardKey, int], found: dict[ShardKey, Extent]
) -> None:
    losses: list[str] = []
    then = offsets.go_on(ShardOffsets(places, {}), found, losses.append)
    assert then.keys() == places.keys() & found.keys()
    for key, at in then.items():
        assert found[key].first <= at <= found[key].end
        assert at >= places[key] or places[key] > found[key].end
    changed = [key for key, at in places.items() if then.get(key) != at]
    assert len(losses) == len(changed)


@given(st.dictionaries(keys, st.tuples(st.integers(0, 90), st.integers(0, 90), ids, ids), max_size=6), shards)
def test_a_batch_that_is_run_again_reads_the_same_or_says_what_is_gone(
    noted: dict[ShardKey, tuple[int, int, str, str]], found: dict[ShardKey, Extent]
) -> None:
    start, end = ShardOffsets({}, {}), ShardOffsets({}, {})
    for key, (at, stop, log_before, log_after) in noted.items():
        start.next[key], start.logs[key] = at, log_before
        end.next[key], end.logs[key] = max(at, stop), log_after
    losses: list[str] = []
    spans = offsets.spans(start, end, found, losses.append)
    for key, (at, stop) in spans.items():
        assert found[key].first <= at <= stop <= max(found[key].end, at)
    if not losses:
        assert spans == {key: (at, end.next[key]) for key, at in start.next.items()}
        assert offsets.spans(start, end, found, fail) == spans


def test_a_shard_that_is_new_in_a_batch_is_noted_and_not_read_yet() -> None:
    assert offsets.spans(ShardOffsets({A1: 2}, {}), ShardOffsets({A0: 10, A1: 3}, {}), SHARDS, fail) == {A1: (2, 3)}


@pytest.mark.parametrize(
    ("end", "logs", "code", "then"),
    [
        (25, {A0: ID[:8]}, "OFFSET_CHANGED", {A0: (12, 20)}),
        (18, {A0: OTHER[:8]}, "LOG_REPLACED", {}),
    ],
)
def test_the_end_of_a_batch_that_is_no_more_there_is_a_loss(
    end: int, logs: dict[ShardKey, str], code: str, then: dict[ShardKey, tuple[int, int]]
) -> None:
    noted = ShardOffsets({A0: 12}, {A0: ID[:8]}), ShardOffsets({A0: end}, logs)
    with pytest.raises(Lost, match=rf"^\[KVSPOOL_{code}\].*topic 'a', partition 0"):
        offsets.spans(*noted, SHARDS, fail)
    assert offsets.spans(*noted, SHARDS, print) == then


def test_words_stand_for_the_ends_of_every_shard() -> None:
    assert starting(Bound(everywhere=EARLIEST)) == {A0: 10, A1: 0, B0: 7}
    assert ending(Bound(everywhere=LATEST)) == {A0: 20, A1: 5, B0: 7}
    assert list(ending(Bound(everywhere=LATEST))) == sorted(SHARDS)


def test_offsets_may_be_sentinels_and_may_have_the_ids_of_a_progress_report() -> None:
    assert starting(asked('{"a": {"0": 15, "1": -2}, "b": {"0": -1}}')) == {A0: 15, A1: 0, B0: 7}
    copied = json.dumps(offsets.note({A0: 15, A1: 5, B0: 7}, SHARDS))
    assert starting(asked(copied)) == {A0: 15, A1: 5, B0: 7}
    with pytest.raises(Lost, match=r"KVSPOOL_LOG_REPLACED.*option startingOffsets asks for offset 15"):
        starting(asked(copied.replace(ID[:8], "00000000")))


def test_a_time_for_all_shards_comes_before_times_of_each_and_those_before_offsets() -> None:
    bound = asked('{"a": {"0": 11, "1": 1}, "b": {"0": 7}}')
    assert bound.is_given and not Bound().is_given
    assert starting(bound) == {A0: 11, A1: 1, B0: 7}
    bound = replace(bound, timestamps={A0: 12, A1: 3, B0: 0})
    assert starting(bound, is_lenient_on_time=True) == {A0: 12, A1: 3, B0: 7}
    bound = replace(bound, timestamp=4)
    assert starting(bound, is_lenient_on_time=True) == {A0: 10, A1: 4, B0: 7}


def test_a_time_that_no_record_has_is_an_error_or_the_end() -> None:
    with pytest.raises(ValueError, match=r"KVSPOOL_NO_OFFSET_AT_TIMESTAMP\] topic 'b', partition 0 has no record of time 2 ms or later"):
        Bound(timestamp=2_000_000).sequences("starting", {B0: SHARDS[B0]}, sequence_at, fail)
    assert starting(Bound(timestamp=2), is_lenient_on_time=True) == {A0: 10, A1: 2, B0: 7}
    assert ending(Bound(timestamp=12)) == {A0: 12, A1: 5, B0: 7}
    assert ending(Bound(timestamps={A0: 1, A1: 1, B0: 1})) == {A0: 10, A1: 1, B0: 7}


@given(shards, st.none() | st.integers(0, 200))
def test_a_time_gives_a_sequence_that_is_there_whatever_comes_or_goes_meanwhile(found: dict[ShardKey, Extent], answer: int | None) -> None:
    then = Bound(timestamp=1).sequences("ending", found, lambda key, timestamp: answer, fail)
    assert then.keys() == found.keys()
    assert all(found[key].first <= at <= found[key].end for key, at in then.items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("soon", "startingOffsets is JSON like"),
        ('{"a": {"0": 1}, "a": {"0": 2}}', "a name is repeated"),
        ('{"a": {"0": -3}}', "is a number -2..2^63-1, not -3"),
        ("[" * 10_000, "startingOffsets is JSON like"),
        ('{"a": {"0": %s}}' % ("9" * 5000), "startingOffsets is JSON like"),
    ],
)
def test_what_is_wrong_with_a_users_offsets_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^\[KVSPOOL_INVALID_OFFSETS\]") as failure:
        asked(text)
    assert words in str(failure.value) and len(str(failure.value)) < 400


@pytest.mark.parametrize(
    ("bound", "code", "words"),
    [
        (asked('{"a": {"0": 1, "1": 1}}'), "OFFSETS", "missing: topic 'b', partition 0; -1 is latest, -2 earliest"),
        (
            asked('{"a": {"0": 1, "1": 1, "2": 1}, "b": {"0": 1}, "c": {"0": 1}}'),
            "OFFSETS",
            "there is no such shard: topic 'a', partition 2, topic 'c', partition 0;",
        ),
        (Bound(timestamps={A0: 1}), "TIMESTAMPS", "missing: topic 'a', partition 1, topic 'b', partition 0"),
        (Bound(offsets=ShardOffsets({ShardKey("x", at): 1 for at in range(100)}, {})), "OFFSETS", "partition 4 and 95 more; missing"),
    ],
)
def test_options_name_every_shard_and_no_other(bound: Bound, code: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[KVSPOOL_{code}_DO_NOT_MATCH\]") as failure:
        starting(bound)
    assert words in str(failure.value)


def test_an_offset_that_is_gone_or_not_written_yet_is_a_loss() -> None:
    gone, beyond = (Bound(offsets=ShardOffsets({A0: at, A1: 0, B0: 7}, {})) for at in (3, 21))
    with pytest.raises(Lost, match=r"KVSPOOL_DATA_LOSS.*offsets 3 to 9 are lost.*option startingOffsets asks for offset 3"):
        starting(gone)
    with pytest.raises(Lost, match=r"KVSPOOL_OFFSET_CHANGED.*ends at 20"):
        starting(beyond)
    assert starting(gone, print)[A0] == 10
    assert starting(beyond, print)[A0] == 20


def test_a_batch_reads_from_one_bound_to_the_other_and_not_backwards() -> None:
    begin = starting(asked('{"a": {"0": 15, "1": -2}, "b": {"0": 7}}'))
    assert offsets.ranges(begin, ending(Bound(everywhere=LATEST))) == {A0: (15, 20), A1: (0, 5), B0: (7, 7)}
    with pytest.raises(ValueError, match=r"START_OFFSET_GREATER.*partition 0: the start is at offset 15, and the end at 14"):
        offsets.ranges(begin, ending(asked('{"a": {"0": 14, "1": -1}, "b": {"0": -1}}')))


def test_a_batch_of_which_all_is_gone_is_a_loss_and_empty_where_that_may_be() -> None:
    bound = asked('{"a": {"0": 4, "1": -1}, "b": {"0": -1}}')
    with pytest.raises(Lost, match=r"KVSPOOL_DATA_LOSS.* 'a', partition 0: all records before offset 4, where .* are lost"):
        ending(bound)
    for begin in (Bound(everywhere=EARLIEST), asked('{"a": {"0": 2, "1": -2}, "b": {"0": 7}}')):
        assert offsets.ranges(starting(begin, print), ending(bound, print))[A0] == (10, 10)
