"""The append lock: one owner at a time, a dead owner is replaced, a living one never."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from children import Died, in_child, start
from loops import interpreted
from rings import Ring, append_lock, lock_twin

import kvspool
from kvspool import Spool, errors, system
from kvspool.engine import locks
from kvspool.errors import Closed
from kvspool.kernel import frames_py as frames
from kvspool.kernel import lock_py
from kvspool.kernel.lock_py import OWNER, STEP, WAITERS, WRITER_SLOTS_AT
from kvspool.system.descriptor import Descriptor

MakeRing = Callable[..., Ring]
LONG = 10**12  # ns: longer than any test
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def ring(make_ring: MakeRing, twin: ModuleType) -> Ring:
    return make_ring(twin)


@pytest.fixture
def compiled() -> ModuleType:
    return pytest.importorskip("kvspool.kernel.frames_c")


def word(ring: Ring) -> int:
    return ring.words[frames.LOCK]


# The word.


def test_the_word_names_the_owner_until_it_frees_the_lock(ring: Ring) -> None:
    lock = ring.append_lock()
    assert lock.take()
    assert word(ring) == lock.own and word(ring) & OWNER
    lock.free()
    assert word(ring) == 0


def test_no_other_handle_takes_a_lock_that_is_taken(ring: Ring) -> None:
    one, other = ring.append_lock(), ring.append_lock()
    assert one.take()
    assert not other.take()
    assert not one.take(), "not twice either"
    one.free()
    assert other.take()
    assert not one.take()
    one.free()
    assert other.is_taken and not one.take()


def test_each_take_has_another_generation_and_the_bit_of_waiters_is_no_part_of_it(ring: Ring, twin: ModuleType) -> None:
    fd = os.open(f"/proc/self/fd/{ring.lock_file}", os.O_RDWR)
    try:
        lock = append_lock(lock_twin(twin), ring.control, fd, 2**15 - 3)  # the carry comes soon
        seen = set()
        for _ in range(8):
            assert lock.take()
            seen.add(word(ring))
            lock.free()
        assert len(seen) == 8
        assert not any(each & WAITERS for each in seen)
        assert {each >> 32 for each in seen} == {0, 1}
    finally:
        os.close(fd)


def test_handles_that_are_open_at_the_same_time_have_slots_of_their_own(ring: Ring) -> None:
    slots = set()
    for _ in range(5):
        lock = ring.append_lock()
        assert lock.take()
        slots.add(word(ring) & OWNER)
        lock.free()
    assert len(slots) == 5


# Killed owners.


def test_a_dead_owner_is_replaced_at_once(ring: Ring) -> None:
    for _ in range(3):
        assert ring.append_lock().take()
        ring.kill()
        assert word(ring)
    lock = ring.append_lock()
    assert lock.take()
    lock.free()
    assert word(ring) == 0


def test_a_word_that_names_a_slot_which_a_new_handle_got_is_replaced(ring: Ring, twin: ModuleType) -> None:
    fds = [os.open(f"/proc/self/fd/{ring.lock_file}", os.O_RDWR) for _ in range(2)]
    dead, heir = (append_lock(lock_twin(twin), ring.control, fd, 7) for fd in fds)
    assert dead.take()
    os.close(fds[0])
    assert heir.take(), "the slot is its own now, and it doesn't own the word"
    assert heir.own & OWNER == dead.own & OWNER
    os.close(fds[1])


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_word_says_only_a_living_owner_keeps_the_lock(ring: Ring, seed: int) -> None:
    noise = random.Random(seed)
    bystander = ring.append_lock()
    assert bystander.take()
    bystander.free()
    for _ in range(200):
        said = noise.choice([noise.getrandbits(64), noise.getrandbits(32), noise.getrandbits(16), WAITERS, OWNER, 1, 2**64 - 1])
        if said & OWNER == bystander.own & OWNER:
            continue
        ring.words[frames.LOCK] = said
        lock, other = ring.append_lock(), ring.append_lock()
        assert lock.take()
        assert not other.take()
        lock.free()
        assert word(ring) == 0
        ring.kill()
        bystander = ring.append_lock()
        assert bystander.take()
        bystander.free()


def test_a_word_that_names_a_living_handle_is_left_alone(ring: Ring) -> None:
    """So a control block that was restored from a copy may at worst make others wait for that handle, which the error names."""
    living, other = ring.append_lock(), ring.append_lock()
    assert living.take()
    said = living.own
    living.free()
    if ring.twin.__name__.endswith("_py"):
        pytest.skip("an interpreted handle owns the whole gate, so that nobody else can have the word")
    ring.words[frames.LOCK] = said
    assert not other.take()
    assert living.take(), "the handle itself knows that it doesn't have the lock"
    living.free()
    assert other.take()


# Waiting.


def test_a_waiter_is_woken_when_the_lock_is_freed(ring: Ring, compiled: ModuleType) -> None:
    if ring.twin.__name__.endswith("_py"):
        pytest.skip("interpreted, nobody is woken: a waiter looks again after a while")
    owner, waiter = ring.append_lock(), ring.append_lock()
    assert owner.take()
    assert not waiter.take()
    got: list[bool] = []

    def wait() -> None:
        while not waiter.take():
            waiter.rest(LONG)
        got.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    while not word(ring) & WAITERS:
        pass
    owner.free()
    thread.join()
    assert got == [True]
    assert word(ring) & WAITERS, "others may wait still"
    waiter.free()
    assert word(ring) == 0


@pytest.mark.parametrize("number", range(20))
def test_a_lock_that_becomes_free_in_time_is_taken_in_the_same_step(ring: Ring, number: int) -> None:
    owner, waiter = ring.append_lock(), ring.append_lock()
    assert owner.take()

    def free() -> None:
        for _moment in range(number << 8):
            pass
        owner.free()

    thread = threading.Thread(target=free)
    thread.start()
    assert waiter.take_within(LONG)
    thread.join()
    assert word(ring) & ~WAITERS == waiter.own
    waiter.free()
    assert word(ring) == 0


def test_a_lock_that_stays_taken_is_abandoned_after_its_time(ring: Ring) -> None:
    owner, waiter = ring.append_lock(), ring.append_lock()
    assert owner.take()
    assert not waiter.take_within(1_000_000)
    assert not waiter.take_within(0)
    assert not waiter.is_taken and word(ring) & ~WAITERS == owner.own
    owner.free()
    assert waiter.take_within(LONG)
    waiter.free()


def test_closing_a_lock_ends_the_wait_for_it(ring: Ring) -> None:
    owner, waiter = ring.append_lock(), ring.append_lock()
    assert owner.take()
    closer = threading.Thread(target=waiter.close)
    closer.start()
    with pytest.raises(Closed):
        waiter.take_within(LONG)
    closer.join()
    owner.free()


def test_no_writer_sleeps_for_a_free_lock(ring: Ring, compiled: ModuleType) -> None:
    lock = ring.append_lock()
    assert lock.take()
    lock.free()
    lock.rest(1000)
    assert word(ring) == 0


def test_a_closed_lock_is_never_taken(ring: Ring) -> None:
    lock = ring.append_lock()
    assert lock.take()
    lock.close()
    with pytest.raises(Closed):
        lock.take()
    lock.rest(LONG)
    lock.free()


# The twins.


def test_an_interpreted_writer_waits_for_compiled_handles_to_close(make_ring: MakeRing, compiled: ModuleType) -> None:
    ring = make_ring(compiled)
    fds = [os.open(f"/proc/self/fd/{ring.lock_file}", os.O_RDWR) for _ in range(2)]
    fast = append_lock(lock_twin(compiled), ring.control, fds[0], 1)
    slow = append_lock(lock_py, ring.control, fds[1], 2)
    assert slow.take()
    assert not fast.take()
    slow.free()
    assert fast.take()
    assert not slow.take()
    fast.free()
    assert not slow.take(), "a compiled handle may swap the word at any moment"
    os.close(fds[0])
    assert slow.take()
    os.close(fds[1])


# Real processes.


def own(path: Path, said: int) -> None:
    """Take the append lock of the log, say so, and keep it."""
    with kvspool.open(path) as log:
        log.append(b"of the child")
        assert log._live().append_lock.take()
        os.write(said, b"x")
        signal.pause()


@pytest.fixture
def owner(log: Spool) -> Iterator[Any]:
    """A child that has the append lock."""
    read_end, write_end = os.pipe()
    child = start(lambda: own(log.path, write_end))
    os.close(write_end)
    assert os.read(read_end, 1)
    os.close(read_end)
    yield child
    try:
        os.kill(child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(Died):
            child()
    except ProcessLookupError:
        pass


def test_an_owner_stopped_then_killed_is_waited_for_then_replaced(log: Spool, owner: Any) -> None:
    log.timeout = 0.05
    os.kill(owner.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
    with pytest.raises(errors.LockTimeout, match=rf"process {owner.pid} \(stopped\)"):
        log.append(b"x")
    os.kill(owner.pid, signal.SIGKILL)
    with pytest.raises(Died):
        owner()
    log.timeout = 0
    assert log.append(b"x") == 1


def test_a_waiter_gets_the_lock_of_an_owner_that_is_killed_meanwhile(log: Spool, owner: Any) -> None:
    log.timeout = 60
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(log.append(b"at last")))
    thread.start()
    lock = log._live().control.cast("Q")
    try:
        while kvspool.kernel.frames.TWIN == "compiled" and not lock[frames.LOCK] & WAITERS:
            pass
        os.kill(owner.pid, signal.SIGKILL)
        thread.join()
    finally:
        lock.release()
    assert got == [1]


def test_a_child_of_an_owner_keeps_no_slot_alive(log: Spool) -> None:
    """The child inherits the descriptor of a lock whose owner then ends."""
    read_end, write_end = os.pipe()
    hold_end, release_end = os.pipe()

    def parent() -> None:
        log.append(b"x")
        assert log._live().append_lock.take()
        if os.fork() == 0:
            os.close(release_end)
            os.write(write_end, b"x")
            os.read(hold_end, 1)  # until the test ends
            os._exit(0)
        signal.pause()

    child = start(parent)
    assert os.read(read_end, 1)
    os.kill(child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    os.waitpid(child.pid, 0)  # type: ignore[attr-defined]
    log.timeout = 0
    try:
        assert log.append(b"y") == 1
    finally:
        for fd in (read_end, write_end, hold_end, release_end):
            os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes PID namespaces")
def test_owners_in_two_pid_namespaces_with_equal_pids_are_distinguished(log: Spool) -> None:
    """Each child is process 1 of a namespace of its own; one ends while it holds the lock, the other one keeps a slot."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def isolated(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if libc.unshare(0x20000000):  # CLONE_NEWPID
                os._exit(77)
            if (child := os.fork()) == 0:
                assert os.getpid() == 1
                work()
                os._exit(0)
            os.waitpid(child, 0)

        return run

    ends = [os.pipe() for _ in range(2)]

    def live() -> None:
        with kvspool.open(log.path) as mine:
            mine.append(b"alive")
            os.write(ends[0][1], b"x")
            os.read(ends[1][0], 1)  # until the test ends

    def die() -> None:
        with kvspool.open(log.path) as mine:
            mine.append(b"x")
            assert mine._live().append_lock.take()
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)  # the first process of a namespace ignores its own signal: it ends here, with the lock

    living = start(isolated(live))
    os.close(ends[0][1])
    if not os.read(ends[0][0], 1):
        pytest.skip("no PID namespaces here")
    in_child(isolated(die))
    log.timeout = 0
    try:
        assert log.append(b"next") == 2
    finally:
        os.write(ends[1][1], b"x")
        living()
        os.close(ends[1][1])
        os.close(ends[0][0])
        os.close(ends[1][0])


