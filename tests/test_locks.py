"""Waiting for a lock: bounded, patient, and named."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvspool import errors, system
from kvspool.engine import locks
from kvspool.system.descriptor import Descriptor


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
def files(tmp_path: Path) -> Iterator[tuple[Descriptor, Descriptor]]:
    """Two descriptions of one file."""
    path = tmp_path / "file"
    path.touch()
    one, other = Descriptor(path, os.O_RDWR), Descriptor(path, os.O_RDWR)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def fds(files: tuple[Descriptor, Descriptor]) -> tuple[int, int]:
    """The numbers of the two."""
    return files[0].number, files[1].number


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


def test_a_lock_is_given_back_also_on_an_error(files: tuple[Descriptor, Descriptor], fds: tuple[int, int]) -> None:
    with pytest.raises(ZeroDivisionError), locks.held(files[0], 3, 0, holder):
        assert not system.port.try_lock(fds[1], 3)
        raise ZeroDivisionError
    assert system.port.try_lock(fds[1], 3)


def test_a_lock_that_was_not_got_is_not_given_back(files: tuple[Descriptor, Descriptor], fds: tuple[int, int]) -> None:
    assert system.port.try_lock(fds[1], 3)
    with pytest.raises(errors.LockTimeout), locks.held(files[0], 3, 0, holder):
        raise AssertionError("the block ran without the lock")
    assert not system.port.try_lock(fds[0], 3)


def test_a_lock_whose_block_never_ended_is_given_back_when_it_is_forgotten(
    files: tuple[Descriptor, Descriptor], fds: tuple[int, int]
) -> None:
    held = locks.held(files[0], 3, 0, holder)
    held.__enter__()
    assert not system.port.try_lock(fds[1], 3)
    del held
    assert system.port.try_lock(fds[1], 3)


def test_a_lock_that_is_forgotten_late_leaves_the_next_file_of_its_number_alone(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).touch()
    old = Descriptor(tmp_path / "old", os.O_RDWR)
    number = old.number
    held = locks.held(old, 3, 0, holder)
    held.__enter__()
    old.close()
    with Descriptor(tmp_path / "new", os.O_RDWR) as fd, Descriptor(tmp_path / "new", os.O_RDWR) as other:
        assert fd == number
        assert system.port.try_lock(fd, 3)
        del held
        assert not system.port.try_lock(other, 3)


class Alarm(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("deed", ["try_lock", "unlock"])
def test_an_exception_out_of_a_signal_handler_leaves_the_lock_to_others(
    files: tuple[Descriptor, Descriptor], fds: tuple[int, int], deed: str, when: str
) -> None:
    class Interrupted(system.Port):
        has_come = False

        def _do(self, name: str, fd: int, at: int) -> Any:
            if name != deed or self.has_come:
                return getattr(system.Port, name)(self, fd, at)
            self.has_come = True
            if when == "after":
                getattr(system.Port, name)(self, fd, at)
            raise Alarm

        def try_lock(self, fd: int, at: int) -> bool:
            return bool(self._do("try_lock", fd, at))

        def unlock(self, fd: int, at: int) -> None:
            self._do("unlock", fd, at)

    with system.replaced(Interrupted()), pytest.raises(Alarm), locks.held(files[0], 3, 0, holder):
        pass
    assert system.port.try_lock(fds[1], 3)


@pytest.mark.parametrize("give_back", [locks.give_back, locks.give_back_file])
def test_a_descriptor_is_given_back_only_once(files: tuple[Descriptor, Descriptor], give_back: Callable[[Descriptor, int], None]) -> None:
    give_back(files[0], os.getpid())
    give_back(files[0], os.getpid())
    assert files[0].is_closed


def test_a_lock_that_is_forgotten_late_is_not_taken_from_the_next_hold_of_the_same_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file, other = (Descriptor(tmp_path / "file", os.O_RDWR) for _ in range(2))
    forgotten = locks.held(file, 0, 0, str)
    forgotten.__enter__()
    with locks.held(file, 0, 0, str):
        del forgotten
        gc.collect()
        assert not system.port.try_lock(other.number, 0)
    assert system.port.try_lock(other.number, 0)
    file.close()
    other.close()
