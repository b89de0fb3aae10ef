"""Procedures for hubs with copies: the commands of docs/copies-of-hubs.md, to the letter, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes_of_a_hub import HubProcess, ServeCommand
from serving import HubServer
from shipping import eventually, gaps, shipping, stored

import hub
import kvspool
from hub.client.comparison import compared
from hub.client.connection import Security
from hub.client.mirror import Mirror
from hub.client.rejoining import rejoin
from hub.client.shipper import Shipper
from hub.errors import Conflict, Fenced, HubFull, RootInUse
from hub.protocol.reading import Generation, ShardState
from hub.root.promotion import promote
from kvspool.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "copies-of-hubs.md"


def commands(name: str, places: dict[str, str]) -> list[list[str]]:
    """Return the commands of a procedure of the page, as words, with places of this test."""
    block = re.search(rf"<!-- {name} -->\n((?:    .*\n)+)", PAGE.read_text(encoding="utf-8"))
    assert block is not None
    found = []
    for line in block[1].splitlines():
        for place, ours in places.items():
            line = line.replace(place, ours)
        found.append(shlex.split(line))
    return found


def run(words: list[str]) -> str:
    """Run a command of the page, and return its output."""
    assert words[0] == "kvspool"
    done = subprocess.run([sys.executable, "-m", "kvspool.cli", *words[1:]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "hub1", tmp_path / "hub2"]
    for root in found:
        hub.create(root).close()
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[kvspool.Log]:
    """A small ring, which forgets early records soon."""
    with kvspool.create(tmp_path / "events", capacity="64KiB") as log:
        yield log


def append(log: kvspool.Log, count: int) -> None:
    first = log.end()
    log.append_many([b"record %d" % number for number in range(first, first + count)])


def ship(log: kvspool.Log, *locations: str, rounds: int = 8) -> None:
    """Append and ship more records than the ring holds."""
    for _ in range(rounds):
        append(log, 300)
        with Shipper(log.path, locations, client="web", copies=len(locations)) as shipper:
            shipper.run(until_empty=True)
    assert log.extent()[0] > 0


def values(root: Path) -> list[bytes]:
    return [row.value for row in stored(root / "web").values()]


def expected(end: int) -> list[bytes]:
    return [b"record %d" % number for number in range(end)]


def test_a_lost_hub_is_replaced_as_the_page_says(roots: list[Path], log: kvspool.Log) -> None:
    with HubProcess(roots[0]) as first:
        with HubProcess(roots[1]) as second:
            ship(log, first.location, second.location)
            port = second.port
        shutil.rmtree(roots[1])
        places = {"/srv/hub2": str(roots[1]), "hub1:7070": f"127.0.0.1:{first.port}", "hub2:7070": f"127.0.0.1:{port}"}
        fill, serve = commands("replace", places)
        assert "pulled 2,400 records of 1 shard " in run(fill)
        assert serve[:3] == ["kvspool", "hub", "serve"]
        append(log, 100)
        with ServeCommand(roots[1], *serve[5:]) as third:
            with Shipper(log.path, [first.location, third.location], client="web", copies=2) as shipper:
                shipper.run(until_empty=True)
                assert shipper.status().lost == 0
            assert kvspool_status(first.location, third.location)["shards"][0]["complete"] == 2
    assert values(roots[0]) == values(roots[1]) == expected(2500)


def kvspool_status(*locations: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(run(["kvspool", "hub", "status", *locations, "--json"]))
    return found


def test_a_mirror_is_promoted_as_the_page_says(roots: list[Path], log: kvspool.Log) -> None:
    with HubProcess(roots[0]) as first:
        ship(log, first.location)
        with Mirror(first.location, roots[1]) as mirror:
            mirror.run(until_empty=True)
    append(log, 50)
    with HubProcess(roots[1]) as second:
        places = {"/srv/mirror": str(roots[1]), "hub2:7070": f"127.0.0.1:{second.port}", "events": str(log.path)}
        with Shipper(log.path, second.location, client="web") as refused, pytest.raises(Fenced, match="mirrored here"):
            refused.run(until_empty=True)
        promotion, shipping = commands("promote", places)
        assert "shippers may write to 1 client: web" in run(promotion)
        run(shipping)
    assert values(roots[1]) == expected(2450)
    with kvspool.open(roots[1] / "web") as journal:
        assert gaps(journal) == []


def test_a_hub_is_drained_as_the_page_says(roots: list[Path], log: kvspool.Log) -> None:
    with HubProcess(roots[0]) as first, HubProcess(roots[1]) as second:
        ship(log, second.location)
        places = {"/srv/hub2": str(roots[1]), "hub1:7070": f"127.0.0.1:{first.port}"}
        (drain,) = commands("drain", places)
        command = [sys.executable, "-m", "kvspool.cli", *drain[1:]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert "2,400 records of 1 shard are only here" in process.stderr.readline()
        append(log, 10)
        with shipping(log.path, second.location, "web") as refused:
            eventually(lambda: "being drained" in refused.status().error)
        with Shipper(log.path, [first.location, second.location], client="web", copies=2, acks=1) as shipper:
            (leg,) = [one for one in shipper.hubs if one.hub == first.location]
            leg.run(until_empty=True)
        assert "can be stopped" in process.communicate(timeout=60)[0]
        assert process.returncode == 0
        assert main(["hub", "drain", str(roots[1]), "--undo"]) == 0
        with Shipper(log.path, second.location, client="web") as shipper:
            eventually(lambda: "being drained" not in (ship_once(shipper) or ""))
    assert values(roots[0]) == values(roots[1]) == expected(2410)


def ship_once(shipper: Shipper) -> str | None:
    """Ship all, and return the error if the hub is still being drained."""
    try:
        shipper.run(until_empty=True)
    except HubFull as error:
        return str(error)
    return None


def test_a_returning_hub_keeps_what_it_has_and_gets_the_rest(roots: list[Path], log: kvspool.Log) -> None:
    """Clients that have left can't send it; a shard that is ahead of the other hub stays as it is."""
    with HubServer(roots[0]) as first:
        with HubServer(roots[1]) as second:
            ship(log, first.location, second.location)
            append(log, 5)
            with Shipper(log.path, second.location, client="web") as ahead:
                ahead.run(until_empty=True)
        with kvspool.create(log.path.with_name("left")) as left:
            left.append(b"only at the first hub")
            with Shipper(left.path, first.location, client="left") as shipper:
                shipper.run(until_empty=True)
        rejoin(roots[1], first.location, security=Security)
    assert values(roots[1]) == expected(2405)
    assert [row.value for row in stored(roots[1] / "left").values()] == [b"only at the first hub"]
    assert not list(roots[1].glob("*/mirror.json"))