def test_sixteen_writers_and_sixty_four_readers_all_come_to_their_end(log: Spool) -> None:
    each = 5  # all fit into the ring
    writers = [start(lambda: [kvspool.open(log.path, timeout=60).append(b"x") for _ in range(each)]) for _ in range(16)]
    readers = [
        start(lambda: [record.sequence for record in kvspool.open(log.path).follow(0, limit=16 * each, timeout=60)]) for _ in range(64)
    ]
    given = sorted(sequence for writer in writers for sequence in writer())
    assert given == list(range(16 * each))
    assert all(reader() == given for reader in readers)


def test_a_handle_that_is_closed_in_another_thread_while_one_waits_ends_both(log: Spool, owner: Any) -> None:
    waiting = threading.Event()
    ends: list[type[BaseException]] = []

    def wait() -> None:
        waiting.set()
        with pytest.raises((errors.LockTimeout, Closed)) as caught:
            other.append(b"never", timeout=0.5)
        ends.append(caught.type)

    other = kvspool.open(log.path)
    other._live()
    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    other.close()
    thread.join()
    assert len(ends) == 1


def test_a_log_that_was_copied_while_it_was_being_written_is_appended_to(log: Spool, owner: Any, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(log.path, tmp_path / "copy")
    with kvspool.open(tmp_path / "copy", timeout=0) as copy:
        assert copy.append(b"y") == 1


def test_the_bytes_of_slots_are_those_that_the_format_names(log: Spool) -> None:
    from kvspool.spool import format

    assert (format.GATE, format.WRITER_LOCKS) == (0, WRITER_SLOTS_AT) == (lock_py.GATE, 65536)


# States that only a fault can cause.


def test_an_interrupted_handle_frees_no_lock_of_another_one(ring: Ring) -> None:
    """A signal handler raised before the attempt came to the word; `locks.appending` frees the lock then."""
    owner, other = ring.append_lock(), ring.append_lock()
    assert owner.take()
    said = word(ring)
    assert not other.take()
    other.free()
    assert word(ring) == said
    owner.free()
    assert owner.take()
    ring.words[frames.LOCK] = said + 9 * STEP  # as if another handle had it now
    owner.free()
    assert word(ring) == said + 9 * STEP


def test_an_owner_unknown_to_the_kernel_counts_as_alive(make_ring: MakeRing, compiled: ModuleType) -> None:
    ring = make_ring(compiled)
    owner, waiter = ring.append_lock(), ring.append_lock()
    assert waiter.take()
    waiter.free()
    assert owner.take()
    only_a_name = os.open(f"/proc/self/fd/{ring.lock_file}", os.O_PATH)
    os.dup2(only_a_name, waiter.fd)  # the kernel refuses to look at a lock through it
    os.close(only_a_name)
    said = word(ring)
    assert not waiter.take()
    assert word(ring) == said


def test_an_exception_out_of_a_signal_handler_at_any_opcode_leaves_the_lock_to_others(make_ring: MakeRing) -> None:
    """Interpreted, where a handler may run between any two opcodes of the lock; the holder tries once more to free it."""
    ring = make_ring(interpreted("kvspool.kernel.frames"))
    other = ring.append_lock()
    codes = {function.__code__ for function in vars(lock_py.AppendLock).values() if hasattr(function, "__code__")}
    codes.add(locks.appending.__enter__.__code__)
    at = 0
    while True:
        at += 1
        holding = locks.appending(ring.append_lock(), 0, lambda: "nobody")
        if not interrupted_at_opcode(at, codes, holding):
            break
        del holding  # an exception after the last step of `__enter__` keeps the lock until then
        assert other.take(), f"the lock is stuck after an exception at opcode {at}"
        other.free()
        ring.kill()
        other = ring.append_lock()
    assert at > 100


class Interrupt(Exception):
    """Raised by the handler."""


def interrupted_at_opcode(number: int, codes: set[Any], holding: Any) -> bool:
    """Hold the lock for a moment; raise Interrupt before the given opcode of these functions, and return whether there was one."""
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if not left:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # of any frame: otherwise Python 3.12 doesn't look for those that ask later
    sys.settrace(trace)
    try:
        with holding:
            pass
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_lock_that_is_forgotten_after_its_file_was_closed_leaves_the_next_file_alone(make_ring: MakeRing, tmp_path: Path) -> None:
    ring = make_ring(interpreted("kvspool.kernel.frames"))
    path = tmp_path / "lock"
    path.touch()
    file = Descriptor(path, os.O_RDWR)
    number = file.number
    holding = locks.appending(append_lock(lock_py, ring.control, number, 1), 0, lambda: "nobody", file)
    holding.__enter__()  # and the block never ends
    file.close()
    with Descriptor(path, os.O_RDWR) as again, Descriptor(path, os.O_RDWR) as other:
        assert again == number
        assert system.port.try_lock(again, lock_py.GATE)
        del holding
        gc.collect()
        assert not system.port.try_lock(other, lock_py.GATE), "the lock of the file that has the number now"


def test_an_interpreted_writer_gets_an_error_that_names_compiled_handles(log: Spool, compiled: ModuleType) -> None:
    log.append(b"x")
    if kvspool.kernel.frames.TWIN != "compiled":
        pytest.skip("the log is open in this twin")
    code = (
        "import sys, kvspool, pytest\n"
        "with kvspool.open(sys.argv[1], timeout=0) as log:\n"
        "    with pytest.raises(kvspool.errors.LockTimeout, match='compiled kvspool.*build_ext'):\n"
        "        log.append(b'y')\n"
    )
    subprocess.run([sys.executable, "-c", code, log.path], env={**os.environ, "KVSPOOL_NO_EXTENSIONS": "1"}, check=True, timeout=60)


def test_a_child_that_is_forked_during_an_append_neither_owns_nor_frees_the_lock(log: Spool) -> None:
    log.append(b"first")

    def append_in_a_child(writer: Any) -> bool:
        def child() -> str:
            with pytest.raises(errors.LockTimeout):
                log.append(b"of the child", timeout=0)
            return "refused"

        assert in_child(child) == "refused"
        with kvspool.open(log.path, timeout=0) as other, pytest.raises(errors.LockTimeout):
            other.append(b"the parent has the lock still")
        return True

    assert log._locked(append_in_a_child, 1.0)
    assert in_child(lambda: log.append(b"of the child")) == 1
    assert log.append(b"of the parent") == 2
