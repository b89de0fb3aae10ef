"""Java and the jars of the peers that run in it; Maven puts them into `tools/peers/java/target`."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from cases.case import LeftOut

HERE = Path(__file__).resolve().parent / "java"
LEAST = 17  # version of Java
# Chronicle Queue and Aeron use internals of the JDK; these options are those of their documentation.
OPENED = (
    "java.base/java.lang java.base/java.lang.reflect java.base/java.io java.base/java.nio java.base/java.util java.base/sun.nio.ch "
    "java.base/jdk.internal.ref java.base/jdk.internal.misc jdk.compiler/com.sun.tools.javac.file"
).split()
EXPORTED = "java.base/jdk.internal.ref java.base/jdk.internal.misc java.base/sun.nio.ch jdk.unsupported/sun.misc".split()

QUIET = ["-Dchronicle.analytics.disable=true", "-Dchronicle.announcer.disable=true"]  # Chronicle reports its use over the internet


@cache
def java() -> list[str]:
    """Return the command of Java with the options that the peers need. Raises LeftOut without one."""
    home = os.environ.get("JAVA_HOME")
    program = shutil.which(str(Path(home, "bin", "java")) if home else "java")
    if program is None:
        raise LeftOut(f"java is missing; on Debian: apt-get install openjdk-{LEAST}-jdk-headless maven")
    opened = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENED]
    exported = [f"--add-exports={package}=ALL-UNNAMED" for package in EXPORTED]
    return [program, *opened, *exported, *QUIET]


def classpath(artifact: str) -> str:
    """Return the class path with our programs and the jars of an artifact. Raises LeftOut if they were not fetched."""
    target = HERE / "target"
    if not list(target.glob(f"lib/{artifact}*.jar")):
        raise LeftOut(f"the jars of {artifact} are missing; fetch them with: mvn -q -f tools/peers/java package")
    return os.pathsep.join([str(target / "classes"), str(target / "lib" / "*")])


def started(artifact: str, *arguments: str) -> subprocess.Popen[str]:
    """Start one of our programs in Java, with pipes to its input and from its outputs."""
    command = [*java(), "-cp", classpath(artifact), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
