"""All cases, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from peers import MODULES

from cases import (
    appends,
    batches,
    copies,
    flushes,
    groups,
    growth,
    journals,
    laps,
    openings,
    peers,
    queues,
    replays,
    roots,
    servers,
    sleepers,
    tables,
    tasks,
    wakeups,
)
from cases.case import Bench, Row


class Case(NamedTuple):
    """One case. is_asked: it runs only if named explicitly."""

    name: str
    summary: str
    run: Callable[[Bench], Iterator[Row]]
    is_asked: bool


def _case(name: str, run: Callable[..., Iterator[Row]], *of: object, is_asked: bool = False) -> Case:
    """Return a case; its summary is the function's docstring, with `of` inserted."""
    return Case(name, (run.__doc__ or "").format(*of), partial(run, *of), is_asked)


def _every() -> Iterator[Case]:
    yield _case("append-one", appends.one)
    yield _case("append-together", appends.several)
    yield _case("append-writer", appends.burst)
    yield _case("append-keyed", appends.keyed)
    yield _case("append-sleepers", sleepers.sleeping)
    yield _case("batch-one", batches.one)
    yield _case("batch-together", batches.several)
    yield _case("batch-large", batches.large)
    yield _case("batch-arrow", batches.arrow)
    for verb in replays.BARS:
        yield _case(f"replay-{verb}", replays.warm, verb)
    yield _case("replay-fresh", replays.fresh)
    for kind in ("spool", "kvj"):
        yield _case(f"durable-{kind}", flushes.durable, kind)
    yield _case("wake-up-blocked", wakeups.blocked)
    yield _case("wake-up-spinning", wakeups.spinning)
    yield _case("wake-up-journal", wakeups.journal)
    yield _case("first-lap", laps.first)
    for shards in roots.BITS:
        yield _case(f"root-{shards}", roots.followed, shards)
    for verb, run in (("append", journals.one), ("batch", journals.many), ("scan", journals.scan)):
        for name in journals.FORMATS:
            yield _case(f"journal-{verb}-{name}", run, name)
    yield _case("journal-get", journals.get)
    yield _case("journal-arrow", journals.arrow)
    yield _case("journal-open", openings.many)
    for source in ("sej", "spool"):
        yield _case(f"copy-{source}", copies.to_kvj, source)
    yield _case("queue-verbs", queues.verbs)
    yield _case("queue-durable", queues.durable)
    for codec in tables.BARS:
        yield _case(f"table-append-{codec}", tables.appended, codec, is_asked=True)
    yield _case("tasks-group", groups.shared)
    yield _case("tasks-group-takeover", groups.takeover)
    yield _case("tasks-take", tasks.taken)
    yield _case("tasks-wait", tasks.waited)
    yield _case("tasks-takeover", tasks.takeover)
    for key in (key for key in MODULES if key != peers.OURS):
        yield _case(f"peers-{key}", peers.compared, key, is_asked=True)
    yield _case("growth-capacity", growth.capacities, is_asked=True)
    yield _case("growth-readers", growth.readers, is_asked=True)
    for name in ("ingest", "copies", "disk", "latency", "resume", "list", "failover"):
        yield _case(f"hub-{name}", servers.hub, name, is_asked=True)
    for name in ("read", "hub", "sink", "table", "catch-up", "overhead", "latency", "idle", "failover"):
        yield _case(f"spark-{name}", servers.spark, name, is_asked=True)


CASES = {case.name: case for case in _every()}


def selected(names: list[str]) -> list[Case]:
    """Return the cases whose names are or begin with one of these; without names, all but those to name explicitly.

    Raises ValueError for a name that no case begins with.
    """
    found: set[str] = set()
    for name in (name.replace(" ", "-") for name in names):
        begun = {name} & CASES.keys() or {case for case in CASES if case.startswith(name)}
        if not begun:
            raise ValueError(f"no case begins with {name!r}; the cases are {', '.join(CASES)}")
        found |= begun
    return [case for case in CASES.values() if (case.name in found if names else not case.is_asked)]
