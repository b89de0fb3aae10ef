"""The options of a read: what is given is what is meant, and everything else is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hub.spark.offsets import EARLIEST, LATEST, Bound
from hub.spark.options import NAMES, Credentials, ReadOptions
from hub.spark.selection import Selection
from hub.spark.shards import ShardKey


def parse(**given: str) -> ReadOptions:
    return ReadOptions.parse({"path": "/logs", **given})


def test_nothing_but_a_path_reads_all_that_there_is() -> None:
    options = parse()
    assert (options.path, options.hubs, options.selection.is_all, options.fail_on_data_loss) == (Path("/logs"), (), True, True)
    assert (options.min_partitions, options.max_records, options.reader, options.isolation) == (None, None, None, "appended")
    batch, stream = options.for_batch(), options.for_stream()
    assert (batch.starting, batch.ending) == (Bound(everywhere=EARLIEST), Bound(everywhere=LATEST))
    assert stream.starting == Bound(everywhere=LATEST)


def test_names_are_case_insensitive_and_values_have_their_types() -> None:
    options = parse(
        PATH="file:///logs/of/mine",
        SUBSCRIBE="a, b",
        minpartitions="3",
        MaxRecordsPerPartition="100",
        maxoffsetspertrigger="200",
        minOffsetsPerTrigger="50",
        maxTriggerDelay="30s",
        failondataloss="False",
        groupid="me",
        isolation="SYNCED",
        filterpushdown="true",
        startingoffsetsbytimestampstrategy="latest",
    )
    assert options.path == Path("/logs/of/mine")
    assert options.selection == Selection(topics=frozenset("ab"))
    assert (options.min_partitions, options.max_records, options.max_offsets, options.min_offsets) == (3, 100, 200, 50)
    assert (options.max_delay, options.fail_on_data_loss, options.reader, options.isolation) == (30.0, False, "me", "synced")
    assert (options.push_filters, options.is_lenient_on_time) == (True, True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900.0), ("30s", 30.0), ("500", 0.5), ("20ms", 0.02), ("2min", 120.0), ("1h", 3600.0), (" 1 d ", 86400.0)]
)
def test_a_delay_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert parse(maxTriggerDelay=text).max_delay == pytest.approx(seconds)


def test_a_group_has_two_names_and_a_shard_set_three() -> None:
    assert parse(**{"kafka.group.id": "me"}).reader == parse(groupId="me", **{"kafka.group.id": "me"}).reader == "me"
    assert parse(prefix="a").selection == parse(subscribe="a").selection
    assert parse(prefix="").selection == Selection(topics=frozenset(("",)))
    assert parse(assign='{"a": [0, 3]}').selection == Selection(shards=frozenset((ShardKey("a", 0), ShardKey("a", 3))))
    assert parse(subscribePattern="a.*").selection.has(ShardKey("ab", 0))


def test_times_are_milliseconds_and_come_before_offsets() -> None:
    options = parse(
        startingTimestamp="5",
        startingOffsetsByTimestamp='{"a": {"0": 6}}',
        startingOffsets='{"a": {"0": 7, "1": -2}}',
        endingOffsets="latest",
    )
    starting = options.starting
    assert (starting.timestamp, starting.timestamps) == (5_000_000, {ShardKey("a", 0): 6_000_000})
    assert starting.offsets is not None
    assert starting.offsets.next == {ShardKey("a", 0): 7, ShardKey("a", 1): EARLIEST}
    assert options.ending == Bound(everywhere=LATEST)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"colour": "red"}, "unknown option 'colour' for format kvspool; the options are assign, caFile"),
        ({"startingOffset": "latest"}, "unknown option 'startingoffset' for format kvspool; did you mean startingOffsets?"),
        ({"bits": "2"}, "unknown option 'bits'"),
        ({"hub": "grpc://h:1"}, "options path and hub exclude each other"),
        ({"path": "hdfs://host/log"}, "is not on this host; format kvspool reads local paths"),
        ({"token": "secret"}, "option token is for hub servers; option hub is missing"),
        ({"subscribe": "a", "prefix": "b"}, "options subscribe and prefix exclude each other"),
        ({"subscribe": "a", "assign": "{}"}, "options subscribe and assign exclude each other"),
        ({"subscribe": "a,,b"}, "option subscribe is names separated by commas"),
        ({"subscribe": "../x"}, "option subscribe: a prefix may have only the characters"),
        ({"prefix": "../x"}, "option prefix: a prefix may have only the characters"),
        ({"subscribePattern": "(a"}, "option subscribePattern is a regular expression, not '(a'"),
        ({"assign": "{}"}, 'option assign is JSON such as {"topic": [0, 1]}'),
        ({"assign": '{"a": [true]}'}, "option assign is JSON"),
        ({"assign": "[" * 100_000}, "option assign is JSON"),
        ({"startingOffsets": "soon"}, "option startingOffsets, if it is neither earliest nor latest, is JSON"),
        ({"startingOffsets": '{"a": {"0": -3}}'}, "option startingOffsets"),
        ({"endingOffsets": '{"a": {"0": true}}'}, "option endingOffsets"),
        ({"startingTimestamp": "yesterday"}, "option startingTimestamp is ms since 1970, not 'yesterday'"),
        ({"endingTimestamp": "-1"}, "option endingTimestamp is ms since 1970"),
        ({"startingOffsetsByTimestamp": '{"a": {"x": 1}}'}, "option startingOffsetsByTimestamp"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "option startingOffsetsByTimestampStrategy is one of error, latest, not 'guess'"),
        ({"failOnDataLoss": "maybe"}, "option failOnDataLoss is true or false, not 'maybe'"),
        ({"filterPushdown": "1"}, "option filterPushdown is true or false"),
        ({"minPartitions": "0"}, "option minPartitions is a number, at least 1, not '0'"),
        ({"maxRecordsPerPartition": "many"}, "option maxRecordsPerPartition is a number, at least 1, not 'many'"),
        ({"maxOffsetsPerTrigger": "-5"}, "option maxOffsetsPerTrigger is a number, at least 1"),
        ({"minOffsetsPerTrigger": "1.5"}, "option minOffsetsPerTrigger is a number, at least 1"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "option minOffsetsPerTrigger, 9, is more than maxOffsetsPerTrigger"),
        ({"maxTriggerDelay": "15 parsecs"}, "option maxTriggerDelay is a duration such as 30s, 15m or 1h"),
        ({"groupId": "../me"}, "option groupId: "),
        ({"groupId": "me", "kafka.group.id": "you"}, "options groupId and kafka.group.id name different readers"),
        ({"isolation": "read_committed"}, "option isolation is one of appended, synced"),
        ({"kafka.bootstrap.servers": "h:9092"}, "there is no broker: load(path) reads logs of this host, option hub reads from hub"),
        ({"kafka.ssl.truststore.location": "x"}, "use caFile, and certificateFile and keyFile, with option hub"),
        ({"kafka.security.protocol": "SSL"}, "use caFile, and tokenFile or certificateFile and keyFile"),
        ({"kafka.sasl.jaas.config": "x"}, "use tokenFile, or certificateFile and keyFile"),
        ({"kafka.fetch.max.bytes": "1"}, "it configures a client of Kafka"),
        ({"includeHeaders": "true"}, "records have no headers"),
        ({"groupIdPrefix": "x"}, "groupId names the durable reader"),
        ({"kafkaConsumer.pollTimeoutMs": "1"}, "nothing is polled here"),
        ({"fetchOffset.numRetries": "1"}, "offsets are found without requests"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, dict) else "",
)
def test_an_option_that_is_wrong_is_named(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as failure:
        parse(**given)
    assert words in str(failure.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": ""}, "a path is missing"),
        ({"hub": "h:7070"}, "option hub: a hub is grpc+tls://HOST:PORT"),
        ({"hub": "grpc://h:1,grpc://h:1"}, "option hub names a location twice"),
        ({"hub": "grpc://h:1|grpc://g:1,grpc://h:1"}, "option hub names a location twice"),
        ({"hub": "grpc://h:1|"}, "option hub: a hub is grpc+tls://HOST:PORT"),
        ({"hub": "grpc://h:1", "token": "kvs_hush", "tokenFile": "t"}, "options token and tokenFile exclude each other"),
        ({"hub": "grpc://h:1", "keyFile": "k"}, "options certificateFile and keyFile go together"),
    ],
)
def test_an_option_of_a_source_that_is_wrong_is_named(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as failure:
        ReadOptions.parse(given)
    assert words in str(failure.value)
    assert "hush" not in str(failure.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"startingOffsets": "latest"}, "option startingOffsets can't be latest (-1) in a batch query"),
        ({"startingOffsets": '{"a": {"0": -1}}'}, "option startingOffsets can't be latest (-1) in a batch query"),
        ({"endingOffsets": "earliest"}, "option endingOffsets can't be earliest (-2)"),
        ({"endingOffsets": '{"a": {"0": -2}}'}, "option endingOffsets can't be earliest (-2)"),
        *(({name: "5"}, f"option {name} is for streams") for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")),
        ({"groupId": "me"}, "option groupId is for streams"),
        ({"kafka.group.id": "me"}, "option kafka.group.id is for streams"),
    ],
)
def test_what_a_batch_query_has_no_use_for_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as failure:
        parse(**given).for_batch()
    assert words in str(failure.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endingOffsets": "latest"}, "option endingOffsets: ending offset not valid in streaming queries"),
        ({"endingTimestamp": "5"}, "option endingTimestamp: ending timestamp not valid in streaming queries"),
        ({"endingOffsetsByTimestamp": '{"a": {"0": 5}}'}, "option endingOffsetsByTimestamp: ending timestamp not valid"),
        ({"filterPushdown": "true"}, "option filterPushdown is for batch queries"),
    ],
)
def test_what_a_stream_has_no_use_for_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as failure:
        parse(**given).for_stream()
    assert words in str(failure.value)


def test_hubs_are_named_in_several_ways_and_a_token_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    options = ReadOptions.parse({"hub": "hub://h1:7070, grpc://h2:7071", "token": "kvs_hush", "caFile": str(tmp_path / "ca")})
    assert options.hubs == ("grpc+tls://h1:7070", "grpc://h2:7071")
    assert ReadOptions.parse({"hub": "hub://h1:1 | hub://h2:2, grpc://h3:3"}).hubs == ("grpc+tls://h1:1|grpc+tls://h2:2", "grpc://h3:3")
    assert "hush" not in repr(options)
    (tmp_path / "ca").write_bytes(b"PEM")
    security = options.credentials.load()
    assert (security.token, security.authorities, security.certificate) == ("kvs_hush", b"PEM", None)
    monkeypatch.setenv("KVSPOOL_TOKEN", "kvs_other")
    assert Credentials().load().token == "kvs_other"


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "spark-options.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in text] == []
