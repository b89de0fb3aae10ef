"""The hub, the shippers and the pipeline of the job: each a process of the command `kvspool`, which can be killed and restarted.

A thread for each reads its reports, which are lines of JSON. All of them end with this process, however it ends: the kernel ensures that,
because a killed process can't.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

KILLED = -signal.SIGKILL
PATIENCE = 20.0  # seconds for a process to end after a request
HOST = "127.0.0.1"
REPORTS = 0.1  # seconds between two reports of a shipper
LEAST_FREE = "64MiB"  # of the disk: the job has reserved the other space that it needs

# A process that becomes the command, unless its parent has already ended. PR_SET_PDEATHSIG is 1, and outlives execv.
BECOME = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


class DaemonError(Exception):
    """A process of the command ended, or can't work; the message names it and has its output."""


class Daemon:
    """One process of the command, under a readable name. The file `log` has its output."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.said: dict = {}  # its last report
        self.process: subprocess.Popen | None = None
        self._listener: threading.Thread | None = None

    def arguments(self) -> list:
        """Return the arguments after the command's name."""
        raise NotImplementedError

    def command(self) -> list:
        """Return the program, with a full path, and its arguments."""
        return [Path(sys.executable).parent / "kvspool", *self.arguments()]

    def start(self) -> None:
        """Start it; it reports when it is ready."""
        self.said = {}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BECOME, str(os.getpid()), *map(str, self.command())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # only we get Ctrl-C, and then end it
            )
        self._listener = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self._listener.start()

    def kill(self) -> None:
        """Kill it with SIGKILL. Raises DaemonError if it had already ended."""
        self.check()
        self.process.kill()
        self._join()
        if self.process.returncode != KILLED:
            raise DaemonError(f"{self.name} had ended before it could be killed: {self._last_words()}")

    def stop(self) -> None:
        """End it in order. Raises DaemonError if it doesn't end, or fails."""
        self.check()
        self.process.terminate()
        try:
            self._join(PATIENCE)
        except subprocess.TimeoutExpired:
            raise DaemonError(f"{self.name} does not end: {self._last_words()}") from None
        if self.process.returncode:
            raise DaemonError(f"{self.name} ended with {_how(self.process.returncode)}: {self._last_words()}")

    def end(self) -> None:
        """End it at once, in any state."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self._join()

    def check(self) -> None:
        """Raise DaemonError if it ended unexpectedly."""
        if self.process.poll() is not None:
            raise DaemonError(f"{self.name} ended unexpectedly ({_how(self.process.returncode)}): {self._last_words()}")

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.process.pid

    def _join(self, timeout: float | None = None) -> None:
        self.process.wait(timeout)
        self._listener.join()
        self.process.stdout.close()

    def _listen(self, process: subprocess.Popen) -> None:
        """Keep the last report, while it is from the present process."""
        for line in process.stdout:
            if line.endswith(b"\n") and process is self.process:  # a killed process may leave an incomplete line
                self.said = json.loads(line)

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return f"{lines[-1] if lines else 'no output'} ({self.log})"


class Hub(Daemon):
    """The hub: `kvspool hub serve`, over TLS, with its page. After a restart it has the same address."""

    def __init__(self, root: Path, security: Security, log: Path) -> None:
        super().__init__("the hub", log)
        self.root = root
        self.security = security
        self.location = f"grpc+tls://{HOST}:0"
        self.page = f"http://{HOST}:0"

    def arguments(self) -> list:
        """Return the arguments after the command's name."""
        listen, page = (url.rstrip("/").rpartition("/")[2] for url in (self.location, self.page))
        security = self.security
        return [
            *("hub", "serve", "--root", self.root, "--listen", listen, "--page", page, "--json", "--least-free", LEAST_FREE),
            *("--access", security.access, "--certificate", security.certificate, "--key", security.key),
        ]

    @property
    def is_ready(self) -> bool:
        """Return whether it listens; then `location` and `page` are its addresses."""
        self.check()
        said = self.said
        if said:
            self.location, self.page = said["location"], said["page"]
        return bool(said)


