"""The bytes of durable readers: golden, torn at every store, damaged at every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from faults import Killed

from kvspool.errors import Corruption
from kvspool.kernel import frames_py as frames
from kvspool.spool import format
from kvspool.spool.slots import Slots, encode_name

LOG_ID = bytes(range(16))
NAME = encode_name("billing")
FIRST = format.SLOTS_AT


class Mortal:
    """Memory that counts its stores, and raises `Killed` before one of them."""

    def __init__(self, view: memoryview, before: Callable[[], None]) -> None:
        self.view = view
        self.before = before

    def cast(self, code: str) -> Mortal:
        return Mortal(self.view.cast(code), self.before)  # type: ignore[call-overload]

    def __getitem__(self, at: Any) -> Any:
        return self.view[at]

    def __setitem__(self, at: int, value: int) -> None:
        assert self.view.itemsize == 8, "shared words are stored one by one"
        self.before()
        self.view[at] = value


def dying_at(nth: int) -> Callable[[], None]:
    left = [nth]

    def before() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    return before


@pytest.fixture
def control() -> memoryview:
    return memoryview(bytearray(format.control_bytes(4096)))


def every_death(control: memoryview, act: Callable[[Slots], object]) -> list[bytes]:
    """Return the memory as it is after `act` was killed before its first, second ... store, and last after it was done."""
    before, states = bytes(control), []
    for nth in range(1000):
        control[:] = before
        try:
            act(Slots(Mortal(control, dying_at(nth)), LOG_ID))  # type: ignore[arg-type]
        except Killed:
            states.append(bytes(control))
        else:
            return [*states, bytes(control)]
    raise AssertionError("no end")


def test_golden_slot(control: memoryview) -> None:
    slot = Slots(control, LOG_ID).slot(1)
    commit = slot.take(NAME, (0x1122334455667788, 0x99), 0x0102030405060708)
    slot.move((0x1122334455667790, 0x9A), 0x0102030405060709, commit)
    raw = bytes(control[FIRST + 256 : FIRST + 512]).hex()
    assert raw == (
        "0100000000000000" + "00" * 56
        + "62696c6c696e67" + "00" * 57
        + "9077665544332211" + "9a00000000000000" + "0907060504030201" + "02000000" + "4603affb"
        + "8877665544332211" + "9900000000000000" + "0807060504030201" + "01000000" + "375b2af6"
        + "00" * 64
    )  # fmt: skip
    assert not any(control[FIRST : FIRST + 256]) and not any(control[FIRST + 512 : 28672])


def test_killed_at_any_store_of_a_commit_the_one_before_stands(control: memoryview) -> None:
    slot = Slots(control, LOG_ID).slot(0)
    before = slot.take(NAME, (0, 0), 1)
    for place in ((64, 1), (64, 1), (128, 9)):

        def commit(slots: Slots, place: tuple[int, int] = place) -> None:
            mine = slots.slot(0)
            mine.move(place, 2, mine.commit())

        states = every_death(control, commit)
        assert len(states) == 5
        for state in states[:-1]:
            assert Slots(memoryview(state), LOG_ID).slot(0).commit()[:4] == before[:4]
        before = Slots(control, LOG_ID).slot(0).commit()
        assert before[:2] == place


def test_a_commit_that_was_torn_is_overwritten_by_the_next_one(control: memoryview) -> None:
    slots = Slots(control, LOG_ID)
    slots.slot(0).take(NAME, (0, 0), 1)

    def commit(slots: Slots) -> None:
        mine = slots.slot(0)
        mine.move((64, 1), 2, mine.commit())

    for state in every_death(control, commit)[:-1]:
        torn = memoryview(bytearray(state))
        slot = Slots(torn, LOG_ID).slot(0)
        slot.move((128, 2), 3, slot.commit())
        assert slot.commit()[:2] == (128, 2)


def test_killed_at_any_store_of_taking_a_slot_it_is_free_or_whole(control: memoryview) -> None:
    control[FIRST + 8 : FIRST + 256] = bytes([0xA5]) * 248  # an earlier reader's
    states = every_death(control, lambda slots: slots.slot(0).take(NAME, (64, 7), 1))
    assert len(states) > 20
    for state in states[:-1]:
        assert Slots(memoryview(state), LOG_ID).find(NAME) is None
        again = memoryview(bytearray(state))
        Slots(again, LOG_ID).slot(0).take(NAME, (64, 7), 1)
        assert again[FIRST : FIRST + 192] == states[-1][FIRST : FIRST + 192]
    found = Slots(memoryview(states[-1]), LOG_ID).find(NAME)
    assert found is not None and found.commit()[:2] == (64, 7) and not found.is_evicted(found.commit())


def test_generations_begin_again_after_2_to_the_32(control: memoryview) -> None:
    slot = Slots(control, LOG_ID).slot(0)
    commit = slot.take(NAME, (0, 0), 1)._replace(generation=2**32 - 3)
    for at in range(6):
        commit = slot.move((8 * at, at), 1, commit)
        assert at == 0 or slot.commit() == commit  # the first one leaves the commit 1 next to it
    assert commit.generation == 3


def test_every_bit_flip_is_harmless_or_found(control: memoryview) -> None:
    slots = Slots(control, LOG_ID)
    slot = slots.slot(0)
    older = slot.take(NAME, (64, 1), 1)
    newer = slot.move((128, 2), 2, older)
    other = encode_name("other")
    slots.slot(1).take(other, (8, 3), 1)
    for bit in range(8 * 64, 8 * 192):
        at = FIRST + bit // 8
        control[at] ^= 1 << bit % 8
        found = slots.find(NAME)
        assert found is not None and found.number == 0, "a damaged reader must never look like one that doesn't exist"
        if found.newest() is None:
            with pytest.raises(Corruption, match="damaged"):
                found.commit()
        else:
            assert found.commit() == (older if at >= FIRST + 128 and at < FIRST + 160 else newer)
        assert slots.slot(1).commit()[:2] == (8, 3)
        control[at] ^= 1 << bit % 8


def test_a_slot_of_another_log_is_damaged(control: memoryview) -> None:
    Slots(control, LOG_ID).slot(0).take(NAME, (64, 1), 1)
    assert Slots(control, bytes(16)).slot(0).newest() is None


@pytest.mark.parametrize("name", ["", "a\n", "\x00", "\x7f", "\x85", "\u2028", "ä" * 33, "x" * 65, "\ud800"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError):
        encode_name(name)


@pytest.mark.parametrize("name", ["x", "x" * 64, "ä" * 32, "rechnung für märz"])
def test_names(name: str) -> None:
    assert encode_name(name).rstrip(b"\0").decode() == name


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError):
        encode_name(b"x")  # type: ignore[arg-type]


def test_announcing_counts(control: memoryview) -> None:
    words = control.cast("Q")
    words[frames.SLOTS_CHANGED] = 2**64 - 1
    Slots(control, LOG_ID).announce()
    assert words[frames.SLOTS_CHANGED] == 0
