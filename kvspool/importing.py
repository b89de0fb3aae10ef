"""Import a module as a whole, even if the user presses Ctrl-C."""

from importlib import import_module
from types import FrameType, ModuleType


def import_whole(name: str) -> ModuleType:
    """Import a module; a SIGINT that arrives meanwhile is handled afterwards.

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
