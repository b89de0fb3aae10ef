"""The home of Spark whose Python processes start fast.

PySpark that was installed as a package gives its processes a zip of its sources, and each of them compiles what it imports anew: 0.7 s of
a core, for every query that streams, where the compiled package costs a quarter of it. A home of ours is a folder of links to the
package, in which a link to it stands for that zip.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

LIBRARY = Path("python", "lib")
ZIP = "pyspark.zip"


def use_home(environment: MutableMapping[str, str] = os.environ, *, folder: Path | None = None) -> Path | None:
    """Make Spark take a home of ours, if it starts in this environment from now on; return it.

    folder: where it lies, made here unless it is there, and left there; by default a temporary one, 0700, that goes when this process
    ends. A killed process leaves it, which is some links. Nothing is done, and None returned, where SPARK_HOME is set, or PySpark isn't a
    package with a Spark in it. Raises OSError.
    """
    package = _package()
    if environment.get("SPARK_HOME") or package is None:
        return None
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="kvspool-spark-home."))
        atexit.register(_remove, folder, os.getpid())
    if not (folder / LIBRARY).exists():
        _make_links(folder, package)
    environment["SPARK_HOME"] = str(folder)
    return folder


def _make_links(folder: Path, package: Path) -> None:
    """Make a folder a home for a package of PySpark."""
    (folder / LIBRARY / ZIP).mkdir(parents=True)
    (folder / LIBRARY / ZIP / package.name).symlink_to(package)  # a folder on the path of Python, in the place of the zip
    for path in (package / LIBRARY).iterdir():
        if path.name != ZIP:
            (folder / LIBRARY / path.name).symlink_to(path)
    for path in package.iterdir():
        if path.name != LIBRARY.parts[0]:
            (folder / path.name).symlink_to(path)


def _package() -> Path | None:
    """Return where PySpark is installed with a Spark in it, without importing it."""
    spec = find_spec("pyspark")
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return package if package is not None and (package / "jars").is_dir() and (package / LIBRARY / ZIP).is_file() else None


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        shutil.rmtree(folder, ignore_errors=True)
