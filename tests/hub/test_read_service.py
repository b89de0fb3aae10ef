"""The read service of a hub: records, Gaps, ends and errors as any Flight client sees them; refusals; released resources."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from faults import CountingPort
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight
from serving import HubServer

import hub
import kvspool
from hub.client.shipper import Shipper
from hub.errors import Malformed
from hub.protocol import reading
from hub.protocol.ingest import Level
from hub.server import read_service
from hub.server.authentication import Standing
from kvspool import arrow, system
from kvspool.journal.format import JournalBatch
from kvspool.record import Codec, Gap


def serve(root: Path, level: Level = "process") -> HubServer:
    """Return a hub that lets everybody in."""
    return HubServer(root, level=level)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty hub root."""
    hub.create(tmp_path / "hub").close()
    return tmp_path / "hub"


@pytest.fixture
def server(root: Path) -> Iterator[HubServer]:
    """A hub that serves the root."""
    with serve(root) as server:
        yield server


def dial(location: str) -> flight.FlightClient:
    """Return a client that looks for the server itself: gRPC would believe what it knows of an earlier one at the same port."""
    return flight.FlightClient(location, generic_options=[("grpc.use_local_subchannel_pool", 1)])


@pytest.fixture
def client(server: HubServer) -> Iterator[flight.FlightClient]:
    """A Flight client that knows nothing of hubs."""
    with dial(server.location) as client:
        yield client


def journal(root: Path, name: str = "JFK", count: int = 10, **options: Any) -> kvspool.Journal:
    """Make a journal with records of every kind."""
    log = kvspool.create(root / name, format="kvj", **options)
    for number in range(count):
        value: Any = [b"%d" % number, f"text {number}", {"number": number}][number % 3]
        log.append(value, key=b"k%d" % (number % 5) if number % 4 else None, type=number % 7, timestamp=1_000_000_000 * number + 1)
    return log