class Shipper(Daemon):
    """One airport's shipper: `kvspool ship`."""

    def __init__(self, client: str, spools: Path, hub: Hub, log: Path) -> None:
        super().__init__(f"the shipper of {client}", log)
        self.client = client
        self.spools = spools
        self.hub = hub

    def arguments(self) -> list:
        """Return the arguments after the command's name."""
        security = self.hub.security
        return [
            *("ship", f"{self.client}={self.spools}", self.hub.location, "--json", "--interval", REPORTS),
            *("--ca", security.authority, "--token-file", security.token(self.client)),
        ]

    @property
    def is_connected(self) -> bool:
        """Return whether it is connected to the hub, by its last report."""
        return self.said.get("state") == "connected"

    @property
    def acknowledged(self) -> int:
        """Return how many of its records the hub has acknowledged, by its last report."""
        return sum(lane["acknowledged"] for lane in self.said.get("lanes", ()))

    @property
    def lost(self) -> int:
        """Return how many records were overwritten before they were sent."""
        return self.said.get("lost", 0)


class Pipeline(Daemon):
    """Spark, which reads the hub root live: `kvspool pipeline run`. It completes its batch before it ends."""

    def __init__(self, job: Path, log: Path) -> None:
        super().__init__("the pipeline", log)
        self.job = job

    def arguments(self) -> list:
        """Return the arguments after the command's name."""
        return ["pipeline", "run", self.job, "--json"]

    def read(self, client: str) -> int:
        """Return how many of a client's records its batches have processed, by its last report."""
        return sum(shard["next"] for shard in self.said.get("shards", ()) if shard["topic"] == client)

    @property
    def is_ready(self) -> bool:
        """Return whether it has finished a batch."""
        return self.said.get("batch", -1) >= 0

    @property
    def words(self) -> str:
        """Return its state in a few words."""
        return f"batch {self.said['batch'] + 1}" if self.is_ready else "Spark starts"


class TableAppender(Daemon):
    """The command that appends the records of the hub root to a Delta table, without Spark: `kvspool table append`."""

    def __init__(self, root: Path, table: Path, schema: str, log: Path) -> None:
        super().__init__("the table's appender", log)
        self.root, self.table, self.schema = root, table, schema

    def arguments(self) -> list:
        """Return the arguments after the command's name."""
        return ["table", "append", self.root, self.table, "--schema", self.schema, "--every", "1", "--json"]

    @property
    def appended(self) -> int:
        """Return how many records it has appended, by its last report."""
        return self.said.get("records", 0)

    @property
    def seconds(self) -> float:
        """Return the time of its commits, without waits."""
        return self.said.get("seconds", 0.0)


class Security:
    """Certificates for TLS, and a token for each client, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = folder / "ca.pem"
        self.certificate = folder / "server.pem"
        self.key = folder / "server.key"
        self.access = folder / "access.toml"

    def token(self, client: str) -> Path:
        """Return the file of a client's token."""
        return self.folder / f"{client}.token"

    def make(self, clients: tuple, log: Path) -> None:
        """Create all of them, with the commands for that. Raises DaemonError."""
        command(["hub", "certificate", "init", self.folder, "--name", HOST], log)
        for client in clients:
            command(["hub", "token", "add", self.access, "--name", client, "--output", self.token(client)], log)


def command(arguments: list, log: Path) -> None:
    """Run a command of kvspool in this process, with its output in a file. Raises DaemonError if it fails."""
    from kvspool.cli import main

    with open(log, "a", encoding="utf-8") as said, redirect_stdout(said):
        code = main([str(argument) for argument in arguments])
    if code:
        raise DaemonError(f"kvspool {' '.join(map(str, arguments))} ended with exit code {code}")


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
