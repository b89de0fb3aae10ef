"""The queue: byte entries, put at one end and taken at the other, by many processes and threads at once, in QewQew's files.

**Durability.** When `put` returns, its entry survives a crash of any process, and exactly one `get` takes it. At the level "disk" both are
on disk when the call returns, in a flush that all waiting callers share; at "os" a thread flushes at an interval; at "memory" only `sync`
does. After a crash of the machine, entries whose `put` was not on disk may be missing, and entries whose `get` was not on disk may be
delivered again.

**Recovery.** A crash of a process needs no recovery. The format has no checksums, so damage of an entry's bytes by a crash of the machine
or a fault of the disk can't be detected; `docs/queue.md` lists the faults that can.

**The end.** A handle that has put or taken entries removes all files of the queue when it is closed, if the queue is empty and no other
handle has it open. So its next user creates a new one: `create(..., exist_ok=True)`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import TypeVar

from kvspool import system
from kvspool.engine import locks, making, sizes
from kvspool.engine.background import SYNC_INTERVAL, Background
from kvspool.errors import (
    Closed,
    KvspoolError,
    LockTimeout,
    LogExists,
    LogNotFound,
    QueueEmpty,
    QueueFull,
    Reentered,
    TooLarge,
    Unsettled,
)
from kvspool.kernel import chunks_py as loops
from kvspool.kernel.chunks import Ends
from kvspool.options import DURABILITIES, Durability
from kvspool.queue import contents, format, header
from kvspool.queue.chain import Chain
from kvspool.queue.chunk import Chunk, file_size
from kvspool.queue.contents import ChunkPart, QueueStats
from kvspool.queue.flusher import QueueFlusher
from kvspool.queue.sleeper import QueueSleeper, Watched
from kvspool.system import filesystems, forks
from kvspool.system.handles import ClosingHandle

T = TypeVar("T")
TIMEOUT = 10.0  # seconds that a handle waits for a lock before LockTimeout names its holder


class ChunkQueue(ClosingHandle):
    """A handle of one queue. Get it from `kvspool.queue.create` or `kvspool.queue.open`.

    Several threads may use it at once. It survives a fork: the child opens its own files on first use. `len` is the number of chunks;
    iterating yields the present entries, and takes none out.
    """

    HELPERS = frozenset(("forked",))

    def __init__(
        self, path: Path, chunk_bytes: int | None, max_chunks: int, timeout: float, durability: Durability, sync_interval: float | None
    ) -> None:
        self.path = path
        self.timeout = timeout
        self.max_chunks = max_chunks
        self.durability = durability
        self._chunk_bytes = chunk_bytes
        self._is_durable = durability == "disk"
        self._interval = sync_interval or SYNC_INTERVAL
        self._background: Background | None = None
        self._is_used = False  # entries were put or taken: an empty queue may be removed
        self._is_closed = False
        self._process = system.port.process_id()
        self._reset()
        try:
            with self._held() as chain:
                chain.sweep()
        except BaseException:
            self._shut()
            raise
        forks.register(self)

    def _reset(self) -> None:
        self._turn = threading.Lock()
        self._inside = 0  # the thread inside an operation
        self._sleepers: list[QueueSleeper] = []
        self._flusher = QueueFlusher(self.path, self._held)
        self._chain: Chain | None = None
        self._ends = Ends()
        self._is_quick = False

    def _attach(self) -> Chain:
        """Open the files, for this process."""
        file = header.open(self.path, self.timeout)
        try:
            chain = Chain(self.path, file, self._chunk_bytes, self._flusher.flush_file, self._is_durable)
        except BaseException:
            file.close()
            raise
        self._chain, self._ends = chain, chain.ends
        self._is_quick = chain.ends.is_one_step and not self._is_durable
        if self.durability == "os":
            self._background = Background(self._flusher, self._interval, self.timeout)
        return chain

    # Creating and opening.

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        chunk_bytes: int | str = format.CHUNK,
        max_chunks: int | None = None,
        max_bytes: int | str | None = None,
        mode: int = 0o600,
        exist_ok: bool = False,
        timeout: float = TIMEOUT,
        durability: Durability = "memory",
        sync_interval: float | None = None,
        allow_unsafe_fs: bool = False,
    ) -> ChunkQueue:
        """Create a queue at `path` and open it. The empty queue is on disk when the call returns; its first chunk is created with the first
        entry.

        chunk_bytes: size of a chunk file, in bytes or as "16MiB"; an entry takes its bytes and 2 more, the chunk itself 10. max_chunks,
        max_bytes: maximum size of the queue, in chunk files; a full one makes `put` wait or raise QueueFull. It is this handle's bound, and
        not stored. mode: permission bits of the files. exist_ok: open an existing queue. The rest: see `open`.

        Raises LogExists, UnsafeFilesystem (a network file system or btrfs, unless `allow_unsafe_fs`), ValueError, the errors of `open`, or
        the system's OSError. The empty queue may exist after an OSError: `exist_ok` opens it.
        """
        system.refuse_unfit_host()
        target = Path(os.path.abspath(path))
        making.check_target(target, mode, allow_unsafe_fs=allow_unsafe_fs)
        if not allow_unsafe_fs:
            filesystems.refuse_killing(target.parent)
        _check(chunk_bytes, max_chunks, max_bytes, durability, sync_interval)
        while True:
            try:
                header.create(target, mode)
            except LogExists:
                if not exist_ok:
                    raise
            try:
                return cls.open(
                    target,
                    chunk_bytes=chunk_bytes,
                    max_chunks=max_chunks,
                    max_bytes=max_bytes,
                    timeout=timeout,
                    durability=durability,
                    sync_interval=sync_interval,
                    allow_unsafe_fs=allow_unsafe_fs,
                )
            except LogNotFound:
                if not exist_ok:
                    raise
                # Its last user removed it since the first check.

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        chunk_bytes: int | str | None = None,
        max_chunks: int | None = None,
        max_bytes: int | str | None = None,
        timeout: float = TIMEOUT,
        durability: Durability = "memory",
        sync_interval: float | None = None,
        allow_unsafe_fs: bool = False,
    ) -> ChunkQueue:
        """Open the queue at `path`.

        chunk_bytes: size of the chunks that this handle creates; None: that of the last chunk. max_chunks, max_bytes: see `create`.
        timeout: seconds to wait for a lock before LockTimeout. durability: when this handle's puts and gets are on disk: "memory", after a
        `sync`; "os", within `sync_interval` seconds (default: 1) and a flush; "disk", when the call returns.

        Raises LogNotFound, NotALog, Truncated, Corruption, ValueError; UnsafeFilesystem on btrfs, unless `allow_unsafe_fs`; LockTimeout,
        which names the process, if the original program has the queue open; or the system's OSError.
        """
        system.refuse_unfit_host()
        size, most = _check(chunk_bytes, max_chunks, max_bytes, durability, sync_interval)
        target = Path(os.path.abspath(path))
        if not allow_unsafe_fs:
            filesystems.refuse_killing(target.parent)
        return cls(target, size, most, timeout, durability, sync_interval)

    # Putting.

    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        """Put one entry at the end; it survives a crash of this process when the call returns.

        item: 0 to 65535 bytes. block, timeout: whether, and for how many seconds, to wait for room (None: indefinitely). At the level
        "disk" it is on disk when the call returns. If only the flush fails, this raises Unsettled, and the entry is in the queue.

        Raises QueueFull, TooLarge, TypeError, LockTimeout, Poisoned, Corruption, LogVanished, Closed, Reentered, or the system's OSError
        (no space for another chunk). Nothing was put then.
        """
        entry = item if item.__class__ is bytes else _entry(item)
        if self._is_quick and self._ends.put(entry) == loops.DONE:
            self._is_used = True
            return
        self._put([entry], block, timeout)

    def put_nowait(self, item: bytes) -> None:
        """Put one entry if there is room now; QueueFull otherwise. See `put`."""
        self.put(item, block=False)

    def put_many(self, items: Iterable[bytes], block: bool = True, timeout: float | None = None) -> None:
        """Put several entries, as many at once as fit into a chunk; see `put`.

        Entries of other processes may be put between them. `placed` of QueueFull, or a note of another error, is the number of entries that
        were put. If one is too large, none is put.
        """
        self._put([_entry(item) for item in items], block, timeout)

    def _put(self, entries: list[bytes], block: bool, timeout: float | None) -> None:
        placed = 0
        end: tuple[Chunk, int] | None = None

        def attempt() -> bool | None:
            nonlocal placed, end
            with self._held() as chain:
                self._flusher.refuse_poisoned()
                _refuse_larger(entries, chain.new_size(), self.path)
                before = placed
                placed = chain.put(entries, placed, self.max_chunks)
                if placed > before and chain.last is not None:
                    self._is_used = True
                    end = (chain.last, chain.ends.tail)
            return True if placed == len(entries) else None

        done = self._wait_for(attempt, block, timeout)
        if self._is_durable and end is not None:
            self._flush_up_to(end[0], -1, end[1], None)
        if done is None:
            raise QueueFull(f"{self.path} has no room: {self._bound()}; get an entry first", placed)

    def _bound(self) -> str:
        if self.max_chunks < format.MOST_CHUNKS:
            return f"it is limited to {self.max_chunks} chunks"
        return "every chunk id is in use"

    # Taking.

    def get(self, block: bool = True, timeout: float | None = None) -> bytes:
        """Take the first entry out and return it.

        block, timeout: whether, and for how many seconds, to wait for one (None: indefinitely). At the level "disk" its removal is on disk
        when the call returns. If only the flush fails, this raises Unsettled with the entry in `taken`. Raises QueueEmpty, LockTimeout,
        Corruption, LogVanished, Closed, Reentered, or the system's OSError; nothing was taken then.
        """
        if self._is_quick:
            entry = self._ends.get()
            if entry is not None:
                self._is_used = True
                if self._ends.is_drained():
                    self._consume()
                return entry
        return self.get_many(1, block, timeout)[0]

    def get_nowait(self) -> bytes:
        """Take the first entry out if there is one now; QueueEmpty otherwise. See `get`."""
        return self.get(block=False)

    def get_many(self, limit: int, block: bool = True, timeout: float | None = None) -> list[bytes]:
        """Take up to `limit` entries out, and wait only for the first; see `get`."""
        if limit < 1:
            raise ValueError(f"limit is 1 or more, not {limit}")
        end: tuple[Chunk, int] | None = None

        def attempt() -> list[bytes] | None:
            nonlocal end
            with self._held() as chain:
                first = chain.first
                taken = chain.take(limit)
                self._is_used = self._is_used or bool(taken)
                # If a chunk is no longer the first one, it was removed, and the header with the new first chunk is on disk.
                if chain.first is not None and (chain.first is first or taken):
                    end = (chain.first, chain.first.state().head_ptr)
            return taken or None

        taken = self._wait_for(attempt, block, timeout)
        if taken is None:
            raise QueueEmpty(f"{self.path} has no entry")
        if self._is_durable and end is not None:
            self._flush_up_to(end[0], end[1], -1, taken)
        return taken

    def get_if(self, predicate: Callable[[bytes], object], block: bool = True, timeout: float | None = None) -> bytes | None:
        """Take the first entry out if `predicate(entry)` is true; return it, or None if it stays.

        No lock is held while the predicate runs, so it may take its time. If another process takes the entry meanwhile, the predicate is
        called with the next one. block, timeout, errors: as `get`; an error of the predicate passes through, and the entry stays.
        """
        while True:
            entry, chunk, head = self._first(block, timeout)
            if not predicate(entry):
                return None
            with self._held() as chain:
                is_there = chain.first is not None and chain.first.inode == chunk.inode and chain.first.state().head_ptr == head
                if not is_there or chain.peek() is None:
                    continue
                self._is_used = True
                chain.ends.advance(chain.ends.head)
                end = chain.ends.head
                with suppress(KvspoolError, OSError):
                    chain.consume()
            if self._is_durable:
                self._flush_up_to(chunk, end, -1, [entry])
            return entry

    def peek(self, block: bool = True, timeout: float | None = None) -> bytes:
        """Return the first entry without taking it; see `get`."""
        return self._first(block, timeout)[0]

    def peek_nowait(self) -> bytes:
        """Return the first entry without taking it, if there is one now; QueueEmpty otherwise."""
        return self.peek(block=False)

    def _first(self, block: bool, timeout: float | None) -> tuple[bytes, Chunk, int]:
        """Return the first entry, its chunk, and its offset there."""

        def attempt() -> tuple[bytes, Chunk, int] | None:
            with self._held() as chain:
                entry = chain.peek()
                if entry is None or chain.first is None:
                    return None
                return entry, chain.first, chain.first.state().head_ptr

        found = self._wait_for(attempt, block, timeout)
        if found is None:
            raise QueueEmpty(f"{self.path} has no entry")
        return found

    def drain(self) -> Iterator[bytes]:
        """Take entries out one after the other, as the caller asks for them, until there is none."""
        while True:
            try:
                entry = self.get_nowait()
            except QueueEmpty:
                return
            yield entry

    def clear(self) -> None:
        """Remove every entry. A crash during it has removed the oldest ones. Raises the errors of `get`."""
        with self._held() as chain:
            self._is_used = True
            chain.clear()
            last = chain.last
            head = -1 if last is None else last.state().head_ptr
        if self._is_durable and last is not None:
            self._flush_up_to(last, head, -1, [])

    def _consume(self) -> None:
        """Remove an emptied chunk. If that fails now, the next operation does it, and reports the error."""
        with suppress(KvspoolError, OSError), self._held(timeout=0):
            pass

    # Inspecting.

    def __len__(self) -> int:
        """Return the number of chunks."""
        with self._held() as chain:
            return len(chain.ids)

    def __bool__(self) -> bool:
        """Return True: a handle is true, even of an empty queue."""
        return True

    def __iter__(self) -> Iterator[bytes]:
        """Yield the present entries without taking them. Entries that others take meanwhile may be left out."""
        yield from contents.entries(self.path, self._parts())

    def qsize(self) -> int:
        """Return the number of entries. They are counted one by one, while others continue."""
        return contents.counted(self.path, self._parts())[0]

    def _parts(self) -> Iterator[ChunkPart]:
        with self._held() as chain:
            ids, ends = list(chain.ids), {chunk.id: (chunk, chunk.state()) for chunk in (chain.first, chain.last) if chunk is not None}
        return contents.parts(self.path, ids, ends)

    def empty(self) -> bool:
        """Return whether there is no entry."""
        with self._held() as chain:
            return chain.is_empty()

    def full(self) -> bool:
        """Return whether there is no room, not even for an entry of 0 bytes."""
        with self._held() as chain:
            return not chain.has_room(0, self.max_chunks)

    def stats(self) -> QueueStats:
        """Return the statistics of the queue at this moment. Every entry is counted."""
        with self._held() as chain:
            ids, chunk_bytes = list(chain.ids), chain.new_size()
        size = sum(file_size(format.chunk_path(self.path, id)) for id in ids)
        entries, data = contents.counted(self.path, self._parts())
        return QueueStats(
            path=str(self.path),
            format="qewqew",
            chunks=len(ids),
            entries=entries,
            bytes=data,
            size=size,
            chunk_bytes=chunk_bytes,
            max_chunks=self.max_chunks,
            durability=self.durability,
            sync_error=self._flusher.error,
        )

    # The disk.

    def sync(self) -> None:
        """Return when all puts and gets so far, of any process, are on disk. Raises Poisoned, LockTimeout, Closed."""
        self._flusher.sync(self.timeout)

    def _flush_up_to(self, chunk: Chunk, head: int, tail: int, taken: list[bytes] | None) -> None:
        try:
            self._flusher.reach(chunk, head, tail, self.timeout)
        except (KvspoolError, OSError) as error:
            raise Unsettled(str(self.path), str(error), taken) from error

    # Locking.

    @contextmanager
    def _held(self, timeout: float | None = None) -> Iterator[Chain]:
        """Return the current chain under the lock OPERATION; waits `timeout` seconds for it, by default the handle's."""
        seconds = self.timeout if timeout is None else timeout
        if self._process != system.port.process_id():  # a fork that Python didn't notice
            self.forked()
        if self._inside == get_ident():
            raise Reentered("a signal handler may not use a queue during an operation on it; let it use its own handle")
        if not self._turn.acquire(timeout=seconds):
            raise LockTimeout(f"{self.path}: another thread has used this handle for {seconds:g} s")
        try:
            self._inside = get_ident()
            chain = self._own_chain()
            ends = chain.ends
            ends.is_held = True
            try:
                locks.acquire(chain.fd, format.OPERATION, seconds, lambda: header.holder(chain.fd, self.path))
                chain.refresh()
                yield chain
            finally:
                # Whether we hold it or not: a signal handler may have raised before we knew.
                if not chain.is_closed:
                    system.port.unlock(chain.fd, format.OPERATION)
                ends.is_held = False
        finally:
            self._inside = 0
            self._turn.release()

    def _own_chain(self) -> Chain:
        if self._is_closed:
            raise Closed(f"{self.path} was closed; open it again")
        return self._attach() if self._chain is None else self._chain

    # Waiting.

    def _wait_for(self, attempt: Callable[[], T | None], block: bool, timeout: float | None) -> T | None:
        """Call `attempt` after each event until it returns something other than None, and return that; None after the timeout."""
        if block and timeout is not None and not timeout >= 0:
            raise ValueError("'timeout' must be a non-negative number")
        got = attempt()
        if got is not None or not block:
            return got
        deadline = float("inf") if timeout is None else system.port.monotonic() + timeout
        with self._asleep() as sleeper:
            while got is None:
                if not sleeper.follow(self._watched()):
                    left = deadline - system.port.monotonic()
                    if left <= 0:
                        return None
                    sleeper.wait(left)
                got = attempt()
        return got

    @contextmanager
    def _asleep(self) -> Iterator[QueueSleeper]:
        """Return a sleeper that no other thread uses. They are kept, since closing one can take milliseconds."""
        sleeper = self._sleepers.pop() if self._sleepers else QueueSleeper()
        try:
            yield sleeper
        finally:
            if self._is_closed:
                sleeper.close()
            else:
                self._sleepers.append(sleeper)

    def _watched(self) -> set[Watched]:
        """Return the files to watch for changes."""
        chain = self._own_chain()
        chunks = {chunk for chunk in (chain.first, chain.last) if chunk is not None}
        return {(self.path, 0)} | {(chunk.path, chunk.inode) for chunk in chunks}

    # The end.

    def close(self) -> None:
        """Release all files; a thread of the level "os" flushes first. Removes the files of an empty queue: see above.

        At the level "os" it raises the errors of `sync`; the handle is closed nevertheless.
        """
        if self._is_closed:
            return
        try:
            if self._background is not None and self._background.is_ours:
                self._background.end()
        finally:
            try:
                if self._chain is not None and self._is_used:
                    self._remove_if_empty()
            finally:
                self._shut()

    def _remove_if_empty(self) -> None:
        with suppress(KvspoolError), self._held() as chain:
            # The last of all handles gets the lock exclusively; a handle that is being opened waits, and sees that the file was removed.
            if chain.is_empty() and system.port.try_lock(chain.fd, format.IN_USE):
                chain.remove()
            else:
                system.port.unlock(chain.fd, format.IN_USE)  # here, so that of two handles closed at once the second one is alone

    def _shut(self) -> None:
        self._is_closed = True
        self._is_quick = False
        chain, self._chain = self._chain, None
        if chain is not None:
            chain.close()
        while self._sleepers:
            self._sleepers.pop().close()

    def forked(self) -> None:
        """In a forked child: drop the parent's files, and open our own when they are needed."""
        chain = self._chain
        self._process = system.port.process_id()
        self._background = None
        sleepers = self._sleepers
        self._reset()
        for sleeper in sleepers:
            sleeper.close()
        if chain is not None:
            chain.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            with suppress(Exception):
                self._shut()


