"""The one port to the operating system: files, mappings, locks, clock, entropy.

Every system call of this package goes through `port`. Tests replace it with `replaced(...)` to record the calls, to let the n-th one fail,
or to kill the process there. The compiled twin of the frame loops calls lock, clock and process id directly from C; everything else is the
same for both.

Locks are *open file description* locks (`F_OFD_SETLK`, Linux 3.15). A POSIX record lock would be released as soon as any descriptor of the
file is closed in the process, and all its threads would share it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import select
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inotify_simple import INotify

# struct flock on 64-bit Linux: type, whence, start, length, pid (which must be 0 for these locks).
_FLOCK = struct.Struct("@hhqqi4x")
_HANDLE, _HANDLE_BYTES = struct.Struct("@Ii"), 128  # struct file_handle, and the largest number of bytes after it
_LIBC = ctypes.CDLL(None, use_errno=True)
_SYSCALL, _TIMESPEC = _LIBC.syscall, struct.Struct("@qq")
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221}.get(os.uname().machine)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_PAUSE = 0.001  # seconds between polls of a word that doesn't support waiting
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the module mmap doesn't name
_FOLLOW = 0x400  # AT_SYMLINK_FOLLOW
_AT_CWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2  # of renameat2
PRIVATE_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY  # flags with which every file is opened


@cache
def _boot_id() -> bytes:
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


_own_start: dict[int, int] = {}  # the start of this process, by its id


def _in_child() -> None:
    global _own_start
    _own_start = {}  # another one: free-threaded builds lock a dict to clear it, and another thread of the parent may have held its lock


os.register_at_fork(after_in_child=_in_child)


class Port:
    """The real system. A subclass in the tests overrides the calls to watch or to break."""

    # Files. Errors are the system's own OSError, unchanged, and NotAFile if the name is not a file's.

    def allow_more_files(self) -> None:
        """Raise this process's limit of open descriptors as far as permitted."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    # Both are the system's own functions: between the open and its owner no Python code runs, which a signal handler could interrupt. Only
    # `Descriptor` calls them.
    open = staticmethod(os.open)
    close = staticmethod(select.epoll.close)  # of the owner created by `Descriptor`

    def file_limit(self) -> int:
        """Return how many descriptors this process may have open."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft

    def read(self, fd: int, size: int, at: int) -> bytes:
        return os.pread(fd, size, at)

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        """Write all of `data` at offset `at`."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, at)
            view, at = view[written:], at + written

    def truncate(self, fd: int, size: int) -> None:
        """Truncate the file to `size` bytes. Never a file that may be mapped: a load after its end kills the process."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve `size` bytes of disk for the file, so that a later store can't fail on a full disk."""
        os.posix_fallocate(fd, 0, size)

    def set_mode(self, fd: int, mode: int) -> None:
        """Set the permission bits, regardless of the umask."""
        os.fchmod(fd, mode)

    def set_owner(self, fd: int, user: int, group: int) -> None:
        os.fchown(fd, user, group)

    def set_times(self, fd: int, accessed: int, modified: int) -> None:
        """Set the times of the last read and write of the file, in ns since the Unix epoch."""
        os.utime(fd, ns=(accessed, modified))

    def status(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def look_up(self, path: str | os.PathLike[str]) -> os.stat_result | None:
        """Return the status of the file at a path, without following links; None if there is none."""
        try:
            return os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def identity(self, path: str | os.PathLike[str]) -> str:
        """Return an identity that distinguishes a file from every other one of its file system, also from a later one with its inode
        number.

        Links are followed. It is the file's handle, as NFS uses it, with a "-" in it; if the file system has none (overlayfs), only the
        inode number. It survives a rename of the file and a restart of the machine.
        """
        handle, mount = ctypes.create_string_buffer(_HANDLE.pack(_HANDLE_BYTES, 0), _HANDLE.size + _HANDLE_BYTES), ctypes.c_int()
        if _LIBC.name_to_handle_at(_AT_CWD, os.fsencode(path), handle, ctypes.byref(mount), _FOLLOW):
            return f"{os.stat(path).st_ino:x}"
        size, kind = _HANDLE.unpack_from(handle)
        return f"{kind & 0xFFFFFFFF:x}-{handle.raw[_HANDLE.size : _HANDLE.size + size].hex()}"

    def flush_data(self, fd: int) -> None:
        """Flush the file's data to disk, stores through mappings included."""
        os.fdatasync(fd)

    def flush(self, fd: int) -> None:
        """Flush the file, or the entries of a directory, to disk."""
        os.fsync(fd)

    def flush_filesystem(self, fd: int) -> None:
        """Flush everything on the file system of an open file to disk: for many new files at once."""
        if _LIBC.syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    # Names.

    def make_directory(self, path: str | os.PathLike[str], mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def rename(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        os.rename(source, target)

    def rename_new(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Rename, but never replace anything, not even an empty directory. Raises FileExistsError; EINVAL if the file system can't."""
        _rename(source, target, _NO_REPLACE)

    def exchange(self, one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
        """Exchange two names atomically: every other process sees either the old or the new state."""
        _rename(one, other, _EXCHANGE)

    def link(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        os.link(source, target, follow_symlinks=False)

    def symlink(self, target: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        """Create a symbolic link at the path to the target."""
        os.symlink(target, path)

    def remove(self, path: str | os.PathLike[str]) -> None:
        os.unlink(path)

    def remove_directory(self, path: str | os.PathLike[str]) -> None:
        os.rmdir(path)

    def names(self, path: str | os.PathLike[str]) -> list[str]:
        return os.listdir(path)

    def free_space(self, path: str | os.PathLike[str]) -> os.statvfs_result:
        """Return the free space of the file system at the path."""
        return os.statvfs(path)

    # Memory.

    def map(self, fd: int, size: int, *, writable: bool) -> mmap.mmap:
        """Map the first `size` bytes of the file, shared between all processes."""
        rights = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=rights)

    def populate(self, memory: mmap.mmap, size: int) -> None:
        """Map the first `size` bytes for stores now, instead of page by page at the first store to each; the pages count as changed.

        Kernels before Linux 5.14 don't support this, and later ones may refuse: errors are ignored.
        """
        with suppress(OSError):
            memory.madvise(_POPULATE_WRITE, 0, size)

    def available_memory(self) -> int:
        """Return how many bytes of memory the kernel can provide without swapping."""
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
        return 0

    def private_memory(self, size: int) -> mmap.mmap:
        """Return new memory of this process, in large pages if the kernel has any: clearing many small ones takes longer."""
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def release_pages(self, memory: mmap.mmap) -> None:
        """Let the kernel reclaim the pages of private memory when it needs them. Raises BufferError if anything still shares the memory."""
        memory.resize(len(memory))  # which changes nothing, and is refused while there is an export
        memory.madvise(mmap.MADV_FREE)

    def fence(self) -> None:
        """Order every earlier store before every later load: a lock's atomic exchange does that.

        A new lock each time: a signal handler that interrupts this may have to order stores, too.
        """
        threading.Lock().acquire()

    # Locks.

    def try_lock(self, fd: int, at: int) -> bool:
        """Lock byte `at` exclusively for this open file description; False if another one holds it."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, fd: int, at: int) -> None:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))

    def unlock_all(self, fd: int) -> None:
        """Release every lock of this open file description."""
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))

    def is_locked(self, fd: int, at: int) -> bool:
        """Return whether another open file description holds byte `at`, without taking it."""
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def is_shared(self, fd: int, at: int) -> bool:
        """Return whether another open file description holds a shared lock on byte `at`."""
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0))
        return bool(_FLOCK.unpack(answer)[0] == fcntl.F_RDLCK)

    def try_share(self, fd: int, at: int, length: int) -> bool:
        """Lock some bytes for this open file description, shared with others that do; False if one holds them exclusively."""
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, at, length, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def locked_from(self, fd: int, at: int, length: int) -> int:
        """Return the start of the first lock of another open file description in some bytes; -1 if there is none."""
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, length, 0))
        kind, _, start, _, _ = _FLOCK.unpack(answer)
        return -1 if kind == fcntl.F_UNLCK else max(at, start)

    def try_lock_file(self, fd: int, *, shared: bool) -> bool:
        """Lock the whole file by `flock`, as other programs may do; False if another open file description holds it."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock_file(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def lock_owner(self, fd: int, at: int, length: int) -> int:
        """Return the holder of a lock in these bytes: 0, none; a process id; or -1, an open file description of some process."""
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, length, 0))
        kind, _, _, _, pid = _FLOCK.unpack(answer)
        return 0 if kind == fcntl.F_UNLCK else int(pid)

    # Wake-ups.

    def inotify(self) -> INotify:
        """Return a new inotify descriptor, not inherited."""
        from inotify_simple import INotify  # which imports subprocess and tempfile, and is used only by followers

        return INotify()

    def add_watch(self, notifier: INotify, path: str | os.PathLike[str], mask: int) -> int:
        """Watch a path; returns the number under which the kernel reports it."""
        return int(notifier.add_watch(path, mask))

    def remove_watch(self, notifier: INotify, descriptor: int) -> None:
        """Remove a watch that `add_watch` returned; one of a removed file is gone already."""
        with suppress(OSError):
            notifier.rm_watch(descriptor)

    def wait_readable(self, fd: int, timeout: float) -> bool:
        """Return whether there is something to read within `timeout` seconds."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def read_events(self, fd: int) -> bytes:
        """Return the pending events of an inotify descriptor; there must be at least one."""
        return os.read(fd, 65536)

    def wait_word(self, words: memoryview, at: int, expected: int, timeout: float) -> None:
        """Sleep while the low half of word `at` is `expected`, until `wake_word` or a signal, at most `timeout` seconds."""
        futex = _futex(words, at)
        if futex is None:
            self.sleep(min(timeout, _PAUSE))
            return
        seconds, rest = divmod(max(0, round(timeout * 1e9)), 1_000_000_000)
        _SYSCALL(_SYS_FUTEX, ctypes.byref(futex), _FUTEX_WAIT, ctypes.c_uint32(expected), _TIMESPEC.pack(seconds, rest), None, 0)

    def wake_word(self, words: memoryview, at: int, most: int) -> None:
        """Wake up to `most` threads, of any process, that sleep in `wait_word` on word `at`."""
        futex = _futex(words, at)
        if futex is not None:
            _SYSCALL(_SYS_FUTEX, ctypes.byref(futex), _FUTEX_WAKE, ctypes.c_int(most), None, None, 0)

    # Time, identity, entropy.

    def now(self) -> int:
        """Return the wall clock in ns since the Unix epoch."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Return a clock in seconds that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def user_id(self) -> int:
        """Return the effective user of this process."""
        return os.geteuid()

    def process_id(self) -> int:
        return os.getpid()

    def random(self, size: int) -> bytes:
        return os.urandom(size)

    def boot_id(self) -> bytes:
        """Return the 16 bytes that identify this boot of the machine. They are read once: a process doesn't outlive it."""
        return _boot_id()

    def process_start(self, pid: int) -> int:
        """Return when a process started, in clock ticks since boot; 0 if there is no such process.

        That of this process is read once: the kernel looks at all of its threads and mappings for it.
        """
        known = _own_start.get(pid)
        if known is not None:
            return known
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return 0
        # The command's name is in parentheses and may contain any character, so count from the last one.
        start = int(text.rpartition(")")[2].split()[19])
        if pid == os.getpid():
            _own_start[pid] = start
        return start

    def processes_with(self, files: set[tuple[int, int]]) -> list[int]:
        """Return the ids of the visible processes that have one of these files, each a device and an inode, open, in order."""
        found = []
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with suppress(OSError):  # of another user, or ended
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(FileNotFoundError):
                        there = os.stat(f"/proc/{pid}/fd/{number}")
                        if (there.st_dev, there.st_ino) in files:
                            found.append(pid)
                            break
        return found

    def process_state(self, pid: int) -> str:
        """Return the state of a process in the kernel's word: "sleeping", "stopped"; "gone" if there is none."""
        try:
            text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "gone"
        state = text.partition("\nState:")[2].partition("\n")[0]  # "S (sleeping)"
        return state.partition("(")[2].removesuffix(")") or "unknown"

    def pid_namespace(self) -> int:
        """Return the inode of this process's pid namespace; a pid in another namespace means another process."""
        try:
            return os.stat("/proc/self/ns/pid").st_ino
        except OSError:
            return 0

    def mounts(self) -> str:
        """Return the kernel's table of the mounted file systems."""
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")


def _rename(source: str | os.PathLike[str], target: str | os.PathLike[str], flags: int) -> None:
    if _LIBC.renameat2(_AT_CWD, os.fsencode(source), _AT_CWD, os.fsencode(target), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(source), None, os.fspath(target))


def _futex(words: memoryview, at: int) -> ctypes.c_uint32 | None:
    """Return the low half of word `at` for the kernel; None if it is read-only, not memory, or the processor is unknown."""
    try:
        return ctypes.c_uint32.from_buffer(words, 8 * at) if _SYS_FUTEX is not None else None
    except (TypeError, ValueError):
        return None


port = REAL = Port()


@contextmanager
def replaced(other: Port) -> Iterator[Port]:
    """Route every call to `other` during the `with` block."""
    global port
    before, port = port, other
    try:
        yield other
    finally:
        port = before


def refuse_unfit_host() -> None:
    """Raise OSError if the host doesn't meet our assumptions: not Linux, a big-endian processor, or Python without the GIL."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"kvspool needs Linux (its locks and wake-ups); this is {sys.platform}")
    if sys.byteorder != "little":
        raise OSError(errno.ENOSYS, "kvspool's files are shared little-endian memory; this host is big-endian")
    if not getattr(sys, "_is_gil_enabled", _always)():  # Python 3.13 and later
        raise OSError(errno.ENOSYS, "kvspool's handles rely on Python's GIL, which is off here; set PYTHON_GIL=1 or pass -X gil=1")


def _always() -> bool:
    return True
