"""Memory of the hub's server: who gets it when clients hold as much as they can, and do nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from echo_service import DATA, END_STREAM, GUARD, FrameClient, frame, headers, listening, message

from hub.server.budget import Budget, Grant, Share

MIB = 1 << 20
BEGUN = b"\0" + MIB.to_bytes(4, "big") + bytes(1000)  # a message of 1 MiB that stops after its beginning
HOLD = {
    "received": b"".join(headers(number, "Count") + frame(DATA, 0, number, BEGUN) for number in range(1, 17, 2)),
    "unsent": b"".join(headers(number, "Wide") for number in range(1, 17, 2)),
}


def in_a_loop(work: Callable[[Budget], None], most: int = 800, reserve: int = 100) -> None:
    """Do something with a budget."""

    async def run() -> None:
        budget = Budget(most, asyncio.get_running_loop(), reserve)
        work(budget)
        await asyncio.sleep(0)
        assert (budget.used, budget.room) == (0, most - reserve)

    asyncio.run(run())


def test_each_further_owner_gets_less_of_the_reserve_and_none_gets_all() -> None:
    def work(budget: Budget) -> None:
        with ExitStack() as held:
            full = budget.try_grant(700, Share(800))
            assert full is not None
            held.enter_context(full)
            for expected in (50, 25, 12, 6, 3, 2, 1):
                share, got = Share(800), 0
                while (grant := budget.try_grant(1, share)) is not None:
                    held.enter_context(grant)
                    got += 1
                assert got == expected

    in_a_loop(work)


def test_connections_of_one_owner_share_its_part_of_the_reserve() -> None:
    def work(budget: Budget) -> None:
        shares = [Share(800) for _ in range(3)]
        for share in shares[:2]:
            share.owner = "one"
        with ExitStack() as held:
            for share, size in ((shares[0], 700), (shares[0], 50)):
                held.enter_context(_granted(budget, size, share))
            assert budget.try_grant(1, shares[1]) is None
            held.enter_context(_granted(budget, 1, shares[2]))

    in_a_loop(work)


def test_a_large_request_waits_while_small_ones_use_the_reserve_alone() -> None:
    def work(budget: Budget) -> None:
        got: list[Grant] = []
        large, small = Share(800), Share(800)
        with _granted(budget, 100, Share(800)):
            assert budget.request(650, large, got.append) is not None
            budget._wake()
            assert budget.next is not None
            with _granted(budget, 50, small):  # of the reserve, though the budget has room for it
                assert budget.room == 600
        budget._wake()
        assert [grant.size for grant in got] == [650]
        got[0].release()

    in_a_loop(work)


def test_a_request_beyond_the_budget_without_its_reserve_is_refused_at_once() -> None:
    def work(budget: Budget) -> None:
        with pytest.raises(ValueError, match="beyond the limit of 700 bytes"):
            budget.request(701, Share(800), lambda grant: None)

    in_a_loop(work)


def _granted(budget: Budget, size: int, share: Share) -> Grant:
    grant = budget.try_grant(size, share)
    assert grant is not None
    return grant


@pytest.mark.parametrize("kind", HOLD)
def test_a_client_that_uses_little_is_served_at_once_while_others_hold_the_memory(kind: str) -> None:
    """No other call is ended for that: `stall_seconds` is longer than the test."""
    limits = {"received_bytes": 8 * MIB, "unsent_bytes": 4 * MIB, "message_bytes": MIB, "stall_seconds": 10 * GUARD}
    with listening(limits=limits) as (listener, service, _), ExitStack() as stack:
        for _ in range(8):
            holder = stack.enter_context(FrameClient(listener.address))
            holder.send(HOLD[kind])
        service.wait("begun", 64)
        guest = stack.enter_context(FrameClient(listener.address))
        for number in range(3):
            guest.send(headers(2 * number + 1, "Echo") + frame(DATA, END_STREAM, 2 * number + 1, message(b"x" * 5000)))
            found = guest.find(DATA, 2 * number + 1)
            assert found is not None
            assert found[3] == message(b"x" * 5000)
        memory = listener.memory.received if kind == "received" else listener.memory.unsent
        assert memory.room < MIB
