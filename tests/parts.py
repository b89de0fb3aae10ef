"""Batches of producers that were killed in the midst of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

from kvspool.ledger import AT_REST, Account, Ledger, new_account
from kvspool.producers import Booking, producer_id


class Killed(BaseException):
    """In place of the end of the process."""


def leave_part(log: Any, name: str, values: list[Any], batch: int, count: int, keys: list[bytes | None] | None = None) -> None:
    """Leave in the log what a producer leaves that is killed when it has appended `count` records of a batch that is new, or comes again
    with what is not there yet."""
    producer = log.producer(name)
    rows = producer._log.prepared_rows(values, keys, 0, None)
    seen = producer._look(None)
    account = seen or new_account(producer_id(name), name)
    if account.batch != batch or seen is None:
        account = account.with_runs([])._replace(batch=batch)
    booking = Booking(producer_id(name), seen, account, len(values), False)
    store = Ledger.store

    def killed_at_the_end(self: Ledger, number: int, account: Account) -> None:
        if account.state == AT_REST:
            raise Killed
        store(self, number, account)

    with mock.patch.object(Ledger, "store", killed_at_the_end):
        try:
            producer._log.append_booked(rows.chosen(list(range(count))), booking, None, False)
        except Killed:
            return
    raise AssertionError("another one was quicker")
