"""A follower of hundreds of shards: what a record and a wake-up cost doesn't grow with those that are silent."""

from __future__ import annotations

import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clocks import WaitingClock
from faults import BlindPort, RecordingPort

import hub
import kvspool
from hub import HubRoot
from kvspool import system
from kvspool.cli import main
from kvspool.engine.wakeups import CHANGED, Watcher
from kvspool.spool.spool_files import SpoolFiles
from shard import merge

CLIENTS, BITS = 25, 3
SHARDS = CLIENTS << BITS


class Stopped(RecordingPort, WaitingClock):
    """A clock that moves only during waits; notes each system call."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("look_up", "names", "remove_watch"):
            setattr(self, name, self._noting(name, getattr(self, name)))


@pytest.fixture(scope="module", params=["spool", "kvj"])
def pattern(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with many tiny shards that no test changes."""
    path = tmp_path_factory.mktemp("pattern") / "root"
    options: dict[str, Any] = {"capacity": 4096} if request.param == "spool" else {"format": "kvj"}
    port = system.Port()
    port.flush = port.flush_data = lambda fd: None  # type: ignore[method-assign]
    with system.replaced(port), hub.create(path) as root:
        for number in range(CLIENTS):
            root.create_client(f"c{number}", bits=BITS, **options).close()
    return path


@pytest.fixture
def root(pattern: Path, tmp_path: Path) -> Iterator[HubRoot]:
    shutil.copytree(pattern, tmp_path / "root")
    with hub.open(tmp_path / "root") as root:
        yield root


def test_every_record_of_many_shards_arrives_once_while_they_are_written_to(root: HubRoot) -> None:
    with closing(root.follow(timeout=0)) as following:
        got: Counter[Any] = Counter()
        for turn in range(3):
            for number in range(turn, CLIENTS, 2):
                with root.client(f"c{number}") as shards:
                    for index, log in enumerate(shards.shards):
                        log.append_many([b"%d" % turn] * (index + 1))
            got.update((record.client, record.shard, record.sequence) for record in following)
    assert got == Counter((record.client, record.shard, record.sequence) for record in root.read())
    assert set(got.values()) == {1}
    assert len(got) > SHARDS


def test_a_wake_up_costs_what_changed_and_not_what_is_there(root: HubRoot) -> None:
    with system.replaced(Stopped()) as port, closing(root.follow(timeout=0.4)) as following:
        assert list(following) == []
        with root.client("c7") as shards:
            shards.append(b"before")
            assert next(following).data == b"before"
            assert isinstance(port, Stopped)
            shards.append(b"one")
            port.calls.clear()
            assert next(following).data == b"one"
            calls = len(port.calls)
    assert calls < 60 < SHARDS


def test_one_busy_shard_is_not_slowed_by_those_that_are_silent(root: HubRoot) -> None:
    with system.replaced(Stopped()) as port, closing(root.follow(timeout=0.4)) as following:
        assert list(following) == []
        with kvspool.open(root.path / "c3.3.005") as log:
            port.calls.clear()  # type: ignore[attr-defined]
            for _ in range(10):
                log.append_many([b""] * 40)  # type: ignore[union-attr]
                assert [next(following).shard for _ in range(40)] == [5] * 40
            assert len(port.calls) < 2 * SHARDS  # type: ignore[attr-defined]


