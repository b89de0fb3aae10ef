"""Every state in which a killed process can leave its shared files and memory, from one run of its operation.

Only the state that a process shares with others outlives a SIGKILL: files, mapped bytes included, and their names. Its locks are
released. So an operation runs once, traced, and before each of its opcodes, the libraries' too, all
shared state is compared with its previous contents. Each difference begins another state; between two of them there is none that a
kill before any opcode could leave.

**Torn changes.** Between two opcodes C code may store many words, in any order, and be killed before it has stored all of them. So for
each change of more than one word there are states in which only some of them were stored: every choice if there are few, otherwise the
first words up to each, and random choices.

The compiled twin has no opcodes. It is run in a child that stops after each instruction of the machine (`Stepped`): nothing is torn there.

Opcodes that only look something up, compute, put it on the interpreter's stack or into a local variable, or jump, change no shared
state; nothing is compared after those. (Python functions that they call have opcodes of their own.)

**Not covered:** the steps of one call of the kernel or of libc that changes several names (`sem_open` makes its file under another
one), and the work of other threads of the process between two opcodes of the traced one.
"""

from __future__ import annotations

import ctypes
import dis
import mmap
import os
import random
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self
from unittest import mock

import loops
from inotify_simple import INotify, flags

from kvspool.engine import iteration, locks
from kvspool.kernel import group_py, lock_py
from kvspool.spool import cursor, durability, spool_files