def _entry(item: object) -> bytes:
    """Return an entry as bytes. Raises TypeError."""
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    raise TypeError(f"an entry is bytes, not {type(item).__name__}")


def _refuse_larger(entries: list[bytes], chunk: int, path: Path) -> None:
    longest = min(format.LONGEST_ENTRY, chunk - format.CHUNK_HEAD.size - loops.PREFIX)
    for entry in entries:
        if len(entry) > longest:
            raise TooLarge(f"{path}: an entry of {len(entry)} bytes; {longest} fit into chunks of {sizes.show(chunk)}, 65535 at most")


def _check(
    chunk_bytes: int | str | None, max_chunks: int | None, max_bytes: int | str | None, durability: str, sync_interval: float | None
) -> tuple[int | None, int]:
    """Return the size and the maximum number of chunks. Raises ValueError for invalid ones."""
    size = None if chunk_bytes is None else sizes.parse(chunk_bytes)
    if size is not None and not format.LEAST_CHUNK <= size <= format.MOST_CHUNK:
        raise ValueError(f"a chunk has {format.LEAST_CHUNK} to {format.MOST_CHUNK} bytes, not {chunk_bytes}")
    most = format.MOST_CHUNKS if max_chunks is None else max_chunks
    if max_bytes is not None:
        most = min(most, sizes.parse(max_bytes) // (size or format.CHUNK))
    if not 1 <= most <= format.MOST_CHUNKS:
        raise ValueError(f"a queue has 1 to {format.MOST_CHUNKS} chunks; max_chunks and max_bytes leave {most}")
    if durability not in DURABILITIES:
        raise ValueError(f"a durability is one of {', '.join(DURABILITIES)}, not {durability!r}")
    if sync_interval is not None and (durability != "os" or not 1e-3 <= sync_interval <= 1e9):
        raise ValueError("sync_interval is at least 0.001 seconds, and only for the durability os")
    return size, most
