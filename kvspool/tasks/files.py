"""The file of a task list: its memory, which all workers map, and the locked bytes that prove that they live. `layout` has its bytes.

**Life.** A worker locks its byte of the file while it is one; the kernel frees the byte when the process ends. The worker keeps the file
open for writing, so its end also closes the file, and inotify reports that to every other worker (IN_CLOSE_WRITE). The event is only a
wake-up: the byte decides. See docs/decisions/0042-tasks.md.

The file is reserved in full before it has its name: a store can't fail on a full disk, and a file of another size is damaged.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.wakeups import CHANGED, Watcher
from kvspool.errors import Corruption, TooManyWorkers, UnknownVersion
from kvspool.kernel import tasks_py as words
from kvspool.kernel.tasks import TaskWindow
from kvspool.system import disk, holders
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle
from kvspool.tasks import layout
from kvspool.tasks.layout import TaskHeader, WorkerWords

CLOSED = 0x8  # IN_CLOSE_WRITE
SUFFIX = ".tasks"


def file_name(name: str) -> str:
    """Return the name of the file of a task list, whose name may have characters that a file name can't have."""
    from hashlib import blake2b

    return f"tasks-{blake2b(name.encode(), digest_size=16).hexdigest()}{SUFFIX}"


class TaskFile(Handle):
    """The open file of a task list, of one worker. `close` frees its byte; in a forked child it only closes."""

    def __init__(self, path: Path, wanted: TaskHeader, start: int, timeout: float) -> None:
        """Open the file, or create it in an existing directory: with the `wanted` header, and the tasks from sequence `start` on.

        timeout: seconds to wait for a lock. Raises Corruption, UnknownVersion, TooManyWorkers, LockTimeout, or the system's OSError.
        """
        self.path = path
        self.timeout = timeout
        self.number = 0
        self._process = system.port.process_id()
        self._memory: mmap.mmap | None = None
        self._locks = self._opened(wanted, start)
        try:
            self.header = self._checked(wanted)
            with Descriptor(path, os.O_RDWR) as fd:  # of the mapping alone: a lock must not be on a mapped descriptor
                self._refuse_other(fd)
                self._memory = system.port.map(fd, self.header.size, writable=True)
            self._view = memoryview(self._memory)
            self.memory = self._view[layout.MEMORY_AT :]
            self.lock = locks.append_lock(self.memory, words.LOCK, self._locks.number)
            self.window = TaskWindow(self.memory, self.lock, self.header.window, self.header.is_ordered, 0)
        except BaseException:
            self.close()
            raise

    def _opened(self, wanted: TaskHeader, start: int) -> Descriptor:
        for _ in range(2):
            with suppress(FileNotFoundError):
                return Descriptor(self.path, os.O_RDWR)
            create(self.path, wanted, start)
        return Descriptor(self.path, os.O_RDWR)

    def _checked(self, wanted: TaskHeader) -> TaskHeader:
        header = read_header(self.path, self._locks.number)
        if header.name != wanted.name:
            raise Corruption(
                f"{self.path} is the file of the list {header.name!r}, not of {wanted.name!r}; remove it if it was copied"
            )
        return header

    def _refuse_other(self, fd: int) -> None:
        ours, there = system.port.status(self._locks.number), system.port.status(fd)
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
            raise Corruption(f"{self.path} was replaced while it was opened; open it again")

    # Locks.

    @property
    def fd(self) -> int:
        """Return the descriptor of the locks. Raises Closed."""
        return self._locks.number

    @contextmanager
    def locked(self, byte: int, what: str) -> Iterator[None]:
        """Hold the lock of a byte for the `with` block. what: what another process does while it holds it. Raises LockTimeout."""
        with locks.held(self._locks, byte, self.timeout, lambda: f"another worker {what} {self.path}; it may be stopped"):
            yield

    def try_lock(self, byte: int) -> bool:
        """Take the lock of a byte; False if another worker has it. Release it with `unlock`."""
        return system.port.try_lock(self._locks.number, byte)

    def unlock(self, byte: int) -> None:
        """Release the lock of a byte."""
        system.port.unlock(self._locks.number, byte)

    # Workers.

    def enter(self) -> int:
        """Under the lock of changes: become a worker, with a number that no other living one has. Raises TooManyWorkers."""
        for number in range(1, layout.MOST_WORKERS + 1):
            if self.try_lock(layout.LIFE + number):
                self.number = self.window.owner = number
                return number
        raise TooManyWorkers(f"the task list of {self.path} has {layout.MOST_WORKERS} workers, which is the maximum")

    def sign(self) -> None:
        """Enter this worker into the table."""
        entry = WorkerWords(*holders.ours(), system.port.now(), b"")
        at = layout.WORKERS_AT + (self.number - 1) * layout.WORKER.size
        self._view[at : at + layout.WORKER.size] = layout.WORKER.pack(entry)
        self.window.set_word(words.WORKERS, max(self.number, self.window.word(words.WORKERS)))

    def erase(self, number: int) -> None:
        """Remove a worker from the table."""
        at = layout.WORKERS_AT + (number - 1) * layout.WORKER.size
        self._view[at : at + layout.WORKER.size] = bytes(layout.WORKER.size)

    def workers(self) -> dict[int, WorkerWords]:
        """Return the workers in the table, by number; some may have ended."""
        most = min(self.window.word(words.WORKERS), layout.MOST_WORKERS)
        data = bytes(self._view[layout.WORKERS_AT : layout.WORKERS_AT + most * layout.WORKER.size])
        found = ((number, layout.WORKER.unpack(data, (number - 1) * layout.WORKER.size)) for number in range(1, most + 1))
        return {number: one for number, one in found if one.pid}

    def is_alive(self, number: int) -> bool:
        """Return whether another worker holds the byte of a number."""
        return system.port.is_locked(self._locks.number, layout.LIFE + number)

    def ended(self, *, looks: bool) -> list[int]:
        """Return the numbers of workers that have ended. looks: also find locks that a child holds that a C library forked."""
        found = ((number, one) for number, one in self.workers().items() if number != self.number)
        return [number for number, one in found if not self.is_alive(number) or (looks and holders.is_gone(one[:4]))]

    # Waking.

    def ring(self) -> None:
        """Wake sleeping workers. Errors are ignored: they also poll."""
        self.window.must_ring = False
        with suppress(OSError):
            system.port.write(self._locks.number, b"\0", layout.RING_AT)

    def watch(self, watcher: Watcher, key: object) -> None:
        """Let a watcher wake when a worker rings, and when a process with the file ends."""
        watcher.watch(self.path, CHANGED | CLOSED, key)

    def is_in_place(self) -> bool:
        """Return whether the path leads to this file."""
        return self._locks.is_at(self.path)

    def flush(self) -> None:
        """Flush the file to disk, stores through mappings included. Raises the system's OSError."""
        system.port.flush_data(self._locks.number)

    @property
    def is_ours(self) -> bool:
        """Return whether this process opened the file."""
        return self._process == system.port.process_id()

    def close(self) -> None:
        """Free the worker's byte, and close the file."""
        if self._memory is not None:
            self.lock.close()
            self.window.close()
            memory, self._memory = self._memory, None
            with suppress(BufferError):  # a call of another thread ends first
                self.memory.release()
                self._view.release()
                memory.close()
        locks.give_back(self._locks, self._process)


