"""Import a module as a whole, even if the user presses Ctrl-C, or threads import others at the same time; say how to install one."""

import os
import sys
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType, ModuleType

AGAIN = 0.01  # seconds until a SIGINT that arrived during an import or the start of a thread is looked at again
_IMPORTER = "<frozen importlib._bootstrap>"
_lock = RLock()  # a package and its modules import each other: threads that begin at different ones would see unfinished ones


def _in_child() -> None:
    global _lock
    _lock = RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an extra, as the installed kvspool names them."""
    import re
    import shlex
    from importlib import metadata

    try:
        named = metadata.requires("kvspool") or []
    except metadata.PackageNotFoundError:
        named = []
    found = [line for line in named if f'extra == "{extra}"' in line]
    packages = dict.fromkeys(re.sub('( and |; *)extra == ".*"$', "", line) for line in found)  # pip understands other markers
    return f"pip install {' '.join(map(shlex.quote, packages))}" if found else f"pip install 'kvspool[{extra}]'"


def other_pythons(package: str) -> str:
    """Return the versions of Python that an installed package names, as in "3.11 to 3.14", if this version is not one of them.

    Returns an empty text if it is, if the package names none, or if it is not installed.
    """
    from importlib import metadata

    prefix = "Programming Language :: Python :: 3."
    try:
        lines = metadata.metadata(package).get_all("Classifier") or []
    except metadata.PackageNotFoundError:
        return ""
    minors = sorted(int(line.removeprefix(prefix)) for line in lines if line.startswith(prefix) and line.removeprefix(prefix).isdigit())
    return f"3.{minors[0]} to 3.{minors[-1]}" if minors and sys.version_info[1] not in minors else ""


def import_whole(name: str) -> ModuleType:
    """Import a module, unless it is imported; one thread at a time. A SIGINT that arrives meanwhile is handled afterwards."""
    found = sys.modules.get(name)
    if found is not None and not getattr(found.__spec__, "_initializing", False):
        return found
    with _lock:
        return _import_whole(name)


def _import_whole(name: str) -> ModuleType:
    """Import a module, and handle a SIGINT that arrives meanwhile afterwards.

    An extension module can't handle an exception during its import: msgspec 0.19 to 0.20 end the process with SIGSEGV. A blocked signal
    would not help, since the kernel delivers it to another thread, and Python handles it in the main one all the same.
    """
    from signal import SIGINT, getsignal, raise_signal, signal

    arrived = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = getsignal(SIGINT)
    try:
        if before is not None:  # a handler from C can't be restored
            signal(SIGINT, note)
    except ValueError:  # in another thread than the main one, where no handler runs
        before = None
    try:
        return import_module(name)
    finally:
        if before is not None:
            signal(SIGINT, before)
            if arrived:
                raise_signal(SIGINT)


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Inside the `with` block, make SIGINT raise KeyboardInterrupt, but neither in an import nor in the start of a thread.

    The importer has callbacks that print an exception and continue: Ctrl-C would be lost. The start of a thread waits with a lock, which an
    exception leaves in a state that causes another one. A SIGINT that arrives during one of them is handled a moment after it. Does nothing
    in another thread than the main one, or if the program has its own handler.
    """
    from signal import ITIMER_REAL, SIG_DFL, SIGALRM, SIGINT, default_int_handler, getsignal, setitimer, signal

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _is_delicate(frame):
            setitimer(ITIMER_REAL, AGAIN)
        else:
            default_int_handler(number, frame)

    before = getsignal(SIGINT), getsignal(SIGALRM)
    try:
        if before == (default_int_handler, SIG_DFL):
            signal(SIGALRM, interrupt)
            signal(SIGINT, interrupt)
    except ValueError:
        before = None, None
    try:
        yield
    finally:
        if before == (default_int_handler, SIG_DFL):
            signal(SIGINT, default_int_handler)
            setitimer(ITIMER_REAL, 0)
            signal(SIGALRM, SIG_DFL)


def _is_delicate(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers imports a module or starts a thread."""
    threading = sys.modules.get("threading")
    start = None if threading is None else threading.Thread.start.__code__
    while frame is not None and frame.f_code.co_filename != _IMPORTER and frame.f_code is not start:
        frame = frame.f_back
    return frame is not None
