"""A view of a record in the ring: no writer overwrites it, and a killed process that had pinned it stops no other process."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Died, in_child, let_others_read, start
from loops import interpreted
from rings import Ring, Watched

import kvspool
from kvspool import GapError, Spool, system
from kvspool.errors import LogVanished, OutOfRange, Pinned, SpoolFull
from kvspool.kernel import frames_py
from kvspool.kernel.writer_py import FrameWriter
from kvspool.spool import format

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def pins(log: Spool) -> int:
    return log._live().reader(0, 0).word(frames_py.PINS)


def test_a_view_is_the_value_without_a_copy_and_ends_with_its_block(log: Spool) -> None:
    log.append(b"value", key=b"key")
    log.append("text")
    with log.view(0) as value:
        assert bytes(value) == b"value"
        assert value.readonly
        assert pins(log) == 1
    with pytest.raises(ValueError, match="released"):
        value[0]
    with log.view(1) as one, log.view(1) as other:
        assert one == other == b"text"
    with pytest.raises(OutOfRange, match="record 2 is not written yet"), log.view(2):
        pass


def test_a_durable_reader_moves_after_what_it_viewed(log: Spool) -> None:
    log.append_many([b"%d" % at for at in range(5)])
    with log.reader("viewer") as reader:
        for at in range(2):
            with reader.view() as value:
                assert bytes(value) == b"%d" % at
                assert reader.sequence == at
        with pytest.raises(KeyError), reader.view():
            raise KeyError
        assert reader.sequence == 2
        iterator = reader.read()
        assert next(iterator).value == b"2"
        with reader.view() as value:
            assert bytes(value) == b"3"
        assert next(iterator).value == b"4"
        assert reader.commit() == 5
        log.append_many([bytes(900)] * 6)
        with pytest.raises(GapError) as raised, reader.view():
            pass
        assert raised.value.gap.first == 5
        with reader.view() as value:
            assert len(value) == 900


@pytest.mark.parametrize("policy", ["overwrite", "block", "raise"])
def test_a_writer_has_no_room_over_a_pin_and_continues_when_it_is_gone(tmp_path: Path, policy: str) -> None:
    with kvspool.create(tmp_path / "log", capacity=4096, policy=policy, timeout=0.05) as log:
        log.append_many([bytes([at]) * 900 for at in range(4)])
        before = list(log)
        with log.view(1) as value:
            assert log.append(bytes(900)) == 4, "the record before it can go"
            for append in (lambda: log.append(bytes(900)), lambda: log.append_many([b"", bytes(900)])):
                with pytest.raises(Pinned, match="view") as raised:
                    append()
                assert isinstance(raised.value, SpoolFull)
            assert [record.sequence for record in log] == [1, 2, 3, 4]
            assert next(log.read()) == before[1]
            assert bytes(value) == before[1].value
        assert log.append(bytes(900)) == 5
        assert pins(log) == 0, "a writer found that nothing is pinned any more"


def test_a_waiting_writer_continues_when_the_view_of_another_process_is_closed(log: Spool) -> None:
    log.append_many([bytes(900)] * 4)
    ready, go = os.pipe(), os.pipe()

    def look() -> bytes:
        with kvspool.open(log.path) as other, other.view(0) as value:
            os.write(ready[1], b"!")
            os.read(go[0], 1)
            return bytes(value)

    looking = start(look)
    os.read(ready[0], 1)
    with pytest.raises(Pinned):
        log.append(bytes(900), timeout=0)
    appending = start(lambda: log.append(b"x" * 900, timeout=60))
    os.write(go[1], b"!")
    assert appending() == 4
    assert looking() == bytes(900)
    for fd in (*ready, *go):
        os.close(fd)


def test_a_killed_viewer_stops_no_other_process(log: Spool) -> None:
    log.append_many([bytes(900)] * 4)
    ready = os.pipe()

    def look() -> None:
        with kvspool.open(log.path) as other, other.view(0):
            os.write(ready[1], b"!")
            time.sleep(60)

    looking = start(look)
    os.read(ready[0], 1)
    with pytest.raises(Pinned):
        log.append(bytes(900), timeout=0)
    os.kill(looking.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert log.append(bytes(900), timeout=60) == 4
    with pytest.raises(Died):
        looking()
    for fd in ready:
        os.close(fd)


def test_a_forked_child_does_not_keep_the_pin(log: Spool) -> None:
    log.append_many([bytes(900)] * 4)
    ready, go = os.pipe(), os.pipe()
    with log.view(0):
        child = start(lambda: (os.write(ready[1], b"!"), os.read(go[0], 1)))
        os.read(ready[0], 1)
    assert log.append(bytes(900), timeout=1) == 4
    os.write(go[1], b"!")
    child()
    for fd in (*ready, *go):
        os.close(fd)


def test_a_view_stays_what_it_is_while_writers_hammer_a_tiny_ring(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kvspool.create(path, capacity=4096).close()

    stop = os.pipe()
    os.set_blocking(stop[0], False)

    def write(seed: int) -> int:
        with kvspool.open(path, timeout=60) as log:
            for number in range(1 << 30):
                body = bytes([seed, number & 255]) * (number % 300)
                log.append(zlib.crc32(body).to_bytes(4, "little") + body)
                try:
                    os.read(stop[0], 1)
                    return number + 1
                except BlockingIOError:
                    pass
        raise AssertionError

    def look() -> int:
        seen = 0
        with kvspool.open(path) as log:
            while seen < 100 or log.stats().next_sequence <= 200:
                try:
                    with log.view(max(0, log.stats().next_sequence - 2)) as value:
                        for _ in range(3):
                            assert zlib.crc32(value[4:]) == int.from_bytes(value[:4], "little")
                        seen += 1
                except (GapError, OutOfRange):
                    pass
        return seen

    writers = [start(lambda seed=seed: write(seed)) for seed in range(2)]
    viewers = [start(look) for _ in range(2)]
    assert all(wait() >= 100 for wait in viewers)
    os.write(stop[1], b"!!")
    appended = sum(wait() for wait in writers)
    with kvspool.open(path) as log:
        assert log.stats().next_sequence == appended > 200
    for fd in stop:
        os.close(fd)


@pytest.mark.parametrize("pins_at", range(3))
def test_a_pin_and_a_writer_see_each_other_at_every_store(make_ring: Callable[..., Ring], tmp_path: Path, pins_at: int) -> None:
    """A reader that pins before any store of an append finds the frame gone, or the writer does not overwrite it."""
    data = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    os.truncate(data, format.DATA_START + 1024)
    refused = gone = 0
    for store in range(60):
        ring = make_ring(interpreted("kvspool.kernel.frames"))
        ring.fill([bytes([at]) * 90 for at in range(20)])
        position, sequence = ring.earliest()
        for _ in range(pins_at):
            reader = ring.reader(position, sequence)
            reader.fetch(ring.mark()[0], 1, None)
            position, sequence = reader.position, reader.sequence
        seen = 0
        pinned: list[Any] = []
        lock = os.open(tmp_path / "data", os.O_RDONLY)

        def before(
            *_: object, last: int = store, lock: int = lock, ring: Ring = ring, place: Any = (position, sequence), pinned: Any = pinned
        ) -> None:
            nonlocal seen
            seen += 1
            if seen == last + 1:
                reader = ring.reader(*place)
                value, length, offset, stored = reader.find(ring.mark()[0]) or (0, 0, 0, 0)
                if stored:
                    start = reader.position - stored
                    assert system.port.try_share(lock, format.DATA_START + offset, stored)
                    ring.words[frames_py.PINS] = 1
                    if reader.head() <= start:
                        pinned.append((offset, bytes(ring.data[offset : offset + stored])))

        writer = FrameWriter(
            Watched("ring", ring.data, before),  # type: ignore[arg-type]
            Watched("control", ring.control, before),  # type: ignore[arg-type]
            format.frame_seed(bytes(range(16))),
            ring.append_lock(),
            memoryview(bytes(range(1, 49))),
            data_fd=data,
        )
        got = writer.append(None, bytes(90), 0, 0, 7)
        assert writer.front[frames_py.HEAD_ECHO] <= ring.words[frames_py.HEAD]  # also where the head went back
        if pinned:
            offset, content = pinned[0]
            assert bytes(ring.data[offset : offset + len(content)]) == content
            refused += got == frames_py.NO_ROOM
        else:
            gone += 1
        assert got == frames_py.NO_ROOM or got == 20
        os.close(lock)
        if got == frames_py.NO_ROOM:
            assert writer.append(None, bytes(90), 0, 0, 7) == 20
        assert ring.read()[-1].sequence == 20  # type: ignore[union-attr]
    os.close(data)
    if pins_at == 0:
        assert refused > 0 and gone > 0


def test_a_hostile_word_costs_only_system_calls(interpreted: None, log: Spool) -> None:
    log.append_many([bytes(900)] * 4)
    asked = 0

    class Counting(system.Port):
        def locked_from(self, fd: int, at: int, length: int) -> int:
            nonlocal asked
            asked += 1
            return super().locked_from(fd, at, length)

    words = log._live().control.cast("Q")
    with system.replaced(Counting()):
        for number in range(4, 10):
            words[frames_py.PINS] = (1 << 64) - 1
            assert log.append(bytes(900)) == number
        assert words[frames_py.PINS] == 0
        assert 6 <= asked <= 24
        asked = 0
        log.append(bytes(900))
        assert asked == 0, "without views appends have no extra cost"


def test_a_log_that_was_resized_or_deleted(log: Spool) -> None:
    log.append(b"before")
    cursor = log.cursor(0)
    kvspool.resize(log.path, 8192)
    from kvspool.spool import views

    with views.view(cursor) as value, log.view(0) as other:
        assert value == other == b"before"
    for name in os.listdir(log.path):
        os.remove(log.path / name)
    with pytest.raises((LogVanished, FileNotFoundError)), log.view(0):
        pass


def test_a_user_without_write_permission_is_refused(log: Spool) -> None:
    log.append(b"x")

    def look() -> str:
        let_others_read(log.path)
        os.setuid(65534)
        with kvspool.open(log.path) as other:
            try:
                with other.view(0):
                    return "viewed"
            except PermissionError as error:
                return str(error)

    if os.getuid() != 0:
        pytest.skip("needs another user")
    assert "no permission to pin" in in_child(look)
