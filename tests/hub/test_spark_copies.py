"""Streams from hubs that have the same clients, called as Spark calls them: through outages, lags, lost disks and recreated logs."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from histories import Record, log_id, record_of
from serving import HubServer
from sessions import MARKS
from shipping import eventually, numbered

import hub
from hub.client import outage
from hub.errors import Unexpected, Unreachable
from hub.spark import endpoints, ranges, remote

if TYPE_CHECKING:
    from hub.spark.stream import StreamReader

pytest.importorskip("pyspark")
pytestmark = [mark for mark in MARKS if mark.name != "spark"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let pauses be short, and close what a worker would keep."""
    for module in (outage, remote, ranges):
        monkeypatch.setattr(module, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(outage, "LONGEST_BACKOFF", 0.05)
    monkeypatch.setattr(remote, "COMMITS", 0.0)
    yield
    endpoints.close_connections()


class Hub:
    """A hub that may be down, and may lose its disk. `has`: the number of records of each log."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.has: dict[int, int] = {}
        hub.create(root).close()
        self.server = HubServer(root).start()
        self.address = self.server.listener.address
        self.is_up = True

    def down(self) -> None:
        if self.is_up:
            self.server.close()
            self.is_up = False

    def up(self) -> None:
        if not self.is_up:
            self.server = HubServer(self.root, listen=self.address).start()
            self.is_up = True

    def lose(self) -> None:
        self.down()
        shutil.rmtree(self.root)
        hub.create(self.root).close()
        self.has = {}
        self.up()

    def get(self, log: int, end: int, length: int) -> None:
        """Store the records of a log up to `end`, as its shipper would."""
        self.server.store.enter("c", 0)
        shard = self.server.store.take("c", 0, 0)
        at, _ = shard.enter(log_id(log), length)
        if at < end:
            shard.put(log_id(log), numbered(at, end, f"log {log} record"), at)
        self.server.store.give_back("c", 0)
        self.server.read_service.index.note("c", 0)
        self.has[log] = max(end, at)


class Query:
    """A query and its checkpoint. `rows`: the records of each committed batch."""

    def __init__(self, **options: str) -> None:
        self.options = {"startingOffsets": "earliest", "hubTimeout": "1s", **options}
        self.checkpoint: list[str] = []
        self.committed = 0  # entries of the checkpoint
        self.rows: list[tuple[int, Record]] = []
        self.reader = self._new()

    def _new(self) -> StreamReader:
        from pyspark.sql.types import StructType

        from hub.spark.options import ReadOptions
        from hub.spark.reading import COLUMNS
        from hub.spark.stream import StreamReader

        schema = StructType().add("offset", COLUMNS["offset"]).add("value", COLUMNS["value"])
        return StreamReader(ReadOptions.parse(self.options).for_stream(), schema)

    def restart(self) -> None:
        self.reader.stop()
        self.reader = self._new()

    def run(self) -> None:
        """Run a batch if there is something new; first the last one again, if it has failed."""
        if not self.checkpoint:
            self.checkpoint.append(json.dumps(self.reader.initialOffset()))
            self.committed = 1
        if self.committed == len(self.checkpoint):
            start = self.checkpoint[-1]
            latest = json.dumps(self.reader.latestOffset(json.loads(start), self.reader.getDefaultReadLimit()))
            if latest == start:
                return
            self.checkpoint.append(latest)
        rows = self.batch(len(self.checkpoint) - 2)
        self.reader.commit(json.loads(self.checkpoint[-1]))
        self.committed = len(self.checkpoint)
        self.rows += rows

    def batch(self, number: int) -> list[tuple[int, Record]]:
        """Return the rows of a batch."""
        tasks = self.reader.partitions(json.loads(self.checkpoint[number]), json.loads(self.checkpoint[number + 1]))
        found = []
        for task in tasks:
            for rows in pickle.loads(pickle.dumps(self._new())).read(pickle.loads(pickle.dumps(task))):
                found += [(row["offset"], record_of(row["value"])) for row in rows.to_pylist()]
        return found


class World:
    """A client, two hubs and a query. Each step keeps every record at a hub, or in the client's log."""

    def __init__(self, path: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.lengths = [0]
        self.hubs = [Hub(path / "a"), Hub(path / "b")]
        self.query = Query(hub="|".join(one.server.location for one in self.hubs), groupId="q")

    @property
    def ledger(self) -> list[Record]:
        return [Record(log, at) for log, length in enumerate(self.lengths) for at in range(length)]

    def append(self) -> None:
        self.lengths[-1] += self.dice.randrange(1, 9)

    def ship(self, one: Hub | None = None) -> None:
        one = self.dice.choice(self.hubs) if one is None else one
        log, length = len(self.lengths) - 1, self.lengths[-1]
        if one.is_up and length:
            one.get(log, self.dice.choice([length, self.dice.randint(one.has.get(log, 0), length)]), length)

    def recreate(self) -> None:
        """The client's log is created again: at that moment both hubs have all of it."""
        self.settle()
        self.lengths.append(0)

    def lose(self) -> None:
        """A hub loses its disk, while the other one has everything."""
        one, other = self.dice.sample(self.hubs, 2)
        other.up()
        self.ship_all(other)
        if all(other.has.get(log) == length for log, length in enumerate(self.lengths) if length):
            one.lose()

    def down(self) -> None:
        if all(one.is_up for one in self.hubs):
            self.dice.choice(self.hubs).down()

    def up(self) -> None:
        for one in self.hubs:
            one.up()

    def restart(self) -> None:
        self.query.restart()

    def ship_all(self, one: Hub) -> None:
        if self.lengths[-1]:
            one.get(len(self.lengths) - 1, self.lengths[-1], self.lengths[-1])

    def settle(self) -> None:
        self.up()
        for one in self.hubs:
            self.ship_all(one)

    def run(self) -> None:
        if not self.query.rows:
            self.settle()  # a new query, and a new client, begin with the records of the hubs that answer
        try:
            self.query.run()
        except (Unreachable, Unexpected) as error:  # a batch was planned with the records of a hub that is down, or has lost them
            assert "no hub has sequence" in str(error) or "hub unreachable since" in str(error), error
            assert not self.has_planned(), error
            self.query.restart()

    def has_planned(self) -> bool:
        """Return whether one of the hubs that are up has all records of the batch that was planned."""
        return all(one.is_up and all(one.has.get(log) == length for log, length in enumerate(self.lengths) if length) for one in self.hubs)


STEPS = ["append"] * 4 + ["ship"] * 5 + ["run"] * 6 + ["down", "down", "up", "restart", "recreate", "lose"]


@pytest.mark.parametrize("seed", range(6))
def test_a_query_has_each_record_once_whatever_happens_to_its_hubs(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    try:
        for _ in range(60):
            getattr(world, world.dice.choice(STEPS))()
        world.settle()
        world.query.restart()

        def is_done() -> bool:
            world.query.run()
            return len(world.query.rows) >= len(world.ledger)

        eventually(is_done)
        places = [place for place, _ in world.query.rows]
        assert [record for _, record in world.query.rows] == world.ledger
        assert places == sorted(set(places))
        again = Query(**world.query.options)
        eventually(lambda: again.run() or len(again.rows) >= len(world.ledger))  # type: ignore[func-returns-value]
        assert again.rows == list(enumerate(world.ledger))  # a new query agrees on the sequences, since a hub has everything
        again.reader.stop()
    finally:
        world.query.reader.stop()
        for one in world.hubs:
            one.down()
