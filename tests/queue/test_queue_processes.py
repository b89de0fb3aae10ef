"""Several processes at one queue, the original among them."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from children import in_child, start

from kvspool import errors, system
from kvspool.queue import ChunkQueue, QueueEmpty, queue, repair
from kvspool.system import forks

Make = Callable[..., ChunkQueue]
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
ORIGINAL = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as FileChannel.tryLock: the whole file
print("locked", flush=True)
sys.stdin.read()
"""


def original(path: Path) -> subprocess.Popen[str]:
    """Start a process that holds the header as the original does, and wait until it does."""
    process = subprocess.Popen([sys.executable, "-c", ORIGINAL, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_the_original_keeps_us_out_and_is_named(make: Make, path: Path) -> None:
    make().close()
    with original(path) as process:
        for call in (lambda: ChunkQueue.open(path, timeout=0.05), lambda: repair(path, timeout=0.05)):
            with pytest.raises(errors.LockTimeout, match=f"process {process.pid} "):
                call()
        process.communicate()
    ChunkQueue.open(path).close()


def test_the_original_program_is_locked_out_while_one_handle_is_open(make: Make, path: Path) -> None:
    one, other = make(), make()
    for handle in (one, other):
        process = subprocess.run([sys.executable, "-c", ORIGINAL, path], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert "BlockingIOError" in process.stderr
        handle.close()
    with original(path) as process:
        process.communicate()


def test_another_handle_that_is_stopped_in_an_operation_is_waited_for_and_never_bypassed(make: Make, path: Path) -> None:
    one = make(timeout=0.05)
    one.put(b"a")
    fd = system.port.open(path, os.O_RDWR)
    assert system.port.try_lock(fd, queue.format.OPERATION)
    for call in (one.get, lambda: one.put(b"b"), one.qsize):
        with pytest.raises(errors.LockTimeout, match="its process id is unknown"):
            call()
    os.close(fd)
    assert one.get() == b"a"


def test_a_child_that_was_forked_has_files_of_its_own(twin: ModuleType, make: Make) -> None:
    one = make()
    one.put(b"before")

    def child() -> list[bytes]:
        one.put(b"child")
        return list(one)

    assert in_child(child) == [b"before", b"child"]
    one.put(b"after")
    assert list(one) == [b"before", b"child", b"after"]


def test_a_fork_that_python_is_not_told_of_is_noticed(monkeypatch: pytest.MonkeyPatch, interpreted: None, make: Make) -> None:
    one = make()
    one.put(b"before")
    monkeypatch.setattr(forks, "_in_child", lambda: None)
    forks._handles.discard(one)
    wait = start(lambda: (one.put(b"child"), one._chain.fd)[1])  # type: ignore[union-attr]
    wait()
    assert list(one) == [b"before", b"child"]


def test_a_child_that_ends_leaves_the_parents_share_alone(make: Make, path: Path) -> None:
    one = make()
    one.put(b"a")
    in_child(one.close)
    with pytest.raises(errors.LockTimeout):
        repair(path, timeout=0)
    assert one.get() == b"a"


def test_get_sleeps_until_another_process_puts(twin: ModuleType, make: Make) -> None:
    class Counting(system.Port):
        """Counts sleeps, and reports that a caller is about to sleep."""

        def wait_readable(self, fd: int, timeout: float) -> bool:
            self.sleeps += 1
            is_asleep.set()
            return super().wait_readable(fd, timeout)

        sleeps = 0

    one, other = make(), make()
    is_asleep = threading.Event()
    port = Counting()
    got: list[bytes] = []
    for entry in (b"first", b"second"):
        is_asleep.clear()
        with system.replaced(port):
            thread = threading.Thread(target=lambda: got.append(one.get(timeout=60)))
            thread.start()
            assert is_asleep.wait(30)
            other.put(entry)
            thread.join()
    assert got == [b"first", b"second"]
    assert port.sleeps < 200, "it sleeps, and does not spin"


def test_put_sleeps_until_another_process_makes_room(twin: ModuleType, make: Make) -> None:
    one, other = make(max_chunks=1), make()
    one.put(bytes(52))

    def child() -> None:
        one.put(b"x" * 52, timeout=60)

    wait = start(child)
    time.sleep(0.05)  # the child may sleep by now, or come later: both must do
    assert other.get(timeout=0) == bytes(52)
    wait()
    assert other.get(timeout=0) == b"x" * 52


def test_waiting_does_without_inotify(make: Make) -> None:
    from faults import BlindPort

    one = make()
    for instances in (True, False):
        with system.replaced(BlindPort(instances=instances)):
            one._sleepers.clear()
            with pytest.raises(QueueEmpty):
                one.get(timeout=0.02)


def test_a_new_header_in_the_place_of_one_that_was_waited_for_is_opened(make: Make, path: Path) -> None:
    """A process that opens a queue while its last user removes it gets the queue that is there afterwards, not the removed one."""
    make().close()
    fd = system.port.open(path, os.O_RDWR)
    assert system.port.try_lock(fd, queue.format.IN_USE)
    opened: list[ChunkQueue] = []
    thread = threading.Thread(target=lambda: opened.append(ChunkQueue.open(path, timeout=30)))
    thread.start()
    time.sleep(0.02)
    path.unlink()
    path.write_bytes(bytes(2))
    os.close(fd)
    thread.join()
    opened[0].put(b"a")
    assert path.read_bytes() == b"\0\1"
    opened[0].close()


# Kills, with a ledger outside: who puts writes down what it is about to put and what was put, who gets what it got.

ENTRY = struct.Struct("<BII")
ABOUT, DONE, MEANT, GOT = range(4)


def _put(path: Path, life: int, pipe: int) -> None:
    noise = random.Random(life)
    one = ChunkQueue.open(path, timeout=60, max_chunks=8)
    number = 0
    while True:
        count = noise.choice((1, 1, 1, 5, 40))
        os.write(pipe, ENTRY.pack(ABOUT, life, number + count))
        one.put_many([_content(life, number + at) for at in range(count)])
        number += count
        os.write(pipe, ENTRY.pack(DONE, life, number))


def _content(life: int, number: int) -> bytes:
    return struct.pack("<II", life, number) + bytes([number % 251]) * (number % 90)


def _get(path: Path, life: int, pipe: int) -> None:
    one = ChunkQueue.open(path, timeout=60)

    def meant(entry: bytes) -> bool:
        putter, number = struct.unpack_from("<II", entry)
        assert entry == _content(putter, number)
        os.write(pipe, ENTRY.pack(MEANT, putter, number))
        return True

    while True:
        entry = one.get_if(meant)
        assert entry is not None
        os.write(pipe, ENTRY.pack(GOT, *struct.unpack_from("<II", entry)))


def test_nothing_that_was_acknowledged_is_lost_or_comes_twice_while_processes_are_killed(path: Path) -> None:
    noise = random.Random(4)
    keeper = ChunkQueue.create(path, chunk_bytes=512)
    read_end, write_end = os.pipe()
    fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, 1 << 20)
    living: dict[int, tuple[Callable[[Path, int, int], None], int]] = {}
    lives = kills = killed_getters = 0

    def begin(role: Callable[[Path, int, int], None]) -> None:
        nonlocal lives
        lives += 1
        life = lives
        pid = os.fork()
        if pid == 0:
            try:
                role(path, life, write_end)
            finally:
                os._exit(1)
        living[pid] = (role, life)

    about: dict[int, int] = {}
    done: dict[int, int] = {}
    meant: set[tuple[int, int]] = set()
    got: set[tuple[int, int]] = set()
    said = bytearray()

    def listen() -> None:
        os.set_blocking(read_end, False)
        try:
            while piece := os.read(read_end, 1 << 16):
                said.extend(piece)
        except BlockingIOError:
            pass
        whole = len(said) // ENTRY.size * ENTRY.size
        for kind, life, number in ENTRY.iter_unpack(bytes(said[:whole])):
            if kind == ABOUT:
                about[life] = number
            elif kind == DONE:
                done[life] = number
            elif kind == MEANT:
                meant.add((life, number))
            else:
                assert (life, number) not in got, "an entry came twice"
                got.add((life, number))
        del said[:whole]

    for role in (_put, _put, _get, _get):
        begin(role)
    while kills <= 25 or len(got) <= 120:
        for _ in range(5):
            time.sleep(0.004)
            listen()
        victim = noise.choice(list(living))
        os.kill(victim, signal.SIGKILL)
        assert os.waitpid(victim, 0)[1] == signal.SIGKILL, "it had failed before"
        role, _ = living.pop(victim)
        kills += 1
        killed_getters += role is _get
        begin(role)
    for victim in living:
        os.kill(victim, signal.SIGKILL)
        assert os.waitpid(victim, 0)[1] == signal.SIGKILL
        killed_getters += living[victim][0] is _get
    listen()
    rest = [struct.unpack_from("<II", entry) for entry in keeper.drain()]
    assert len(set(rest)) == len(rest)
    assert got.isdisjoint(rest)
    seen = got.union(rest)
    # A getter that was killed may have taken the entry that it meant to, and not yet written it down.
    lost = {(life, number) for life, until in done.items() for number in range(until)} - seen
    assert lost <= meant
    assert len(lost) <= killed_getters
    for life, number in seen:
        assert number < about[life], "no process put it"
    keeper.close()
    assert not any(name == path.name for name in os.listdir(path.parent))
    os.close(read_end)
    os.close(write_end)
