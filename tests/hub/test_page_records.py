"""The newest records of a shard on the hub's page: the right to see them, and their form."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from hub_statuses import Told, hub

import hub as hub_package
from hub.protocol.recent import LONGEST_KEY, LONGEST_VALUE, MOST
from hub.security.access import Access
from hub.server.authentication import Authentication
from hub.server.recent import RecentReader
from hub.server.server import HubServer
from hub.web.page import HubPage
from hub.web.site import Site
from kvspool.cli import main

pytestmark = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers are tested with the compiled twin")
LARGE = {"text": "x" * 5000}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the root of a hub, whose client jfk has records, an access file, and tokens of jfk, desk (may read jfk) and lga."""
    place = tmp_path_factory.mktemp("hub")
    with hub_package.create(place / "root") as root, root.create_client("jfk", bits=0) as shards:
        for number in range(30):
            shards.append({"number": number}, key=b"k")
        shards.append(LARGE, key="ö" * 1000)
        shards.append(b"\xff\x00\x01", type=7)
        shards.append("<b>text</b>")
    for name, *rights in (("jfk",), ("lga",), ("desk", "--role", "reader", "--read", "jfk")):
        assert main(["hub", "token", "add", str(place / "access.toml"), "--name", name, *rights, "--output", str(place / name)]) == 0
    return place


@pytest.fixture(scope="module")
def page(place: Path) -> Iterator[HubPage]:
    """The page of a hub with an access file."""
    with HubServer(place / "root", access=Access.load(place / "access.toml"), listen=("127.0.0.1", 0), least_free=0) as server:
        with HubPage(server.status, names=["hub.example.org"], records=server.recent.read) as page:
            yield page


def ask(page: HubPage, place: Path | None = None, name: str = "desk", host: str = "", **query: Any) -> httpx.Response:
    """Ask for records, with the token of a name, if a place is given."""
    headers = {"Authorization": f"Bearer {(place / name).read_text().strip()}"} if place else {}
    headers |= {"Host": host} if host else {}
    asked = {"client": "jfk", "shard": 0, **query}
    return httpx.get(f"{page.url}api/records", params=asked, headers=headers, trust_env=False, timeout=30)


def test_the_newest_records_are_decoded_and_cut(page: HubPage, place: Path) -> None:
    answer = ask(page, place)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    found = answer.json()
    assert (found["client"], found["shard"], found["first"], found["next"]) == ("jfk", 0, 0, 33)
    assert [record["sequence"] for record in found["records"]] == list(range(32, 32 - MOST, -1))
    text, raw, large, last = found["records"][:4]
    assert (text["value"], text["codec"], text["size"], text["is_cut"]) == ("<b>text</b>", "text", 11, False)
    assert (raw["value"], raw["codec"], raw["type"], raw["key"]) == ("ff 00 01", "raw", 7, None)
    assert large["value"] == json.dumps(LARGE, separators=(",", ":"))[:LONGEST_VALUE] and large["is_cut"] and large["size"] == 5011
    assert large["key"] == "ö" * LONGEST_KEY
    assert (json.loads(last["value"]), last["key"]) == ({"number": 29}, "k")


def test_older_records_are_below_a_sequence(page: HubPage, place: Path) -> None:
    found = ask(page, place, before=5).json()
    assert [json.loads(record["value"])["number"] for record in found["records"]] == [4, 3, 2, 1, 0]
    assert ask(page, place, before=0).json()["records"] == []
    assert len(ask(page, place, before=10**18).json()["records"]) == MOST


def test_records_need_a_token_with_the_right_to_read_the_client(page: HubPage, place: Path) -> None:
    answers = [ask(page), ask(page, place, "lga"), ask(page, place, "jfk"), ask(page, place, client="lga")]
    assert [answer.status_code for answer in answers] == [401, 403, 403, 403]
    for answer in answers:
        assert "number" not in answer.text
    wrong = httpx.get(f"{page.url}api/records?client=jfk&shard=0", headers={"Authorization": "Bearer kvs_no"}, trust_env=False)
    assert (wrong.status_code, wrong.text) == (401, "not authenticated\n")
    token = f"Bearer {(place / 'desk').read_text().strip()}"
    twice = [("Authorization", token), ("Authorization", token)]
    assert httpx.get(f"{page.url}api/records?client=jfk&shard=0", headers=twice, trust_env=False).status_code == 401
    assert ask(page, place, shard=1).status_code == 404


@pytest.mark.parametrize("query", [{"shard": "x"}, {"shard": -1}, {"before": "1" * 20}, {"before": "-1"}, {"shard": "²"}])
def test_places_that_are_none_are_refused(page: HubPage, place: Path, query: dict[str, Any]) -> None:
    assert ask(page, place, **query).status_code == 400


def test_records_are_only_for_browsers_on_the_host_of_the_hub(page: HubPage, place: Path) -> None:
    assert ask(page, place, host="localhost:1").status_code == 200
    refused = ask(page, place, host="hub.example.org")  # as a proxy passes it on
    assert refused.status_code == 403 and "ssh -L" in refused.text

    async def code(address: str) -> int:
        sent: list[Any] = []
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer x")]
        scope = {"type": "http", "method": "GET", "path": "/api/records", "query_string": b"client=jfk&shard=0", "headers": headers}

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        site = Site([], lambda *asked: pytest.fail(f"read for a stranger: {asked}"))
        await site.app({**scope, "client": (address, 9), "http_version": "1.1", "root_path": ""}, receive, send)
        return int(sent[0]["status"])

    for address in ("192.0.2.7", "::ffff:192.0.2.7", "nowhere"):
        assert asyncio.run(code(address)) == 403


def test_a_hub_that_requires_certificates_shows_no_records(place: Path) -> None:
    reader = RecentReader(Authentication(Access.load(place / "access.toml"), uses_certificates=True), None)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="not authenticated"):
        reader.read([f"Bearer {(place / 'desk').read_text().strip()}"], "jfk", 0, None, "here")


def test_a_hub_without_authentication_needs_no_token(tmp_path: Path) -> None:
    with hub_package.create(tmp_path / "root") as root, root.create_client("jfk", bits=0) as shards:
        shards.append_many([b"value"] * 30)
    with HubServer(tmp_path / "root", access=Access.anonymous(), listen=("127.0.0.1", 0), least_free=0) as server:
        with HubPage(server.status, records=server.recent.read) as page:
            assert len(ask(page).json()["records"]) == MOST


def test_a_page_without_a_source_shows_no_records() -> None:
    with HubPage(Told(hub([]))) as page:
        assert ask(page).status_code == 404


def test_a_gap_is_shown_by_its_sequences(tmp_path: Path) -> None:
    with hub_package.create(tmp_path / "root") as root, root.create_client("jfk", bits=0, format="kvj") as shards:
        log = shards.shards[0]
        log.append(b"one")
        log.append_arrow(pa.table({"value": [b"two"]}), at=10)
    with HubServer(tmp_path / "root", access=Access.anonymous(), listen=("127.0.0.1", 0), least_free=0) as server:
        found = server.recent.read([], "jfk", 0, None, "here").records
    assert [(one.sequence, one.lost, one.value) for one in found] == [(10, 0, "two"), (1, 9, ""), (0, 0, "one")]
