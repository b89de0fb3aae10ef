"""Import a module as a whole, even if the user presses Ctrl-C, or threads import others at the same time."""

import os
import sys
from _thread import RLock
from importlib import import_module
from types import FrameType, ModuleType

_lock = RLock()  # a package and its modules import each other: threads that begin at different ones would see unfinished ones


def _in_child() -> None:
    global _lock
    _lock = RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)


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
