"""Servers of Spark, each a process of its own, as an operator starts them manually; their output goes to files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from hub.spark.home import use_home
from hub.spark.java import use_java

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds, against a hang


class Servers:
    """Servers that work in a folder of their own; they have ended after the `with` block."""

    def __init__(self, folder: Path) -> None:
        home = use_home({}, folder=folder / "home")
        assert home is not None
        self.home = home
        self.folder = folder
        self.environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }
        use_java(self.environment)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def start(self, name: str, command: str, *words: str, **variables: str) -> None:
        """Start a server by a command in Spark's home."""
        with (self.folder / f"{name}.log").open("wb") as log:
            called = [str(self.home / command), *words]
            process = subprocess.Popen(called, env={**self.environment, **variables}, cwd=self.folder, stdout=log, stderr=log)
        self._processes[name] = process
        self._stack.callback(process.wait, PATIENCE)
        self._stack.callback(process.terminate)

    def said(self, name: str, pattern: str) -> str:
        """Wait until one says something, and return that."""
        deadline = time.monotonic() + PATIENCE
        while True:
            words = (self.folder / f"{name}.log").read_text(errors="replace")
            found = re.search(pattern, words)
            if found is not None:
                return found[found.lastindex or 0]
            is_alive = self._processes[name].poll() is None
            assert is_alive and time.monotonic() < deadline, f"{name} says nothing like {pattern}: {words[-3000:]}"
            time.sleep(0.02)

    def run(self, *command: object, **variables: str) -> str:
        """Run a program to its end, and return the last line that it printed: PySpark may have printed warnings before."""
        words, environment = list(map(str, command)), {**self.environment, **variables}
        done = subprocess.run(words, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=230)
        assert done.returncode == 0, done.stderr[-5000:]
        return done.stdout.splitlines()[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def confs(settings: dict[str, str]) -> list[str]:
    """Return settings as arguments."""
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
