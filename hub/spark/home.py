"""A home of Spark whose Python processes start fast.

A PySpark package gives its processes a zip of its sources, and each process compiles all its imports. That takes 0.7 s of a core for every
streaming query. The compiled package takes a quarter of that. Our home is a folder of links to the package, with a link to the package
instead of the zip.
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
    """Make Spark use our home, if it starts in this environment from now on. Return the home.

    folder: its path, created if it is missing, and kept. The default is a temporary folder, 0700, removed when this process ends; a killed
    process leaves the folder, which has only links. If SPARK_HOME is set, or PySpark isn't a package that includes Spark, nothing is done,
    and None returned. Raises OSError.
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
