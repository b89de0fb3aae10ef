from __future__ import annotations

import gc
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import crash_states
import pytest
from hypothesis import settings
from loops import twins
from rings import Ring

import kvspool

settings.register_profile("kvspool", deadline=None)  # how long an example takes says more about the machine than about us
settings.load_profile("kvspool")


# What speaks over the network, and what is made of it, has no loops of two twins: one run of it is enough, where there are two.
# The bench measures the compiled twin.
OF_THE_NETWORK = (
    "access access_cli authentication certificates connection gate hub_admin hub_backend hub_consumers hub_crash_points hub_disk "
    "hub_machine hub_memory hub_protocol hub_retention hub_shards "
    "intake java many_clients mirror network_faults outlet page page_browser pipeline* quotas remote server_rights ship_cli shipper spark* "
    "systemd"
)
if os.environ.get("KVSPOOL_NO_EXTENSIONS") and importlib.util.find_spec("kvspool._frames_c") is not None:
    collect_ignore_glob = ["test_bench*.py", "test_flights.py", "test_fuzz.py", *(f"hub/test_{name}.py" for name in OF_THE_NETWORK.split())]


def pytest_collection_finish() -> None:
    """Keep what was imported out of the collector's sight: tests that ask for a collection after each of hundreds of faults wait for it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let all of it go when the interpreter ends."""
    gc.unfreeze()


TWINS = twins("kvspool._frames")


@pytest.fixture(params=TWINS, ids=lambda module: module.__name__.rpartition(".")[2])
def twin(request: pytest.FixtureRequest) -> ModuleType:
    """The interpreted frame loops, then the compiled ones if they were built."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def make_ring() -> Iterator[Callable[..., Ring]]:
    """Make rings in plain memory: `make_ring(twin, capacity, position=, sequence=, guarded=)`."""
    rings: list[Ring] = []

    def make(*args: Any, **options: Any) -> Ring:
        rings.append(Ring(*args, **options))
        return rings[-1]

    yield make
    for ring in rings:
        ring.close()


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Let every log use the interpreted twin, whose calls to the system all go through the port."""
    with crash_states.interpreted():
        yield


@pytest.fixture
def log(tmp_path: Path) -> Iterator[kvspool.Spool]:
    """A spool of the least capacity, 4096 bytes."""
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        yield log


@pytest.fixture
def open_files() -> Iterator[Callable[[], set[str]]]:
    """Count what this process holds: the targets of its descriptors that lie in a spool, and its mappings of them.

    Until the test is over the collector looks only at what is made in it: that makes `gc.collect` cheap.
    """
    gc.collect()  # what earlier tests left to the collector must not go while one counts
    gc.freeze()

    def held() -> set[str]:
        names = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
            except FileNotFoundError:
                continue
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        names.update(f"map {line}" for line in mapped)
        return {name for name in names if "/spool." in name or "inotify" in name}

    yield held
    gc.unfreeze()


@pytest.fixture
def left_open(open_files: Callable[[], set[str]]) -> Callable[..., set[str]]:
    """Return what a call that raises leaves open: `left_open(OSError, call)`."""

    def call_and_look(error: type[Exception], call: Callable[[], Any]) -> set[str]:
        before = open_files()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                call()
            except error:
                left = open_files() - before
            else:
                raise AssertionError(f"no {error.__name__} was raised")
            gc.collect()
        return left

    return call_and_look


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Finalise no leftovers of earlier tests during an interrupt."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
