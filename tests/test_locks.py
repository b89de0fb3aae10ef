"""Waiting for a lock: bounded, patient, and named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvspool import errors, locks, system


class Clockwork(system.Port):
    """Time that passes only in sleeps; the lock becomes free at `free_at`."""

    def __init__(self, free_at: float) -> None:
        super().__init__()
        self.free_at = free_at
        self.time = 0.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += seconds

    def try_lock(self, fd: int, at: int) -> bool:
        return self.time >= self.free_at and super().try_lock(fd, at)


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two descriptions of one file."""
    path = tmp_path / "file"
    path.touch()
    pair = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    yield pair
    for fd in pair:
        os.close(fd)


def holder() -> str:
    return "somebody has it"


def test_a_free_lock_is_taken_without_asking_the_time(fds: tuple[int, int]) -> None:
    port = Clockwork(0)
    with system.replaced(port):
        locks.acquire(fds[0], 3, 0, holder)
    assert port.sleeps == []
    assert not system.port.try_lock(fds[1], 3)


def test_a_waiter_sleeps_longer_and_longer_up_to_a_limit(fds: tuple[int, int]) -> None:
    port = Clockwork(0.5)
    with system.replaced(port):
        locks.acquire(fds[0], 3, 1, holder)
    assert port.sleeps[0] == locks.FIRST_PAUSE
    assert port.sleeps == sorted(port.sleeps)
    assert max(port.sleeps) == locks.LONGEST_PAUSE
    assert 0.5 <= port.time <= 0.5 + locks.LONGEST_PAUSE


@pytest.mark.parametrize("timeout", [0, 0.001, 1, 3.5])
def test_a_waiter_gives_up_after_its_timeout_and_names_the_holder(fds: tuple[int, int], timeout: float) -> None:
    port = Clockwork(1e9)
    with system.replaced(port), pytest.raises(errors.LockTimeout, match=f"no lock within {timeout:g} s: somebody has it"):
        locks.acquire(fds[0], 3, timeout, holder)
    assert timeout <= port.time <= timeout + locks.LONGEST_PAUSE


def test_a_lock_that_becomes_free_just_at_the_end_is_taken(fds: tuple[int, int]) -> None:
    port = Clockwork(1.0)
    with system.replaced(port):
        locks.acquire(fds[0], 3, 1.0, holder)


def test_a_lock_is_given_back_also_on_an_error(fds: tuple[int, int]) -> None:
    with pytest.raises(ZeroDivisionError), locks.held(fds[0], 3, 0, holder):
        assert not system.port.try_lock(fds[1], 3)
        raise ZeroDivisionError
    assert system.port.try_lock(fds[1], 3)


def test_a_lock_that_was_not_got_is_not_given_back(fds: tuple[int, int]) -> None:
    assert system.port.try_lock(fds[1], 3)
    with pytest.raises(errors.LockTimeout), locks.held(fds[0], 3, 0, holder):
        raise AssertionError("the block ran without the lock")
    assert not system.port.try_lock(fds[0], 3)
