"""A home of Spark whose Python processes start fast.

A PySpark package gives its processes a zip of its sources, and each process compiles all its imports. That takes 0.7 s of a core for every
streaming query. The compiled package takes a quarter of that. Our home is a folder of links to the package, with a link to the package
instead of the zip.

A temporary home also has the folder of Spark's own temporary files. It is removed when its process ends. The process holds a lock in it, so
the next session removes the homes of killed processes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from kvspool import system
from kvspool.errors import KvspoolError
from kvspool.system.descriptor import Descriptor

LIBRARY = Path("python", "lib")
ZIP = "pyspark.zip"
PREFIX = "kvspool-spark-home."
LOCK = "lock"  # a file that the process of a temporary home keeps locked
FILES = "files"  # of Spark
LONGEST_SOCKET = 107 - len("/.00000000-0000-0000-0000-000000000000.sock")  # bytes of a folder with sockets

_locks: list[Descriptor] = []  # of this process's homes


def use_home(environment: MutableMapping[str, str] = os.environ, *, folder: Path | None = None) -> Path | None:
    """Make Spark use our home, if it starts in this environment from now on. Return the home.

    folder: its path, created if it is missing, and kept. The default is a temporary folder, 0700, removed when this process ends; the next
    call removes those of killed processes. If SPARK_HOME is set, or PySpark isn't a package that includes Spark, nothing is done,
    and None returned. Raises OSError.
    """
    package = _package()
    if environment.get("SPARK_HOME") or package is None:
        return None
    if folder is None:
        remove_abandoned()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        atexit.register(_remove, folder, os.getpid())
        _locks.append(_locked(folder))
    if not (folder / LIBRARY).exists():
        _make_links(folder, package)
    environment["SPARK_HOME"] = str(folder)
    return folder


def settings(folder: Path) -> dict[str, str]:
    """Return settings of a session with a temporary home: Spark's temporary files are in it, and removed with it. Without effect if the
    environment names a place for them.
    """
    if os.environ.get("SPARK_LOCAL_DIRS"):
        return {}
    files = str(folder / FILES)
    found = {"spark.local.dir": files}
    if len(os.fsencode(files)) <= LONGEST_SOCKET:
        (folder / FILES).mkdir(mode=0o700, exist_ok=True)
        found["spark.python.unix.domain.socket.dir"] = files
    return found


def remove_abandoned() -> None:
    """Remove the temporary homes of this user's killed processes. Errors are ignored: a later call removes what is left."""
    parent = Path(tempfile.gettempdir())
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in system.port.names(parent) if name.startswith(PREFIX)]
    for folder in (parent / name for name in names):
        status = system.port.look_up(folder)
        if status is None or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            continue
        with suppress(OSError, KvspoolError), Descriptor(folder / LOCK, os.O_RDWR) as file:
            if system.port.try_lock_file(file, shared=False):
                shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> Descriptor:
    """Lock a new home before others can see the file of the lock."""
    file = Descriptor(folder / f".{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
    system.port.try_lock_file(file.number, shared=False)
    (folder / f".{LOCK}").rename(folder / LOCK)
    return file


def _make_links(folder: Path, package: Path) -> None:
    """Create the home's links to a package of PySpark."""
    (folder / LIBRARY / ZIP).mkdir(parents=True)
    (folder / LIBRARY / ZIP / package.name).symlink_to(package)  # a folder on Python's path, instead of the zip
    for path in (package / LIBRARY).iterdir():
        if path.name != ZIP:
            (folder / LIBRARY / path.name).symlink_to(path)
    for path in package.iterdir():
        if path.name != LIBRARY.parts[0]:
            (folder / path.name).symlink_to(path)


def _package() -> Path | None:
    """Return the path of a PySpark package that includes Spark, without importing it."""
    spec = find_spec("pyspark")
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return package if package is not None and (package / "jars").is_dir() and (package / LIBRARY / ZIP).is_file() else None


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
