"""Batches of producers that were killed before they had appended all of a batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

from kvspool.engine.ledger import AT_REST, Account, Ledger, new_account
from kvspool.producers import Booking, Changed, producer_id


class Killed(BaseException):
    """Raised instead of ending the process."""


def leave_part(
    log: Any, name: str, values: list[Any], batch: int, count: int, keys: list[bytes | None] | None = None, *, changed: Changed = "raise"
) -> None:
    """Leave in the log what a producer leaves that is killed when it has appended `count` records of a batch, or of the rest of one that
    it has begun."""
    producer = log.producer(name)
    rows = producer._log.prepared_rows(values, keys, 0, None)
    seen = producer._look(None)
    account = seen or new_account(producer_id(name), name)
    if seen is None or seen.batch != batch:
        account = account.with_runs([])._replace(batch=batch)
    elif seen.stored:
        rows = producer._left(rows, seen, changed)
    booking = Booking(producer_id(name), seen, account, rows.count, False)
    store = Ledger.store

    def killed_at_the_end(self: Ledger, number: int, account: Account, *, is_used: bool = True) -> None:
        if account.state == AT_REST and is_used:
            raise Killed
        store(self, number, account, is_used=is_used)

    with mock.patch.object(Ledger, "store", killed_at_the_end):
        try:
            producer._log.append_booked(rows.chosen(list(range(count))), booking, None, False)
        except Killed:
            return
    raise AssertionError("another one was quicker")
