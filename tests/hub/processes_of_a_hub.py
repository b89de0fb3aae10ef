"""Hubs and shippers as processes of their own, that can be killed and stopped.

    python processes_of_a_hub.py hub ROOT PORT LEVEL        says its port
    python processes_of_a_hub.py ship SOURCE LOCATION CLIENT
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

sys.path.append(str(Path(__file__).parent.parent.parent / "tools" / "faults"))

from proxy import Fault as Fault
from proxy import Proxy as Proxy


class Process:
    """A process; it has ended after the `with` block."""

    def __init__(self, *words: object) -> None:
        self.words = [sys.executable, __file__, *map(str, words)]
        self.start()

    def start(self) -> None:
        """Begin another life."""
        self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        """Stop the process until it is continued."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run on."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class HubProcess(Process):
    """A hub; always on the port that it found first."""

    def __init__(self, root: Path, level: str = "process", port: int = 0) -> None:
        self.port = port
        self.root, self.level = root, level
        super().__init__("hub", root, port, level)

    def start(self) -> None:
        self.words = [sys.executable, __file__, "hub", str(self.root), str(self.port), self.level]
        super().start()
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def location(self) -> str:
        """Return where clients find it."""
        return f"grpc://127.0.0.1:{self.port}"


class ServeCommand:
    """`kvspool hub serve` on a port of its own; `before`: a command that runs it."""

    def __init__(self, root: Path, *words: object, before: Sequence[object] = ()) -> None:
        serve = ["hub", "serve", "--root", root, "--listen", "127.0.0.1:0", "--no-page", "--json", *words]
        command = [*before, sys.executable, "-m", "kvspool.cli", *serve]
        self.process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()

    @property
    def location(self) -> str:
        """Return where clients find it."""
        return str(json.loads(self.said)["location"])

    def kill(self) -> str:
        """End it at once, and return what it complained of; it may have ended already."""
        self.process.kill()
        assert self.process.stdout is not None and self.process.stderr is not None
        if self.process.stderr.closed:
            return ""
        return self.process.communicate(timeout=30)[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "hub":
        from serving import HubServer

        level: Any = words[2]
        with HubServer(words[0], listen=("127.0.0.1", int(words[1])), level=level) as server:
            print(server.location.rpartition(":")[2], flush=True)
            threading.Event().wait()
    else:
        from hub.client.shipper import Shipper

        with Shipper(words[0], words[1], client=words[2], silence=float(words[3]) if len(words) > 3 else 15.0) as shipper:
            shipper.run()


if __name__ == "__main__":
    main()