def test_a_new_client_is_found_without_a_look_at_the_names_that_are_known(root: HubRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    with system.replaced(Stopped()), closing(root.follow(timeout=1)) as following:
        assert list(following) == []
        looked_at: list[str] = []
        real = hub.root.root.route.parse_name
        monkeypatch.setattr(hub.root.root.route, "parse_name", lambda name: looked_at.append(name) or real(name))
        with root.create_client("new", bits=0, capacity=4096) as shards:
            shards.append(b"first")
        looked_at.clear()
        assert [record.client for record in following] == ["new"]
    assert set(looked_at) == {"new"}


def test_a_follower_has_one_inotify_descriptor_and_few_for_each_shard(root: HubRoot, open_files: Callable[[], set[str]]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with closing(root.follow(timeout=0)) as following:
        for number in range(CLIENTS):
            with root.client(f"c{number}") as shards:
                for log in shards.shards:
                    log.append(b"")
        assert len(list(following)) == SHARDS
        is_journal = (root.path / "c0.3.000" / "spool.ctl").exists() is False
        assert len(os.listdir("/proc/self/fd")) - before <= (1 if is_journal else 4) * SHARDS + 1
        assert sum("inotify" in name for name in open_files()) == 1


@pytest.mark.parametrize("instances", [True, False])
def test_without_watches_many_shards_are_followed_all_the_same(root: HubRoot, instances: bool) -> None:
    with system.replaced(BlindPort(instances=instances)), closing(root.follow(timeout=0.3)) as following:
        assert list(following) == []
        with root.client("c11") as shards:
            shards.append_many([b"v"] * 20, keys=[b"%d" % at for at in range(20)])
        assert len(list(following)) == 20
        root.create_client("late", bits=0, capacity=4096).close()
        with root.client("late") as shards:
            shards.append(b"x")
    with closing(root.follow("latest", timeout=0)) as following:
        assert list(following) == []


def test_an_overflow_of_the_queue_loses_nothing(root: HubRoot) -> None:
    class Overflowing(Stopped):
        """Gives every event away, and says that some were lost."""

        def read_events(self, fd: int) -> bytes:
            super().read_events(fd)
            return (-1).to_bytes(4, "little", signed=True) + (0x4000).to_bytes(4, "little") + bytes(8)

    with system.replaced(Overflowing()), closing(root.follow(timeout=0.2)) as following:
        assert list(following) == []
        for number in (3, 20):
            with root.client(f"c{number}") as shards:
                shards.append_many([b"v"] * 9, keys=[b"%d" % at for at in range(9)])
        with root.create_client("new", bits=1, capacity=4096) as shards:
            shards.append(b"v", key=b"")
        assert Counter(record.client for record in following) == {"c3": 9, "c20": 9, "new": 1}


def test_where_no_wake_up_comes_the_looks_take_a_part_of_the_time_alone(root: HubRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Stopped):
        """Each look at everything takes a second."""

        def __init__(self) -> None:
            super().__init__()
            self.looking = 0.0

    slow = Slow()
    real = merge.FollowingMerge.look_at_each

    def look_at_each(self: Any, sources: Any) -> None:
        assert len(sources) == SHARDS
        slow.time += 1
        slow.looking += 1
        real(self, sources)

    with system.replaced(slow), closing(root.follow(timeout=0)) as following:
        assert list(following) == []
        following._watcher.is_blind = True  # type: ignore[union-attr]
        monkeypatch.setattr(type(following), "look_at_each", look_at_each)
        following.timeout, began, slow.looking = 60, slow.time, 0.0
        assert list(following) == []
    assert 5 <= slow.looking <= (slow.time - began) / merge.REST


class Ticking(Stopped):
    """A clock that also moves a bit with each look at it."""

    def monotonic(self) -> float:
        self.time += 0.001
        return self.time


def test_a_poll_of_silent_shards_costs_few_calls_however_many_there_are(root: HubRoot) -> None:
    class Waking(Ticking):
        """Appends a record after ten polls."""

        polls = -1

        def wait_readable(self, fd: int, timeout: float) -> bool:
            self.polls += 1
            if self.polls == 10:
                log.append(b"enough")
            return super().wait_readable(fd, timeout)

    with system.replaced(Waking()) as port, kvspool.open(root.path / "c7.3.002") as log, closing(root.follow()) as following:
        following.timeout = 0
        assert list(following) == []
        following.timeout = None
        assert isinstance(port, Waking)
        port.calls.clear()
        port.polls = 0
        assert next(following).data == b"enough"
    assert len(port.calls) < 2 * SHARDS  # where each poll looked at each shard, ten polls took ten times as many


def test_a_record_whose_wake_up_was_lost_is_found_by_the_next_poll(root: HubRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (root.path / "c0.3.000" / "spool.ctl").exists():
        pytest.skip("the kernel itself reports a write to a journal")
    with system.replaced(Ticking()), closing(root.follow(timeout=1)) as following:
        assert list(following) == []
        monkeypatch.setattr(SpoolFiles, "wake", lambda self: None)
        for number in range(CLIENTS):
            with root.client(f"c{number}") as shards:
                shards.append(b"unheard")
            assert [record.client for record in following] == [f"c{number}"]


class Deaf(Ticking):
    """No event comes; a poll takes long, and so does a look for new logs."""

    def __init__(self) -> None:
        super().__init__()
        self.polls = 0

    def wait_readable(self, fd: int, timeout: float) -> bool:
        self.polls += timeout > 0
        self.time += timeout
        return False

    def names(self, path: str | os.PathLike[str]) -> list[str]:
        self.time += 0.01
        return super().names(path)


@pytest.fixture
def few(tmp_path: Path) -> Iterator[tuple[HubRoot, Any, Deaf]]:
    """Yield a root of 63 journals, a follower of it, and the port that keeps all events from the follower."""
    with hub.create(tmp_path / "few") as root:
        for bits in range(6):
            root.create_client(f"c{bits}", bits=bits, format="kvj").close()
        with system.replaced(Deaf()) as port, closing(root.follow(timeout=0)) as following:
            assert isinstance(port, Deaf)
            assert list(following) == []
            assert len(following.sources) == merge.FEW - 1
            following.timeout = None
            yield root, following, port


def test_a_lost_event_of_one_of_few_journals_costs_two_polls_at_most(few: tuple[HubRoot, Any, Deaf]) -> None:
    root, following, port = few
    for bits in range(6):
        with root.client(f"c{bits}") as shards:
            for index, log in enumerate(shards.shards):
                port.polls = 0
                log.append(b"unheard")
                record = next(following)
                assert (record.client, record.shard) == (f"c{bits}", index)
                assert port.polls <= 2


def test_a_new_client_among_few_whose_event_was_lost_costs_two_polls_at_most(few: tuple[HubRoot, Any, Deaf]) -> None:
    root, following, port = few
    with root.create_client("new", bits=0, format="kvj") as shards:
        shards.append(b"first")
    port.polls = 0
    assert next(following).client == "new"
    assert port.polls <= 2


def test_events_that_an_exception_of_a_signal_handler_took_cost_two_polls_at_most(root: HubRoot) -> None:
    class Interrupted(Exception):
        """Comes out of a signal handler."""

    class Interrupting(Ticking):
        """Raises once, right after events were read."""

        polls = 0
        is_due = False

        def read_events(self, fd: int) -> bytes:
            events = super().read_events(fd)
            if self.is_due:
                self.is_due = False
                raise Interrupted
            return events

        def wait_readable(self, fd: int, timeout: float) -> bool:
            self.polls += timeout > 0
            return super().wait_readable(fd, timeout)

    with system.replaced(Interrupting()) as port, closing(root.follow(timeout=0)) as following:
        assert list(following) == []
        assert isinstance(port, Interrupting)
        following.timeout = None
        for number in (3, 20):
            with root.client(f"c{number}") as shards:
                shards.append(b"heard")
            port.is_due = True
            with pytest.raises(Interrupted):
                next(following)
            port.polls = 0
            assert next(following).client == f"c{number}"
            assert port.polls <= 2


def test_a_removed_client_is_noticed_by_an_event_and_not_by_a_poll(root: HubRoot) -> None:
    with system.replaced(Ticking()), closing(root.follow(timeout=0.4)) as following:
        with root.client("c4") as shards:
            for log in shards.shards:
                log.append(b"last")
        assert len(list(following)) == 1 << BITS
        for path in root.path.glob("c4.*"):
            shutil.rmtree(path)
        assert list(following) == []
        assert len(following.sources) == SHARDS - (1 << BITS)


def test_a_removed_client_leaves_no_watch_and_no_descriptor(root: HubRoot, open_files: Callable[[], set[str]]) -> None:
    with system.replaced(Stopped()), closing(root.follow(timeout=1)) as following:
        assert list(following) == []
        watcher = following._watcher
        assert watcher is not None
        before = len(watcher._keys)
        for path in root.path.glob("c4.*"):
            shutil.rmtree(path)
        assert list(following) == []
        assert len(following.sources) == SHARDS - (1 << BITS)
        assert len(watcher._keys) == before * (CLIENTS - 1) // CLIENTS + (1 if before % CLIENTS else 0)
        assert {name for name in open_files() if "/c4.3." in name} == set()
        assert not any(name.startswith("c4.") for name in following.names)  # type: ignore[attr-defined]


def test_a_journal_s_old_segments_are_watched_no_more(tmp_path: Path) -> None:
    with hub.create(tmp_path / "root") as root, root.create_client("a", bits=0, format="kvj", segment_bytes=4096) as shards:
        with system.replaced(Stopped()), closing(root.follow(timeout=0.1)) as following:
            for _ in range(20):
                shards.append(bytes(3000))
                assert len(list(following)) == 1
            assert following._watcher is not None
            assert len(following._watcher._keys) == 3  # the root, the journal's directory, one segment


def test_what_was_watched_under_a_key_is_watched_no_more(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0")
    (tmp_path / "b").write_bytes(b"0")
    with closing(Watcher()) as watcher:
        watcher.watch(tmp_path / "a", CHANGED, "a")
        watcher.watch(tmp_path / "b", CHANGED, "b")
        watcher.unwatch("a")
        watcher.unwatch("unknown")
        (tmp_path / "a").write_bytes(b"1")
        (tmp_path / "b").write_bytes(b"1")
        assert watcher.wait(30) <= {"b"}  # type: ignore[operator]
        (tmp_path / "b").unlink()
        while watcher._keys:
            watcher.wait(30)


def test_a_command_that_opens_a_root_may_have_as_many_files_as_it_can(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.create(tmp_path / "root").close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        assert main(["hub", "clients", str(tmp_path / "root")]) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
