"""The times at which items are on disk: the order of flushes, one flush for all waiters, and the effects of a flush that fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import FailingPort

from kvspool import errors, system
from kvspool.queue import ChunkQueue

Make = Callable[..., ChunkQueue]


class Recording(system.Port):
    """Notes what is written, flushed and removed, by the names of the files."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def note(self, verb: str, fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        self.calls.append(f"{verb} {'directory' if os.path.isdir(name) else os.path.basename(name)}")

    def write(self, fd: int, data: bytes, at: int) -> None:
        super().write(fd, data, at)
        self.note(f"write {at}", fd)

    def flush_data(self, fd: int) -> None:
        super().flush_data(fd)
        self.note("flush", fd)

    def flush(self, fd: int) -> None:
        super().flush(fd)
        self.note("flush", fd)

    def remove(self, path: str | os.PathLike[str]) -> None:
        super().remove(path)
        self.calls.append(f"remove {os.path.basename(path)}")


def recorded(call: Callable[[], object]) -> list[str]:
    port = Recording()
    with system.replaced(port):
        call()
    return [words for words in port.calls if not words.startswith(("write 4", "write 0 queue.dat."))]  # doorbells, fresh chunks


def test_a_new_chunk_is_on_disk_before_what_leads_to_it_and_that_before_put_returns(interpreted: None, make: Make) -> None:
    one = make(durability="disk")
    first = recorded(lambda: one.put(bytes(40)))
    assert first[:4] == ["flush queue.dat.1", "flush directory", "write 0 queue.dat", "flush queue.dat"]
    assert first[-1] == "flush queue.dat.1"
    second = recorded(lambda: one.put(bytes(40)))
    assert second[:4] == ["flush queue.dat.2", "flush directory", "write 8 queue.dat.1", "flush queue.dat.1"]
    assert second[-1] == "flush queue.dat.2"
    third = recorded(lambda: one.put(b"fits"))
    assert third == ["flush queue.dat.2"], "one flush for an entry that needs no chunk"


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_the_header_is_on_disk_before_a_consumed_chunk_goes_at_every_level(interpreted: None, make: Make, durability: str) -> None:
    one = make(durability=durability)
    one.put_many([bytes(40)] * 2)
    calls = recorded(one.get)
    at = calls.index("remove queue.dat.1")
    assert calls[:at][-2:] == ["write 0 queue.dat", "flush queue.dat"]


def test_a_get_at_the_level_disk_is_on_disk_when_it_returns_and_at_the_level_memory_nothing_is_flushed(
    interpreted: None, make: Make
) -> None:
    one = make(durability="disk")
    one.put_many([b"a", b"b", b"c"])
    assert recorded(one.get) == ["flush queue.dat.1"]
    other = make()
    assert recorded(other.get) == []
    assert recorded(lambda: other.put(b"d")) == []
    assert {"flush queue.dat", "flush queue.dat.1", "flush directory"} <= set(recorded(other.sync))


def test_what_another_handle_made_without_a_flush_is_rooted_by_the_first_durable_put(interpreted: None, make: Make) -> None:
    make().put_many([bytes(40)] * 3)
    one = make(durability="disk")
    calls = recorded(lambda: one.put(b"a"))
    assert calls == ["flush queue.dat.1", "flush queue.dat.2", "flush directory", "flush queue.dat", "flush queue.dat.3"]
    assert recorded(lambda: one.put(b"b")) == ["flush queue.dat.3"]


def test_who_waited_for_another_handles_flush_does_without_one_of_his_own(interpreted: None, make: Make) -> None:
    one, other = make(chunk_bytes=4096, durability="disk"), make(durability="disk")
    one.put(b"first")
    other.put(b"first of the other")
    chunk, tail = other._chain.last, other._ends.tail  # type: ignore[union-attr]
    assert chunk is not None
    with other._held() as chain:
        chain.put([b"second"], 0, 9)
        tail = chain.ends.tail
    one.put(b"third")  # its flush covers the second one, too
    assert recorded(lambda: other._flusher.reach(chunk, -1, tail, 1)) == []
    assert recorded(lambda: other._flusher.reach(chunk, -1, tail + 9, 1)) == ["flush queue.dat.1"][: 1 - (tail + 9 <= one._ends.tail)]


def test_threads_that_come_during_a_flush_share_the_next_one(make: Make) -> None:
    class Slow(Recording):
        """The first flush ends when all entries are in the queue."""

        def flush_data(self, fd: int) -> None:
            super().flush_data(fd)
            while len(self.calls) == 1 and one.qsize() < 33:
                pass

    one = make(chunk_bytes=1 << 16, durability="disk")
    one.put(b"first")
    port = Slow()
    with system.replaced(port):
        threads = [threading.Thread(target=one.put, args=(b"%d" % at,)) for at in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert port.calls == ["flush queue.dat.1"] * 2


def test_an_entry_whose_flush_fails_is_in_the_queue_and_the_handle_puts_no_more(interpreted: None, make: Make) -> None:
    one = make(durability="disk")
    one.put(b"first")
    with system.replaced(FailingPort(1, errno.EIO, ("flush_data",))), pytest.raises(errors.Unsettled) as caught:
        one.put(b"second")
    assert isinstance(caught.value, errors.NotDurable)
    assert isinstance(caught.value.__cause__, errors.Poisoned)
    assert list(one) == [b"first", b"second"]
    with pytest.raises(errors.Poisoned):
        one.put(b"third")
    with pytest.raises(errors.Poisoned):
        one.sync()
    assert one.stats().sync_error == errno.EIO
    with make() as other:
        assert list(other) == [b"first", b"second"]


def test_an_entry_that_was_taken_and_not_flushed_is_returned_with_the_error(interpreted: None, make: Make) -> None:
    one = make(durability="disk")
    one.put_many([b"a", b"b"])
    with system.replaced(FailingPort(1, errno.EIO, ("flush_data",))), pytest.raises(errors.Unsettled) as caught:
        one.get()
    assert caught.value.taken == [b"a"]
    assert list(one) == [b"b"]


def test_the_level_os_puts_all_on_disk_at_an_interval_and_when_it_is_closed(interpreted: None, make: Make, path: Path) -> None:
    flushed = threading.Event()

    class Waiting(Recording):
        def flush_data(self, fd: int) -> None:
            super().flush_data(fd)
            if self.calls[-1] == "flush queue.dat.1":
                flushed.set()

    port = Waiting()
    with system.replaced(port):
        one = make(durability="os", sync_interval=0.01)
        one.put(b"a")
        assert flushed.wait(30)
        one.put(b"b")
        port.calls.clear()
        one.close()
    assert "flush queue.dat.1" in port.calls
