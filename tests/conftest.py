from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import crash_states
import pytest
from commands import Run
from hypothesis import settings
from loops import IS_SECOND_RUN, twins
from rings import Ring

import kvspool

settings.register_profile("kvspool", deadline=None)  # how long an example takes says more about the machine than about us
settings.load_profile("kvspool")
# A JVM of a test runs for seconds: half the work for the compiler, and none to verify what Spark's build has compiled.
os.environ["JDK_JAVA_OPTIONS"] = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
os.environ["SPARK_CONF_DIR"] = str(Path(__file__).with_name("spark"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: processes of the tests would ignore Ctrl-C, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Code differs by twin in the loops over frames, entries, chunks and keys, in the locks, the sleeping and the merge. Their tests, and
# the tests of the promises of every log, run on both twins. Tests of the layers above them, such as retention, repair, the network and
# the command, run once, on the compiled twin if there is one.
ON_BOTH_TWINS = (
    "contract/*",
    *(f"journal/test_{name}.py" for name in "group journal_crash_points journal_interrupts journal_sleeping journal_stress".split()),
    *(f"journal/test_{name}.py" for name in "kvj machine sej tail".split()),
    "model/test_model.py",
    "processes/*",
    "queue/*",
    "shard/*",
    "spool/*",
    "tasks/*",
    "hub/test_hub_reader_model.py",
    "hub/test_root.py",
    *(f"test_{name}.py" for name in "closing forks hazards keyed locks pool seek_time wakeups".split()),
)
ONCE = (
    *(f"tasks/test_{name}.py" for name in "dead_letters shared_tasks tasks_storm".split()),
    *(f"tasks/test_task_{name}.py" for name in "commands examples postgresql waiting".split()),
    *(f"processes/test_{name}.py" for name in "crash_points file_images producers_storm".split()),
    *(f"shard/test_{name}.py" for name in "descriptors journals route shard_cli shard_producers".split()),
    *(f"spool/test_{name}.py" for name in "checkpoints epochs format making spool_files rates repair resize restored salvage".split()),
    *(f"spool/test_{name}.py" for name in "spool_times verify".split()),
)
# Slices of campaigns, and what starts many processes: marked as long, and left out by `tools/test --fast`.
LONG = (
    *(f"processes/test_{name}.py" for name in "crash_points file_images interleavings naming_storm owners producers_storm stress".split()),
    *(f"journal/test_{name}.py" for name in "archive fixed_changes journal_crash_points journal_interrupts journal_repair".split()),
    *(f"journal/test_{name}.py" for name in "journal_stress machine".split()),
    *(f"hub/test_{name}.py" for name in "http2_attacks hub_crash_points hub_disk hub_machine hub_memory hub_procedures".split()),
    *(f"hub/test_{name}.py" for name in "many_clients network_faults page_browser".split()),
    *(f"queue/test_queue_{name}.py" for name in "faults opcodes".split()),
    *(f"spool/test_{name}.py" for name in "damage recovery".split()),
    "model/test_protocol.py",
    *(f"test_{name}.py" for name in "bench bench_cases cluster faults flights fuzz operation packaging site spark_cluster typing".split()),
    "tasks/test_tasks_storm.py",
)
LONG_NAMES = re.compile("kill|flipped")  # so are tests that kill a process again and again, or flip each bit
# Marked as further, and left out by `tools/test --fast` only: many processes or shards, sweeps over calls, cuts and bits, and most of
# many sets of parameters.
FURTHER = tuple(f"hub/test_{name}.py" for name in "demo many_shards ship_cli spark_copies".split())
FURTHER_NAMES = re.compile("any_call|nth_call|call_fails|any_cut|every_bit|truncation|wherever|many_processes|thousand|1024|object_store")
MOST_SETS = 6  # of one test that are not further ones
EACH_SET = ("test_prose.py", "test_tidy.py", "test_docs.py")  # one for each file: they take no time, and find mistakes of any change
CHOOSES_ITS_TWIN = {"interpreted", "twin", "loops"}  # a test that has one of these fixtures takes the interpreted loops in any run


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of the run of the interpreted twin what has one run, unless it was named."""
    if not IS_SECOND_RUN or not collection_path.match("test_*.py"):
        return None
    named = {(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args}
    is_twice = _is_one_of(ON_BOTH_TWINS, collection_path) and not _is_one_of(ONCE, collection_path)
    return None if is_twice or collection_path in named else True


@pytest.hookimpl(tryfirst=True)  # marks select tests after it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark long and further tests. Leave out of the run of the interpreted twin the tests that take its loops in the other run too."""
    sets: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        sets.setdefault((item.path, name), []).append(item)
        if _is_one_of(LONG, item.path) or LONG_NAMES.search(name):
            item.add_marker(pytest.mark.long)
        if _is_one_of(FURTHER, item.path) or FURTHER_NAMES.search(name):
            item.add_marker(pytest.mark.further)
    for (path, _), each in sets.items():
        if len(each) <= MOST_SETS or path.name in EACH_SET:
            continue
        kept = {at * (len(each) - 1) // (MOST_SETS - 1) for at in range(MOST_SETS)}  # from the first to the last, at equal distances
        for at, item in enumerate(each):
            if at not in kept:
                item.add_marker(pytest.mark.further)
    if IS_SECOND_RUN:
        config.hook.pytest_deselected(items=list(filter(_chooses_its_twin, items)))
        items[:] = [item for item in items if not _chooses_its_twin(item)]


def _is_one_of(patterns: tuple[str, ...], path: Path) -> bool:
    name = str(path.relative_to(Path(__file__).parent))
    return any(fnmatch(name, pattern) for pattern in patterns)


def _chooses_its_twin(item: pytest.Item) -> bool:
    return not CHOOSES_ITS_TWIN.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Keep what was imported out of the collector's sight: tests that ask for a collection after each of hundreds of faults wait for it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let all of it go when the interpreter ends."""
    gc.unfreeze()


TWINS = twins("kvspool.kernel.frames")


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
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of `main` see the plugins that a test gives them, and no others."""
    monkeypatch.setattr("kvspool.cli.plugins.metadata.entry_points", lambda group: [])


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the command in this process: `run("read", path, "--json").objects`."""
    return Run(capfd.readouterr, tmp_path_factory.getbasetemp() / "input")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[kvspool.Spool]:
    """A spool of the least capacity, 4096 bytes."""
    with kvspool.create(tmp_path / "log", capacity=4096) as log:
        yield log


@pytest.fixture
def open_files() -> Callable[[], set[str]]:
    """Count the files that this process holds open: the targets of its descriptors in a spool, and its mappings of them.

    From here on the collector examines only objects that are created later: that makes `gc.collect` cheap, for later tests too.
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

    return held


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