def get(client: flight.FlightClient, /, **ticket: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows and the metadata for a manually written ticket."""
    rows, beside = [], []
    reader = client.do_get(flight.Ticket(json.dumps(ticket).encode()))
    for chunk in reader:
        if chunk.app_metadata is not None:
            beside.append(json.loads(chunk.app_metadata.to_pybytes()))
        rows += chunk.data.to_pylist()
    return rows, beside


def sequences(client: flight.FlightClient, /, **ticket: Any) -> list[int]:
    return [row["sequence"] for row in get(client, **ticket)[0]]


def records(log: Any, start: Any = "earliest") -> list[tuple[Any, ...]]:
    return [(item.sequence, item.timestamp, item.type, item.key, item.value, item.codec) for item in log.read(start)]


def tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    table = table.set_column(1, "timestamp", table.column("timestamp").cast(pa.int64()))
    return list(zip(*(table.column(name).to_pylist() for name in table.schema.names), strict=True))


def failure(call: Callable[[], Any]) -> reading.Failure:
    """Return what an error of a call says to programs."""
    with pytest.raises(flight.FlightError) as raised:
        call()
    assert "Traceback" not in str(raised.value)
    return msgspec.json.decode(raised.value.extra_info, type=reading.Failure)


# Streams.


def test_a_stream_has_every_record_as_it_was_appended(root: Path, client: flight.FlightClient) -> None:
    with journal(root, count=1000) as log:
        table = client.do_get(flight.Ticket(b'{"client": "JFK", "coded": true}')).read_all()
        assert table.schema == arrow.CODED_SCHEMA
        assert tuples(table) == records(log)
        assert {Codec.RAW, Codec.TEXT, Codec.JSON} == set(table["codec"].to_pylist())


def test_without_codecs_the_columns_are_those_of_reading_a_log(root: Path, client: flight.FlightClient) -> None:
    with journal(root) as log:
        table = client.do_get(flight.Ticket(b'{"client": "JFK"}')).read_all()
        assert table.schema == arrow.SCHEMA
        assert table == log.read_arrow()


def test_a_batch_has_two_mebibytes_at_most_and_a_large_record_comes_alone(root: Path, client: flight.FlightClient) -> None:
    with kvspool.create(root / "JFK", format="kvj") as log:
        log.append_many([b"x" * 100_000] * 20)
        log.append(b"y" * (3 << 20))
        log.append(b"z")
    sizes = [chunk.data.num_rows for chunk in client.do_get(flight.Ticket(b'{"client": "JFK"}'))]
    assert sizes == [20, 1, 1, 0]


def test_only_the_columns_of_a_ticket_are_sent_and_rows_say_their_sequence_next_to_them(root: Path, client: flight.FlightClient) -> None:
    with kvspool.create(root / "JFK", format="kvj", first_sequence=5) as log:
        log.append_many([b"a", b"b"], type=7)
        log.append_batch(JournalBatch([b"c"]), at=9)
    ticket = {"client": "JFK", "columns": ["value", "type"]}
    reader = client.do_get(flight.Ticket(msgspec.json.encode(ticket)))
    assert reader.schema.names == ["type", "value"]
    found = [(chunk.data.to_pydict(), msgspec.json.decode(chunk.app_metadata.to_pybytes())) for chunk in reader]
    assert found == [
        ({"type": [7, 7], "value": [b"a", b"b"]}, {"first": 5}),
        ({"type": [], "value": []}, {"gap": {"first": 7, "last": 8, "reason": "missing"}}),
        ({"type": [0], "value": [b"c"]}, {"first": 9}),
        ({"type": [], "value": []}, {"next": 10}),
    ]
    (rows, _) = get(client, client="JFK", columns=["sequence", "codec"], coded=True)
    assert [row["sequence"] for row in rows] == [5, 6, 9]
    for columns in ([], ["value", "value"], ["values"], ["codec"], "value", [1]):
        assert failure(lambda columns=columns: get(client, client="JFK", columns=columns)).reason == "malformed"


def test_a_ticket_that_names_another_log_is_refused(root: Path, client: flight.FlightClient) -> None:
    with kvspool.create(root / "EWR", capacity="64KiB") as log:
        log.append(b"a")
        assert len(get(client, client="EWR", log=log.log_id.hex())[0]) == 1
    assert failure(lambda: get(client, client="EWR", log="0" * 32)).reason == "fenced"


@pytest.mark.parametrize("make", [{"format": "spool", "capacity": "1MiB"}, {"format": "sej"}])
def test_what_local_processes_write_under_the_root_is_served(root: Path, client: flight.FlightClient, make: dict[str, Any]) -> None:
    with kvspool.create(root / "EWR", **make) as log:
        log.append_many([b"a", b"b"])
    assert [row["value"] for row in get(client, client="EWR")[0]] == [b"a", b"b"]


def test_keyed_values_of_a_spool_come_as_plain_messagepack(root: Path, client: flight.FlightClient) -> None:
    with kvspool.create(root / "EWR", codec="keyed", capacity="1MiB") as log:
        log.append({"altitude": 1})
    (row,), _ = get(client, client="EWR", coded=True)
    assert (msgspec.msgpack.decode(row["value"]), row["codec"]) == ({"altitude": 1}, Codec.MSGPACK)


def test_a_stream_says_where_it_ends(root: Path, client: flight.FlightClient) -> None:
    journal(root).close()
    assert get(client, client="JFK")[1] == [{"next": 10}]
    assert get(client, client="JFK", limit=3)[1] == [{"next": 3}]
    assert get(client, client="JFK", start="latest") == ([], [{"next": 10}])
    assert get(client, client="JFK", end_time=5_000_000_001)[1] == [{"next": 5}]


# Ranges.


@pytest.mark.parametrize(
    ("ticket", "expected"),
    [
        ({"start": 4}, range(4, 10)),
        ({"start": 4, "end": 7}, range(4, 7)),
        ({"end": 7}, range(7)),
        ({"start": 10}, range(0)),
        ({"start": 4, "end": 4}, range(0)),
        ({"end": 99}, range(10)),
        ({"limit": 4}, range(4)),
        ({"limit": 0}, range(0)),
        ({"start": 3, "limit": 4, "end": 5}, range(3, 5)),
        ({"start_time": 5_000_000_001}, range(5, 10)),
        ({"start_time": 5_000_000_002}, range(6, 10)),
        ({"start_time": 4_000_000_999, "end_time": 7_000_000_001}, range(5, 7)),
        ({"end_time": 7_000_000_002}, range(8)),
        ({"start_time": "1970-01-01T00:00:05.000000001Z"}, range(5, 10)),
        ({"start_time": "1970-01-01T00:00:05.000000002Z", "end_time": "1970-01-01T01:00:08+01:00"}, range(6, 8)),
        ({"start_time": 99_000_000_000}, range(0)),
    ],
)
def test_a_range_is_exact_to_the_nanosecond(root: Path, client: flight.FlightClient, ticket: dict[str, Any], expected: range) -> None:
    journal(root).close()
    with kvspool.create(root / "EWR", capacity="1MiB") as spool:
        for number in range(10):
            spool.append(b"", timestamp=1_000_000_000 * number + 1)
    assert sequences(client, client="JFK", **ticket) == list(expected)
    assert sequences(client, client="EWR", **ticket) == list(expected)


def test_only_what_is_on_disk_and_the_hub_puts_it_there_first(root: Path, client: flight.FlightClient) -> None:
    with kvspool.create(root / "EWR", capacity="1MiB") as spool, journal(root) as log:
        spool.append_many([b"a", b"b"])
        assert sequences(client, client="EWR", isolation="synced") == [0, 1]
        assert sequences(client, client="JFK", isolation="synced") == list(range(10))
        assert spool.stats().synced_sequence == 2
        assert log.stats().synced_sequence == 10


# Lost records.


def test_skipped_sequences_are_reported_in_their_place(root: Path, client: flight.FlightClient) -> None:
    with journal(root, count=2) as log:
        log.append_batch(JournalBatch([b"late"]), at=10)
    chunks = list(client.do_get(flight.Ticket(b'{"client": "JFK"}')))
    assert [chunk.data.num_rows for chunk in chunks] == [2, 0, 1, 0]
    assert json.loads(chunks[1].app_metadata.to_pybytes()) == {"gap": {"first": 2, "last": 9, "reason": "missing"}}


def test_overwritten_or_trimmed_records_are_reported_to_a_reader_that_asks_for_them(root: Path, client: flight.FlightClient) -> None:
    with kvspool.create(root / "EWR", capacity="64KiB") as spool, journal(root, count=100, segment_bytes=1000) as log:
        spool.append_many([b"x" * 1000] * 100)
        log.trim(before=50)
        for name, first, reason in (("EWR", spool.stats().first_sequence, "overrun"), ("JFK", log.first(), "trimmed")):
            assert first > 0
            rows, beside = get(client, client=name, start=0)
            assert beside[0] == {"gap": {"first": 0, "last": first - 1, "reason": reason}}
            assert [row["sequence"] for row in rows] == list(range(first, 100))
            assert get(client, client=name)[1] == [{"next": 100}]


def damage(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(b"\xff\xff\xff")


def test_damage_in_the_midst_is_a_gap(root: Path, client: flight.FlightClient) -> None:
    journal(root).close()
    (segment,) = (root / "JFK" / "kvj").iterdir()
    damage(segment, segment.stat().st_size // 2)
    rows, beside = get(client, client="JFK")
    gap = beside[0]["gap"]
    assert gap["reason"] == "damaged"
    assert [row["sequence"] for row in rows] == [number for number in range(10) if not gap["first"] <= number <= gap["last"]]


def test_damage_at_the_end_is_an_error_after_what_is_whole_and_no_quiet_end(root: Path, client: flight.FlightClient) -> None:
    journal(root).close()
    (segment,) = (root / "JFK" / "kvj").iterdir()
    damage(segment, -3)
    reader = client.do_get(flight.Ticket(b'{"client": "JFK"}'))
    assert reader.read_chunk().data.num_rows == 9
    found = failure(reader.read_chunk)
    assert found.reason == "damaged"
    assert str(root) not in found.message


def test_an_unexpected_error_shows_nothing_of_the_hub_s_code(
    root: Path, client: flight.FlightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal(root).close()
    monkeypatch.setattr(read_service, "_Reading", lambda *_: 1 / 0)
    found = failure(lambda: get(client, client="JFK"))
    assert (found.reason, "zero" in found.message) == ("damaged", False)


# Refused tickets.

BAD = [
    b"",
    b"JFK",
    b"[]",
    b"{}",
    b'{"client": 5}',
    b'{"client": ""}',
    b'{"client": "../etc"}',
    b'{"client": "a/b"}',
    b'{"client": "a\\u0000"}',
    b'{"client": "%s"}' % (b"a" * 101),
    b'{"client": "JFK", "more": 1}',
    b'{"client": "JFK", "shard": -1}',
    b'{"client": "JFK", "shard": 1024}',
    b'{"client": "JFK", "shard": 1.5}',
    b'{"client": "JFK", "start": -1}',
    b'{"client": "JFK", "start": 9223372036854775807}',
    b'{"client": "JFK", "start": 1e400}',
    b'{"client": "JFK", "start": "yesterday"}',
    b'{"client": "JFK", "start": 5, "end": 4}',
    b'{"client": "JFK", "limit": -1}',
    b'{"client": "JFK", "start": 5, "start_time": 4}',
    b'{"client": "JFK", "start_time": "2026-01-31"}',
    b'{"client": "JFK", "start_time": "2026-01-31T00:00:00"}',
    b'{"client": "JFK", "start_time": "1969-12-31T23:59:59Z"}',
    b'{"client": "JFK", "end_time": "9999-12-31T23:59:59Z"}',
    b'{"client": "JFK", "start_time": 2, "end_time": 1}',
    b'{"client": "JFK", "isolation": "none"}',
    b'{"client": "JFK", "coded": "yes"}',
    b'{"client": "JFK"' + b" " * 5000 + b"}",
    b'{"client": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'\xff{"client": "JFK"}',
]


@pytest.mark.parametrize("ticket", BAD)
def test_a_bad_ticket_is_refused_with_what_is_wrong(root: Path, client: flight.FlightClient, ticket: bytes) -> None:
    journal(root).close()
    assert failure(lambda: client.do_get(flight.Ticket(ticket)).read_all()).reason == "malformed"


FIELDS = st.sampled_from([*reading.Ticket.__struct_fields__, "other"])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=40), st.datetimes().map(str), st.lists(st.integers())
)


@given(st.one_of(st.binary(), st.dictionaries(FIELDS, VALUES).map(lambda fields: json.dumps({"client": "JFK"} | fields).encode())))
def test_whatever_a_ticket_is_it_is_understood_or_malformed(data: bytes) -> None:
    try:
        ticket = reading.decode_ticket(data)
    except Malformed:
        return
    assert ticket.begin is not None
    assert 0 <= ticket.shard < 1024


def test_a_start_that_is_not_written_yet_is_refused_with_the_next_sequence(root: Path, client: flight.FlightClient) -> None:
    journal(root).close()
    found = failure(lambda: get(client, client="JFK", start=11))
    assert (found.reason, found.expected) == ("unexpected", 10)


def test_what_is_not_there_is_not_found(root: Path, client: flight.FlightClient) -> None:
    journal(root).close()
    for ticket in ({"client": "EWR"}, {"client": "JFK", "shard": 1}):
        assert failure(lambda ticket=ticket: get(client, **ticket)).reason == "not-found"
    assert failure(lambda: client.get_flight_info(flight.FlightDescriptor.for_path("EWR"))).reason == "not-found"


def test_a_principal_without_the_right_to_read_a_client_learns_nothing_of_it(
    root: Path, client: flight.FlightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal(root, "JFK").close()
    journal(root, "EWR").close()
    for right in ("may_read", "may_list"):
        monkeypatch.setattr(Standing, right, lambda self, name: name == "EWR")
    for ask in (lambda name: get(client, client=name), lambda name: client.get_flight_info(flight.FlightDescriptor.for_path(name))):
        there, absent = failure(lambda ask=ask: ask("JFK")), failure(lambda ask=ask: ask("XXX"))
        assert there.reason == absent.reason == "not-allowed"
        assert there.message.replace("JFK", "XXX") == absent.message
    assert [found.descriptor.path for found in client.list_flights()] == [[b"EWR"]]
    assert [shard["client"] for shard in ask_changes(client)["shards"]] == ["EWR"]
    assert len(get(client, client="EWR")[0]) == 10


def test_what_a_reader_says_does_not_come_back_at_length(client: flight.FlightClient) -> None:
    long = "x" * 4000
    commit = json.dumps({"reader": long * 100, "places": []}).encode()
    for call in (
        lambda: get(client, client="JFK", **{long: 1}),
        lambda: get(client, client=long),
        lambda: list(client.do_action(flight.Action("commit-positions", commit))),
    ):
        found = failure(call)
        assert found.reason == "malformed"
        assert len(found.message) <= 1000


# Flights.


def test_there_is_a_flight_for_each_client_with_an_endpoint_for_each_shard(root: Path, client: flight.FlightClient) -> None:
    with hub.open(root) as found, found.create_client("LAX", bits=1, capacity="1MiB") as shards:
        for number in range(20):
            shards.append(b"v", key=b"%d" % number)
    journal(root).close()
    first, second = sorted(client.list_flights(), key=lambda flight: flight.descriptor.path)
    assert first.descriptor.path == [b"JFK"]
    assert (first.total_records, first.schema, len(first.endpoints)) == (10, arrow.SCHEMA, 1)
    assert first.total_bytes > 200
    assert (second.total_records, len(second.endpoints), second.endpoints[0].locations) == (20, 2, [])
    state = json.loads(second.app_metadata)
    assert (state["client"], state["bits"], [shard["shard"] for shard in state["shards"]]) == ("LAX", 1, [0, 1])
    assert sum(shard["next"] for shard in state["shards"]) == 20
    assert sum(client.do_get(endpoint.ticket).read_all().num_rows for endpoint in second.endpoints) == 20
    with kvspool.open(root / "LAX.1.001") as log:
        assert json.loads(second.endpoints[1].app_metadata)["generations"] == [{"log": log.log_id.hex(), "base": 0}]


@pytest.mark.parametrize(
    ("criteria", "found"), [("", ["EWR", "JFK", "JFK2"]), ("JF", ["JFK", "JFK2"]), ("JFK", ["JFK", "JFK2"]), ("*K", ["JFK"]), ("X", [])]
)
def test_criteria_are_the_beginning_of_an_id_or_a_pattern(root: Path, client: flight.FlightClient, criteria: str, found: list[str]) -> None:
    for name in ("JFK", "JFK2", "EWR"):
        journal(root, name).close()
    assert sorted(flight.descriptor.path[0].decode() for flight in client.list_flights(criteria.encode())) == found


@pytest.mark.parametrize("criteria", [b"\xff", b"a" * 201])
def test_bad_criteria_are_refused(client: flight.FlightClient, criteria: bytes) -> None:
    assert failure(lambda: list(client.list_flights(criteria))).reason == "malformed"


def test_a_descriptor_s_command_says_what_its_tickets_ask_for(root: Path, client: flight.FlightClient) -> None:
    journal(root).close()
    command = json.dumps({"client": "JFK", "start": 2, "end_time": "1970-01-01T00:00:06Z", "coded": True}).encode()
    info = client.get_flight_info(flight.FlightDescriptor.for_command(command))
    assert info.schema == client.get_schema(flight.FlightDescriptor.for_command(command)).schema == arrow.CODED_SCHEMA
    assert client.do_get(info.endpoints[0].ticket).read_all()["sequence"].to_pylist() == [2, 3, 4, 5]
    assert len(client.get_flight_info(flight.FlightDescriptor.for_path("JFK", "0")).endpoints) == 1


@pytest.mark.parametrize("path", [["JFK", "0", "1"], ["JFK", "x"], ["a" * 5000]])
def test_a_bad_descriptor_is_refused(client: flight.FlightClient, path: list[Any]) -> None:
    assert failure(lambda: client.get_flight_info(flight.FlightDescriptor.for_path(*path))).reason == "malformed"


# Clients that disconnect, or are slow.


def large(root: Path) -> None:
    """Make a shard of 64 MB, in a format whose checksums cost little in Python."""
    with kvspool.create(root / "JFK", format="sej") as log:
        for _ in range(64):
            log.append_many([b"x" * 10_000] * 100)


def settled(measure: Callable[[], Any], wanted: Any = None) -> Any:
    """Return a measure once it stays the same, or is what is wanted; after ten seconds whatever it is."""
    found, deadline = measure(), time.monotonic() + 10
    while found != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
        found, before = measure(), found
        if wanted is None and found == before:
            break
    return found


def open_files(root: Path) -> int:
    gc.collect()
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sum(str(root / "JFK") in name for name in names)


@pytest.mark.parametrize("leave", ["cancel", "close"])
def test_a_reader_that_goes_away_leaves_nothing_open(root: Path, server: HubServer, leave: str) -> None:
    large(root)
    with dial(server.location) as client:
        get(client, client="JFK", limit=1)
    before = settled(lambda: open_files(root))
    for _ in range(5):
        client = dial(server.location)
        reader = client.do_get(flight.Ticket(b'{"client": "JFK"}'))
        reader.read_chunk()
        assert open_files(root) > before
        if leave == "cancel":
            reader.cancel()
        del reader
        client.close()
    assert settled(lambda: open_files(root), before) == before


def test_a_slow_reader_costs_the_hub_no_more_than_what_is_on_its_way(
    root: Path, client: flight.FlightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    large(root)
    read = []

    def next_batch(*args: Any, **options: Any) -> pa.RecordBatch | Gap:
        found = arrow.next_batch(*args, **options)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(read_service, "arrow", SimpleNamespace(**vars(arrow) | {"next_batch": next_batch}))
    reader = client.do_get(flight.Ticket(b'{"client": "JFK"}'))
    first = reader.read_chunk().data.num_rows
    assert settled(lambda: sum(read)) < 32 << 20  # of 64
    assert sum(chunk.data.num_rows for chunk in reader) == 6400 - first


# Actions.


def ask_changes(client: flight.FlightClient, **body: Any) -> dict[str, Any]:
    (result,) = client.do_action(flight.Action("changes", json.dumps(body).encode()))
    return json.loads(result.body.to_pybytes())  # type: ignore[no-any-return]


def test_the_actions_are_listed_and_others_refused(client: flight.FlightClient) -> None:
    assert [action.type for action in client.list_actions()] == ["changes", "server", "commit-positions", "readers", "delete-reader"]
    assert failure(lambda: list(client.do_action(flight.Action("stop", b"")))).reason == "malformed"


def test_a_hub_says_what_it_is_and_its_root_keeps_its_id(root: Path, tmp_path: Path) -> None:
    found = []
    hub.create(tmp_path / "other").close()
    places: list[tuple[Path, Level]] = [(root, "process"), (root, "disk"), (tmp_path / "other", "process")]
    for path, level in places:
        with serve(path, level) as server, dial(server.location) as client:
            (result,) = client.do_action(flight.Action("server", b""))
            found.append(json.loads(result.body.to_pybytes()))
    assert [answer["level"] for answer in found] == ["process", "disk", "process"]
    assert found[0]["root"] == found[1]["root"] != found[2]["root"]
    assert abs(found[0]["time"] - time.time_ns()) < 60_000_000_000
    assert found[0]["version"] == 1


def test_changes_are_reported_once(root: Path, client: flight.FlightClient) -> None:
    with journal(root, "JFK") as log, journal(root, "EWR"):
        first = ask_changes(client)
        assert [(shard["client"], shard["first"], shard["next"]) for shard in first["shards"]] == [("EWR", 0, 10), ("JFK", 0, 10)]
        assert ask_changes(client, since=first["token"])["shards"] == []
        log.append(b"more")
        second = ask_changes(client, since=first["token"], wait=20)
        assert [(shard["client"], shard["next"]) for shard in second["shards"]] == [("JFK", 11)]
        assert len(ask_changes(client, since="another run's.7")["shards"]) == 2


def test_a_waiter_for_changes_sees_at_once_what_a_shipper_sends(root: Path, tmp_path: Path, server: HubServer) -> None:
    with kvspool.create(tmp_path / "log", capacity="1MiB") as log, dial(server.location) as client:
        with Shipper(tmp_path / "log", server.location, client="LAX") as shipper:
            log.append(b"1")
            shipper.run(until_empty=True)
            token = ask_changes(client)["token"]
            server.read_service.index._next_look = time.monotonic() + 3600  # no look at everything will find it
            server.read_service.index._rest = 3600.0
            answers: list[Any] = []
            waiting = threading.Thread(target=lambda: answers.append(ask_changes(client, since=token, wait=30)))
            waiting.start()
            log.append(b"2")
            shipper.run(until_empty=True)
            waiting.join(20)
            assert [(shard["client"], shard["next"]) for shard in answers[0]["shards"]] == [("LAX", 2)]
            assert answers[0]["shards"][0]["generations"] == [{"log": log.log_id.hex(), "base": 0}]


def test_a_shard_that_cannot_be_read_says_so_among_the_changes(root: Path, client: flight.FlightClient) -> None:
    journal(root).close()
    (root / "JFK" / "generations.json").write_text("[]")
    (shard,) = ask_changes(client)["shards"]
    assert shard["error"].startswith("Corruption")
    assert str(root) not in shard["error"]


@pytest.mark.parametrize("body", [b"[]", b'{"wait": 31}', b'{"wait": -1}', b'{"since": 5}', b'{"x": 1}', b'{"wait": 1e999}'])
def test_bad_questions_for_changes_are_refused(client: flight.FlightClient, body: bytes) -> None:
    assert failure(lambda: list(client.do_action(flight.Action("changes", body)))).reason == "malformed"


def test_the_hub_does_not_wait_for_a_client_that_is_gone(root: Path, server: HubServer, client: flight.FlightClient) -> None:
    token = ask_changes(client)["token"]
    action = flight.Action("changes", json.dumps({"since": token, "wait": 30}).encode())
    with pytest.raises(flight.FlightTimedOutError):
        list(client.do_action(action, flight.FlightCallOptions(timeout=0.1)))
    assert settled(lambda: len(server.read_service.index._waiting), 0) == 0


def test_a_hub_that_is_closed_blocks_no_process(root: Path) -> None:
    server = serve(root)
    server.start()
    with dial(server.location) as client:
        token = ask_changes(client)["token"]
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(ask_changes(client, since=token, wait=30)))
        waiting.start()
        settled(lambda: bool(server.read_service.index._waiting), True)
        began = time.monotonic()
        server.close()
        waiting.join(20)
        assert answers[0]["shards"] == []
        assert time.monotonic() - began < 20


def test_a_time_can_be_written_in_many_ways() -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
    expected = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000
    assert reading.nanoseconds(moment.isoformat()) == reading.nanoseconds(expected) == expected
    assert reading.nanoseconds("2026-01-31T13:00:00.000005678+01:00") == expected + 678


def test_the_reported_gap_names_no_path() -> None:
    assert msgspec.json.encode(reading.gap_note(Gap(1, 2, "missing", "/secret"))) == b'{"first":1,"last":2,"reason":"missing"}'




# The cost of listing the shards.


def test_no_large_record_is_read_to_list_flights_or_to_count_what_is_stored(root: Path, server: HubServer) -> None:
    shards, few = 8, 32 << 10
    for number in range(shards):
        with kvspool.create(root / f"client{number}", format="kvj", segment_bytes="1MiB") as log:
            log.append(b"x" * (4 << 20), timestamp=1)
            log.append(b"small", timestamp=2)
    with dial(server.location) as client, system.replaced(CountingPort()) as port:
        assert isinstance(port, CountingPort)
        assert len(list(client.list_flights())) == shards
        server.store.count()
        server.status()
        client.get_flight_info(flight.FlightDescriptor.for_path("client0"))
        assert port.count < few * shards


class Reading(system.Port):
    """Counts opened files and bytes read, and may pretend to be another run of the machine."""

    def __init__(self, boot: bytes | None = None) -> None:
        self.bytes = 0
        self.opened: list[str] = []
        self._boot = boot

    def open(self, path: Any, flags: int, mode: int) -> int:
        self.opened.append(os.fspath(path))
        return super().open(path, flags, mode)

    def read(self, fd: int, size: int, at: int) -> bytes:
        data = super().read(fd, size, at)
        self.bytes += len(data)
        return data

    def boot_id(self) -> bytes:
        return self._boot or super().boot_id()


@pytest.mark.parametrize("boot", [None, b"another run now."])
def test_a_listing_reads_no_record_however_large_and_opens_no_unchanged_shard(root: Path, boot: bytes | None) -> None:
    for number in range(4):
        with kvspool.create(root / f"c{number}", format="kvj") as log:
            log.append(bytes(3 << 20))
    server = serve(root)
    with system.replaced(Reading(boot)) as port, server, dial(server.location) as client:
        assert isinstance(port, Reading)
        deadline = time.monotonic() + 60
        while True:
            port.opened, port.bytes = [], 0
            assert [one.total_records for one in client.list_flights()] == [1] * 4
            assert port.bytes < 1 << 20 or boot
            opened = [path for path in port.opened if f"{root}/c" in path]
            if not opened:
                break
            assert time.monotonic() < deadline, opened
            time.sleep(0.05)
        with kvspool.open(root / "c2") as log:
            log.append(b"more")
        port.opened = []
        assert [one.total_records for one in client.list_flights()] == [1, 1, 2, 1]
        assert {path.split("/c")[1][0] for path in port.opened if f"{root}/c" in path} == {"2"}
