"""The page of the hub's protocol has the table of each message, as the code has it."""

from __future__ import annotations

import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hub.protocol import ingest, reading
from hub.protocol.reading import Generation
from hub.server import consumers, read_service
from kvspool import arrow

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats" / "hub.md").read_text(encoding="utf-8")
MESSAGES: list[type[msgspec.Struct]] = [
    *(ingest.Opening, ingest.ShippedLog, ingest.Put, ingest.Ping, ingest.Done),
    *(ingest.Opened, ingest.ResumePoint, ingest.Acknowledged, ingest.Refused),
    *(reading.Query, reading.ClientState, reading.ShardState, Generation, reading.Ticket, reading.BatchMetadata, reading.GapNote),
    *(reading.Failure, reading.Since, reading.Changes, reading.ServerInfo),
    *(reading.CommitPositions, reading.ReaderPlace, reading.Committed, reading.Readers, reading.ReaderState, reading.ReaderName),
]
WORDS = {int: "integer", str: "string", bytes: "bytes", bool: "boolean", float: "number", type(None): "null"}


def told(kind: Any) -> str:
    """Return a type as the page says it."""
    arguments = typing.get_args(kind)
    if kind == ingest.Reason:
        return "a reason"
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f'"{argument}"' for argument in arguments)
    if typing.get_origin(kind) is list:
        return f"list of {told(arguments[0])}"
    if typing.get_origin(kind) is tuple:
        return f"pair of {told(arguments[0])} and {told(arguments[1])}"
    if typing.get_origin(kind) is dict:
        return f"map of {told(arguments[0])} to {told(arguments[1])}"
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(told(argument) for argument in arguments)
    return WORDS.get(kind) or kind.__name__


def rows(message: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """Return the fields of a message with their types, and what they are if they aren't there."""
    kinds = typing.get_type_hints(message)
    found = []
    for field in msgspec.structs.fields(message):
        default = "" if field.default is msgspec.NODEFAULT else f", else {json.dumps(field.default)}"
        found.append((field.name, told(kinds[field.name]) + default))
    return found


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_the_page_has_the_table_of_each_message(message: type[msgspec.Struct]) -> None:
    tag = message.__struct_config__.tag
    title = f"### `{message.__name__}`" + (f' "{tag}"' if tag else "")
    assert PAGE.count(f"{title}\n") == 1
    section = PAGE.split(f"{title}\n")[1].split("\n#")[0]
    table = re.findall(r"^\| ([a-z_]+) \| (.+?) \| .*\|$", section, re.MULTILINE)
    assert [row for row in table if row != ("field", "type")] == rows(message)


def test_the_page_has_no_table_of_a_message_that_is_not_there() -> None:
    assert set(re.findall(r"^### `(\w+)`", PAGE, re.MULTILINE)) == {message.__name__ for message in MESSAGES}


def test_the_page_names_the_version_the_reasons_and_the_actions() -> None:
    assert PAGE.startswith(f"# The hub's protocol, version {ingest.VERSION}\n")
    section = PAGE.split("### Reasons\n")[1].split("\n#")[0]
    assert re.findall(r"^\| ([a-z-]+) \| (?!meaning)", section, re.MULTILINE) == list(typing.get_args(ingest.Reason))
    assert re.findall(r"^\*\*([a-z-]+)\*\* takes", PAGE, re.MULTILINE) == [name for name, _ in read_service.ACTIONS + consumers.ACTIONS]


def test_the_page_names_the_limits_that_hold() -> None:
    for limit in (ingest.MOST_ROWS, reading.LARGEST_TICKET, 65_534, arrow.BATCH, reading.MOST_PLACES, consumers.MOST_READERS):
        assert f"{limit:,}" in PAGE
    assert (read_service.BATCH_BYTES, reading.LARGEST_COMMIT, consumers.MOST_OF_ONE) == (2 << 20, 2 << 20, 64)
    assert (ingest.LARGEST_BATCH, ingest.LARGEST_MESSAGE, reading.LONGEST_WAIT) == (64 << 20, 1 << 20, 30.0)
    assert f"at most {read_service.LARGEST_CRITERIA} bytes" in PAGE


def test_the_ticket_of_the_page_is_one() -> None:
    example = PAGE.split("```json\n")[1].split("```")[0]
    ticket = reading.decode_ticket(example.encode())
    assert (ticket.client, ticket.shard, ticket.first_time) == ("JFK", 3, 1_769_817_600_000_000_000)