def test_a_root_is_not_filled_while_a_hub_serves_it(roots: list[Path]) -> None:
    with HubServer(roots[0]) as first, HubServer(roots[1]), pytest.raises(RootInUse, match="another hub serves"):
        rejoin(roots[1], first.location, security=Security)


def test_a_root_with_other_records_is_not_changed(roots: list[Path], log: kvspool.Log, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(HubServer(roots[0]))
        ship(log, first.location)
        with HubServer(roots[1]) as second, kvspool.create(tmp_path / "another") as another:
            another.append(b"other")
            with Shipper(another.path, second.location, client="web") as shipper:
                shipper.run(until_empty=True)
        with pytest.raises((Fenced, Conflict)):
            rejoin(roots[1], first.location, security=Security)
    assert values(roots[1]) == [b"other"]


def test_a_mirror_is_not_promoted_while_it_pulls(roots: list[Path]) -> None:
    with HubServer(roots[0]) as first, Mirror(first.location, roots[1]), pytest.raises(RootInUse, match="stop it first"):
        promote(roots[1])
    assert promote(roots[1]) == []


def state(client: str, next: int, *generations: tuple[str, int], first: int = 0, error: str = "") -> ShardState:
    return ShardState(client, 0, 0, first, next, [Generation(log * 32, base) for log, base in generations], error)


def test_hubs_are_compared_by_log_and_sequence() -> None:
    """One hub has lost its disk, so that its numbers begin with the second log."""
    (one,) = compared(
        {
            "whole": {("web", 0): state("web", 150, ("a", 0), ("b", 100))},
            "new": {("web", 0): state("web", 40, ("b", 0))},
            "broken": {("web", 0): state("web", 0, error="damaged")},
        }
    )
    assert (one.next, one.complete, one.stored) == (150, 1, [150, 140])
    assert {copy.hub: (copy.next, copy.missing, copy.error) for copy in one.copies} == {
        "whole": (150, 0, ""),
        "new": (140, 10, ""),
        "broken": (0, 0, "damaged"),
    }


def test_status_says_what_is_missing_and_what_to_do(
    roots: list[Path], log: kvspool.Log, capsys: pytest.CaptureFixture[str]
) -> None:
    with HubServer(roots[0]) as first, HubServer(roots[1]) as second:
        ship(log, first.location, second.location)
        assert main(["hub", "status", first.location, second.location]) == 0
        append(log, 7)
        with Shipper(log.path, first.location, client="web") as shipper:
            shipper.run(until_empty=True)
        assert main(["hub", "status", first.location, second.location]) == 1
        assert main(["hub", "status", first.location, second.location, "--copies", "1", "--shards"]) == 0
        assert main(["hub", "status", first.location, "grpc://127.0.0.1:9", "--copies", "1"]) == 1
        assert main(["hub", "status", first.location, "--copies", "2"]) == 2
    said = capsys.readouterr()
    assert f"web, shard 0: 1 of 2 hubs have all records; {second.location} lacks 7 records." in " ".join(said.err.split())
    assert "grpc://127.0.0.1:9 doesn't answer" in said.err and "lacks 7" in said.out
