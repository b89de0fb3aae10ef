"""The commands of a page of the documentation, run on the hosts of a cluster as they are written.

A block of the kind `console` has lines such as `hub$ kvspool ...`; a prompt may name several hosts. Another block whose first line is
`# HOST: NAME` is a file of that host. All commands of a host run in one shell, in /srv, so `export` and `cd` have an effect on later ones.
`scp FILES HOST:/srv` is a script that copies files from host to host, because these hosts have no SSH; nothing else is replaced.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from hosts import namespaces
from hosts.cluster import Cluster, Host, NoNamespaces

SCRIPTS = Path(sys.executable).parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$|^## ([^\n]*)$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+): (\S+)\n")
SCP = """#!/bin/bash
target="${@: -1}"
exec cp -p "${@:1:$#-1}" "$CLUSTER/host-${target%%:*}/"
"""
LASTING = re.compile(r"export |.*[^&]&$")  # a command whose effect ends with its host


class Step(NamedTuple):
    """A command for some hosts; or, with a name, a file of one host."""

    hosts: tuple[str, ...]
    text: str
    name: str = ""


def steps_of(page: str) -> dict[str, list[Step]]:
    """Return the steps of each section of a page. Raises ValueError for a line that has no prompt."""
    found: dict[str, list[Step]] = {}
    section = found.setdefault("", [])
    for kind, text, heading in FENCE.findall(page):
        if heading:
            section = found.setdefault(heading, [])
        elif kind == "console":
            section += map(_command, text.splitlines())
        elif file := FILE.match(text):
            section.append(Step((file[1],), text, file[2]))
    return found


def _command(line: str) -> Step:
    hosts, prompt, command = line.partition("$ ")
    if not prompt:
        raise ValueError(f"{line!r} has no prompt such as `hub$`")
    return Step(tuple(hosts.split(",")), command)


class Shell:
    """A shell on a host. said: the file of its output, and of the processes that it starts."""

    def __init__(self, host: Host, environment: dict[str, str], said: Path) -> None:
        self.said = said
        commands, self._commands = os.pipe()
        self._results, results = os.pipe()
        words = ["bash", "--noprofile", "--norc", f"/dev/fd/{commands}"]
        with open(said, "ab") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "pass_fds": [commands, results]}
            self.process = host.start(words, cwd=namespaces.HOME, env=environment, **streams)
        os.close(commands)
        os.close(results)
        self._result_number = results

    def begin(self, command: str) -> None:
        """Run a command; `result` waits for it."""
        os.write(self._commands, f"{command}\necho $? >&{self._result_number}\n".encode())

    def result(self, seconds: float) -> int | None:
        """Return the exit code of the command that was begun; None if it still runs after so many seconds. Raises EOFError."""
        if not select.select([self._results], [], [], seconds)[0]:
            return None
        code = os.read(self._results, 100)
        if not code:
            raise EOFError(f"the shell has ended; {self.said} has its output")
        return int(code)

    def close(self) -> None:
        """Forget it; it ends with its host."""
        os.close(self._commands)
        os.close(self._results)


class Procedures:
    """The steps of a page on the hosts of a cluster. variables: further ones of each shell. Raises NoNamespaces without a /srv."""

    def __init__(self, cluster: Cluster, page: Path, variables: dict[str, str]) -> None:
        if not Path(namespaces.HOME).is_dir():
            raise NoNamespaces(f"the hosts of a page need the directory {namespaces.HOME}: create it")
        self.cluster = cluster
        self.sections = steps_of(page.read_text(encoding="utf-8"))
        folder = cluster.folder / "bin"
        folder.mkdir()
        (folder / "scp").write_text(SCP)
        (folder / "scp").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK", "PYSPARK", "KVSPOOL"))}
        path = os.pathsep.join([str(folder), str(SCRIPTS), os.environ.get("PATH", os.defpath)])
        self._environment = {**kept, "PATH": path, "CLUSTER": str(cluster.folder), **variables}
        self._shells: dict[str, Shell] = {}
        self._lasting: dict[str, list[str]] = {name: [] for name in cluster}

    def follow(self, section: str, seconds: float = 300.0) -> None:
        """Take all steps of a section, one after the other. Raises AssertionError if a command fails or takes too long."""
        for step in self.sections[section]:
            for name in step.hosts:
                if step.name:
                    (self.cluster[name].folder / step.name).write_text(step.text)
                else:
                    self._run(name, step.text, seconds)
                    if LASTING.match(step.text):
                        self._lasting[name].append(step.text)

    def restart(self, name: str) -> None:
        """After a crash of a host, take those of its steps again whose effect has ended with it."""
        if name in self._shells:
            self._shells.pop(name).close()
        for command in self._lasting[name]:
            self._run(name, command, 60.0)

    def said(self, name: str) -> str:
        """Return the end of what the processes of a host have printed."""
        file = self._file(name)
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""

    def close(self) -> None:
        """Forget the shells."""
        for shell in self._shells.values():
            shell.close()
        self._shells = {}

    def _run(self, name: str, command: str, seconds: float) -> None:
        if name not in self._shells:
            self._shells[name] = Shell(self.cluster[name], self._environment, self._file(name))
        shell = self._shells[name]
        shell.begin(command)
        end = time.monotonic() + seconds
        while (code := shell.result(1.0)) is None:
            assert time.monotonic() < end, f"{name}$ {command} takes longer than {seconds:g} s: {self.said(name)}"
        assert code == 0, f"{name}$ {command} ended with {code}: {self.said(name)}"

    def _file(self, name: str) -> Path:
        return self.cluster.folder / f"said-{name}"