CHANGES = flags.CREATE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO | flags.MODIFY | flags.ATTRIB
_TRACE_ME, _SINGLE_STEP = 0, 9  # of ptrace
HARMLESS = ("LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "PUSH_NULL", "PRECALL", "KW_NAMES", "COPY", "SWAP", "RESUME", "NOP")
HARMLESS += ("POP_JUMP", "JUMP", "CACHE", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "LOAD_ATTR", "LOAD_METHOD", "STORE_FAST")
HARMLESS += ("COMPARE_OP", "IS_OP", "BINARY_OP", "BINARY_SUBSCR", "UNARY", "BUILD_TUPLE", "RETURN_VALUE")


class File(NamedTuple):
    """A file. mode: its permission bits."""

    mode: int
    content: bytes


class State:
    """Shared state after a kill.

    directories: permission bits by name; names: by the name of a file, which one it is; files: by that, those too that have no name any
    more, since others may have them open. said: what the operation had acknowledged when the
    state ended.
    """

    def __init__(self, directories: dict[str, int], names: dict[str, int], files: dict[int, File], said: Any = None) -> None:
        self.directories, self.names, self.files, self.said = directories, names, files, said

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return NotImplemented
        return (self.directories, self.names, self.files) == (other.directories, other.names, other.files)

    def __hash__(self) -> int:
        return hash((*self.directories, *self.names.items(), *self.files.items()))

    def torn(self, after: State, choices: int, choose: random.Random) -> Iterator[State]:
        """Yield states between this one and the next, `choices` at most, in which only some of the words that changed were stored."""
        if self.names != after.names:
            return
        words = [(number, at) for number, file in self.files.items() for at in _differing(file.content, after.files[number].content)]
        for some in _choices(words, choices, choose):
            contents = {number: bytearray(file.content) for number, file in self.files.items()}
            for number, at in some:
                contents[number][at : at + 8] = after.files[number].content[at : at + 8]
            files = {number: File(file.mode, bytes(contents[number])) for number, file in self.files.items()}
            yield State(self.directories, self.names, files, self.said)


def _differing(before: bytes, after: bytes) -> list[int]:
    """Return where words differ, as far as both go."""
    size = min(len(before), len(after))
    return [
        at
        for block in range(0, size, 512)
        if before[block : block + 512] != after[block : block + 512]
        for at in range(block, min(block + 512, size), 8)
        if before[at : at + 8] != after[at : at + 8]
    ]


def _choices(words: list[Any], most: int, choose: random.Random) -> list[list[Any]]:
    """Return ways to take some of the words, neither none nor all: every one, or `most` of them."""
    if len(words) < 2:
        return []
    if len(words) < 32 and 2 ** len(words) - 2 <= most:
        return [[word for at, word in enumerate(words) if which >> at & 1] for which in range(1, 2 ** len(words) - 1)]
    firsts: Sequence[int] = range(1, len(words))
    if len(firsts) > most // 2:
        firsts = sorted(choose.sample(firsts, most // 2))
    at_random = [choose.sample(words, choose.randrange(1, len(words))) for _ in range(most - len(firsts))]
    return [*(words[:first] for first in firsts), *at_random]


class Shared:
    """Looks at everything below a directory, as quickly as can be: it lists names only after inotify has reported a change."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._notifier = INotify(nonblocking=True)
        self._events = bytearray(1 << 16)
        self._entries: list[tuple[str, int, int, int]] = []
        self._open: dict[int, tuple[int, mmap.mmap | None]] = {}  # by inode; open to the end, so that no number is given out twice
        self._contents: dict[int, bytes] = {}  # of all that had a name once
        self._modes: dict[int, int] = {}
        self.look()

    def look(self) -> bool:
        """Look at it all; return whether anything has changed since the last time."""
        is_notified = self._notifier.readinto(self._events) is not None
        is_changed = (is_notified or not self._entries) and self._look_at_names()
        for number, content in self._contents.items():
            mapping = self._open[number][1]
            if mapping is not None and mapping[:] != content:
                self._contents[number] = mapping[:]
                is_changed = True
        return is_changed

    def state(self) -> State:
        """Return what was there at the last look."""
        directories, names = {}, {}
        for path, number, mode, _ in self._entries:
            name = path.removeprefix(f"{self._root}/")
            if stat.S_ISDIR(mode):
                directories[name] = mode & 0o7777
            else:
                names[name] = number
        files = {number: File(self._modes[number], content) for number, content in self._contents.items()}
        return State(directories, names, files)

    def _look_at_names(self) -> bool:
        entries = self._list()
        if entries == self._entries:
            return False
        self._entries = entries
        for path, number, mode, size in entries:
            if stat.S_ISREG(mode):
                self._contents[number] = self._content(path, number, size)
                self._modes[number] = mode & 0o7777
        return True

    def _list(self) -> list[tuple[str, int, int, int]]:
        """Return path, inode, mode and size of everything that is there, and let its changes be reported."""
        entries = []
        directories = [self._root]
        for directory in directories:
            self._notifier.add_watch(directory, CHANGES)
            for name in sorted(os.listdir(directory)):
                path = f"{directory}/{name}"
                found = os.lstat(path)
                is_directory = stat.S_ISDIR(found.st_mode)
                entries.append((path, found.st_ino, found.st_mode, 0 if is_directory else found.st_size))
                if is_directory:
                    directories.append(path)
        return entries

    def _content(self, path: str, number: int, size: int) -> bytes:
        """Map a file as far as it goes now, and return its bytes."""
        fd, mapping = self._open.get(number, (-1, None))
        if fd < 0:
            fd = os.open(path, os.O_RDONLY)
        if mapping is not None and len(mapping) != size:
            mapping.close()
            mapping = None
        if mapping is None and size:
            mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._open[number] = fd, mapping
        return b"" if mapping is None else mapping[:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._notifier.close()
        for fd, mapping in self._open.values():
            if mapping is not None:
                mapping.close()
            os.close(fd)


def traced(operation: Callable[[], Any], on_opcode: Callable[[FrameType], None], sources: tuple[str, ...] = ("",)) -> Any:
    """Return what the operation returns; before each of its opcodes in files whose paths hold one of `sources` call `on_opcode`."""

    @cache
    def is_wanted(file: str) -> bool:
        return any(source in file for source in sources)

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            on_opcode(frame)
            return trace
        if event == "call" and not is_wanted(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True  # at each line: Python 3.13 forgets it
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # of any frame: otherwise Python 3.12 doesn't look for those that ask later
    sys.settrace(trace)
    try:
        return operation()
    finally:
        sys.settrace(before)


@contextmanager
def interpreted() -> Iterator[None]:
    """Let every log that is opened inside the `with` block use the interpreted twin, whose stores are opcodes of their own."""
    interpreted_frames = loops.interpreted("kvspool.kernel.frames")
    places = [(spool_files, "FrameReader"), (spool_files, "FrameWriter"), (spool_files, "FrameScanner"), (durability, "Ring")]
    places += [(iteration, "Batch"), (iteration, "Items"), (cursor, "RingSleeper")]
    with ExitStack() as stack, mock.patch.object(locks, "AppendLock", lock_py.AppendLock):
        for module, name in places:
            stack.enter_context(mock.patch.object(module, name, getattr(interpreted_frames, name)))
        stack.enter_context(mock.patch.object(durability, "FlushGroup", group_py.FlushGroup))
        yield


@cache
def _harmless(code: CodeType) -> frozenset[int]:
    """Return where opcodes stand that change nothing."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith(HARMLESS))


class States:
    """The states of one run of an operation; the last one is the state after it."""

    states: list[State]

    def crashes(self, choices: int, seed: int = 1) -> Iterator[State]:
        """Yield every state once, and torn ones between each and the next: `choices` for one change, at most."""
        choose = random.Random(seed)
        seen: dict[State, list[Any]] = {}
        for before, after in zip(self.states, [*self.states[1:], None], strict=True):
            for state in [before, *(before.torn(after, choices, choose) if after is not None else ())]:
                said = seen.setdefault(state, [])
                if state.said not in said:
                    said.append(state.said)
                    yield state

    def _look(self, shared: Shared, said: Callable[[], Any]) -> None:
        if shared.look():
            self.states.append(shared.state())
        self.states[-1].said = said()


class Run(States):
    """A run, traced. opcodes: how many it had."""

    def __init__(self, operation: Callable[[], Any], root: Path, said: Callable[[], Any] = lambda: None) -> None:
        """Run it. `said` tells what it has acknowledged, at any moment."""
        self.opcodes = 0
        with Shared(root) as shared:
            self.states = [shared.state()]
            is_due = True

            def on_opcode(frame: FrameType) -> None:
                nonlocal is_due
                self.opcodes += 1
                if is_due:
                    self._look(shared, said)
                is_due = frame.f_lasti not in _harmless(frame.f_code)

            self.result = traced(operation, on_opcode)
            self._look(shared, said)


class Said:
    """How much an operation has acknowledged; its children's words count, too."""

    def __init__(self) -> None:
        self.words = memoryview(mmap.mmap(-1, 8)).cast("Q")

    def append(self, value: object) -> None:
        self.words[0] += 1

    def extend(self, values: Sequence[object]) -> None:
        self.words[0] += len(values)

    def clear(self) -> None:
        self.words[0] = 0

    def __len__(self) -> int:
        return self.words[0]


class Unsteppable(Exception):
    """This process may not trace another one."""


class Stepped(States):
    """A run in a child, one instruction of the machine after the other, when `warm` has opened there what it needs."""

    def __init__(self, warm: Callable[[], Any], operation: Callable[[], Any], root: Path, said: Callable[[], Any]) -> None:
        """Run it. `said` tells from here what it has acknowledged. Raises Unsteppable."""
        self.instructions = 0
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        child = os.fork()
        if child == 0:
            try:
                warm()
                if not ptrace(_TRACE_ME, 0, None, None):
                    os.kill(os.getpid(), signal.SIGSTOP)
                    operation()
                    os.kill(os.getpid(), signal.SIGSTOP)
            finally:
                os._exit(1)
        try:
            if not os.WIFSTOPPED(os.waitpid(child, 0)[1]):
                child = 0
                raise Unsteppable
            with Shared(root) as shared:
                self.states = [shared.state()]
                while not ptrace(_SINGLE_STEP, child, None, None):
                    status = os.waitpid(child, 0)[1]
                    assert os.WIFSTOPPED(status), "the operation failed"
                    self._look(shared, said)
                    if os.WSTOPSIG(status) != signal.SIGTRAP:
                        break
                    self.instructions += 1
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


class Copy:
    """A directory that takes on one state after the other. A file stays the same one: who has it open sees the bytes change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[int, int] = {}  # a descriptor of each
        self._descriptors = os.open("/proc/self/fd", os.O_RDONLY)

    def become(self, state: State) -> Path:
        """Take on a state; return the directory."""
        building = self.root.with_name(f"{self.root.name}.building")
        building.mkdir()
        for name, mode in state.directories.items():
            os.mkdir(f"{building}/{name}")
            os.chmod(f"{building}/{name}", mode)
        for name, number in state.names.items():
            path = f"{building}/{name}"
            if number in self._files and os.fstat(self._files[number]).st_nlink:
                os.link(str(self._files[number]), path, src_dir_fd=self._descriptors)
            else:
                self._let_go(number)
                self._files[number] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        for number in state.files.keys() & self._files.keys():
            file, fd = state.files[number], self._files[number]
            os.ftruncate(fd, len(file.content))
            os.pwrite(fd, file.content, 0)
            os.fchmod(fd, file.mode)
        if self.root.exists():
            shutil.rmtree(self.root)
        building.rename(self.root)
        return self.root

    def _let_go(self, number: int) -> None:
        fd = self._files.pop(number, -1)
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._files):
            self._let_go(number)
        os.close(self._descriptors)
        if self.root.exists():
            shutil.rmtree(self.root)
