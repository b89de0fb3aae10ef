"""Import a module as a whole, although the user presses Ctrl-C."""

from importlib import import_module
from types import ModuleType


def import_whole(name: str) -> ModuleType:
    """Import a module, and raise the KeyboardInterrupt of a SIGINT that arrives meanwhile afterwards.

    An extension module can't cope with an exception in the middle of its import: msgspec 0.19 to 0.20 end the process with SIGSEGV.
    """
    from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask

    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        return import_module(name)
    finally:
        pthread_sigmask(SIG_SETMASK, before)
