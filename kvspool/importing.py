"""Import a module as a whole, even if the user presses Ctrl-C."""

from importlib import import_module
from types import ModuleType


def import_whole(name: str) -> ModuleType:
    """Import a module; a KeyboardInterrupt of a SIGINT that arrives meanwhile is raised afterwards.

    An extension module can't handle an exception during its import: msgspec 0.19 to 0.20 end the process with SIGSEGV.
    """
    from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask

    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        return import_module(name)
    finally:
        pthread_sigmask(SIG_SETMASK, before)
