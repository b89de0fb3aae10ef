"""File descriptors for many logs at once: their number, and the error if there are too few.

A spool needs 4 to be read: its two files, and one for each mapping of them. Appends and syncs need 3 more. A journal needs 2 or 3, and up
to 8 more if its reader changes segments.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvspool import system
from kvspool.errors import KvspoolError
from shard.errors import TooFewDescriptors

PER_LOG = 7
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


@contextmanager
def for_logs(where: str | os.PathLike[str], logs: int) -> Iterator[None]:
    """Raise TooFewDescriptors for the system's own error inside the `with` block."""
    try:
        yield
    except OSError as error:
        explain(error, where, logs)
        raise


def explain(error: OSError, where: str | os.PathLike[str], logs: int) -> None:
    """Raise TooFewDescriptors if an error means that none is left, for code with many open logs; else do nothing."""
    if error.errno not in _EXHAUSTED or isinstance(error, KvspoolError):
        return
    needed, limit = logs * PER_LOG, system.port.file_limit()
    words = f"{where}: {logs:,} logs take up to {needed:,} file descriptors"
    if error.errno == errno.ENFILE:
        words = f"{words}, and the machine has none left: raise fs.file-max"
    else:
        enough = needed + limit  # any other descriptors of the process are below its limit
        words = (
            f"{words}, and this process may have {limit:,} in all. Raise its limit before it starts, with `ulimit -n {enough}` in "
            f"the shell or LimitNOFILE={enough} in its unit, or call resource.setrlimit; or open fewer of them at once"
        )
    raise _with_what_is_stored(TooFewDescriptors(words, error.errno), error) from error


def _with_what_is_stored(few: TooFewDescriptors, error: OSError) -> TooFewDescriptors:
    """Copy to an error the notes of the replaced one about records that were appended before."""
    for name in ("appended", "parts"):
        if hasattr(error, name):
            setattr(few, name, getattr(error, name))
    return few


def affordable(most: int, part: int, each: int = PER_LOG) -> int:
    """Return how many logs to keep open: `most`, or as many as a part of the descriptors allows, with so many for each; at least one."""
    return max(1, min(most, system.port.file_limit() // part // each))