def read_header(path: Path, fd: int) -> TaskHeader:
    """Return the header of an open file of the right size. Raises Corruption, UnknownVersion."""
    try:
        header = layout.parse_header(system.port.read(fd, layout.PAGE, 0))
        size = system.port.status(fd).st_size
        if size != header.size:
            raise ValueError(f"it has {size} bytes instead of {header.size}")
    except UnknownVersion as error:
        raise UnknownVersion(f"{path}: {error}; upgrade") from None
    except ValueError as error:
        raise layout.damaged(path, error) from None
    return header


def remove_other(path: Path, wanted: TaskHeader) -> None:
    """Remove a file without workers that belongs to another log: one that was at the path before. Raises Corruption if it has workers."""
    try:
        with Descriptor(path, os.O_RDONLY) as fd:
            if layout.parse_header(system.port.read(fd, layout.PAGE, 0)).log_id == wanted.log_id:
                return
    except (FileNotFoundError, ValueError, UnknownVersion):
        return  # the error comes when it is opened
    if workers_in(path):
        raise Corruption(f"{path} belongs to another log that was at this path, and has workers; stop them")
    with suppress(FileNotFoundError):
        system.port.remove(path)


def create(path: Path, header: TaskHeader, start: int) -> None:
    """Create a file, whole and on disk, unless another process is faster. Raises the system's OSError."""
    temporary = path.with_name(f"{path.name}.{system.port.random(8).hex()}.tmp")
    try:
        with Descriptor(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            system.port.allocate(fd, header.size)
            system.port.write(fd, layout.pack_header(header), 0)
            system.port.write(fd, _new_memory(header, start), layout.MEMORY_AT)
            system.port.flush(fd)
        with suppress(FileExistsError):
            system.port.link(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            system.port.remove(temporary)
    disk.flush_directory(path.parent)


def _new_memory(header: TaskHeader, start: int) -> bytearray:
    """Return the memory of a list that begins at a sequence."""
    memory = bytearray(8 * words.words_of(header.window, header.is_ordered))
    with memoryview(memory) as view:
        window = TaskWindow(view, locks.append_lock(view, words.LOCK, -1), header.window, header.is_ordered, 0)
        window.start_at(start)
        window.set_word(words.SAFE, start)
        window.set_word(words.KEPT, start)
        boot = system.port.boot_id()
        for half in range(2):
            window.set_word(words.BOOT + half, int.from_bytes(boot[8 * half : 8 * half + 8], "little"))
        window.close()
        window.lock.close()
    return memory


def workers_in(path: Path) -> bool:
    """Return whether a file has living workers; False if there is no file."""
    try:
        with Descriptor(path, os.O_RDONLY) as fd:
            return system.port.locked_from(fd, layout.LIFE + 1, layout.MOST_WORKERS) >= 0
    except FileNotFoundError:
        return False
