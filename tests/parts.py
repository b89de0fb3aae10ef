"""Batches of producers that were killed before they had appended all of a batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

from faults import Killed

from kvspool.engine.producer_table import AT_REST, ProducerState, ProducerTable, new_state
from kvspool.producers import BatchTransaction, Changed, ListedRows, producer_id


def leave_part(
    log: Any, name: str, values: list[Any], batch: int, count: int, keys: list[bytes | None] | None = None, *, changed: Changed = "raise"
) -> None:
    """Leave in the log what a producer leaves that is killed when it has appended `count` records of a batch, or of the rest of one that
    it has begun."""
    producer = log.producer(name)
    rows: Any = ListedRows(producer._log.prepare(values, keys))
    seen = producer._look(None)
    state = seen or new_state(producer_id(name), name)
    if seen is None or seen.batch != batch:
        state = state.with_runs([])._replace(batch=batch, word=0)
    elif seen.stored:
        rows = producer._left(rows, seen, changed)
    transaction = BatchTransaction(producer_id(name), seen, state, rows.count, False)
    store = ProducerTable.store

    def killed_at_the_end(self: ProducerTable, number: int, state: ProducerState, *, is_used: bool = True) -> None:
        if state.phase == AT_REST and is_used:
            raise Killed
        store(self, number, state, is_used=is_used)

    with mock.patch.object(ProducerTable, "store", killed_at_the_end):
        try:
            producer._log.append_in_transaction(rows.chosen(list(range(count))), transaction, None, False)
        except Killed:
            return
    raise AssertionError("another one was quicker")
