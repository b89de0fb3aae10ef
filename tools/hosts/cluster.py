"""A cluster: hosts of this machine, each in namespaces of its own, and the links between them.

    with Cluster(["hub1", "hub2", "client"]) as cluster:
        hub = cluster["hub1"].start(["kvspool", "hub", "serve", ...])     # a subprocess.Popen
        cluster.link("client", "hub1").set(loss=0.1, delay=0.02)
        cluster.link("client", "hub1").cut(one_way=True)                  # nothing arrives at hub1; client still hears it
        cluster.link("client", "hub1").heal()
        cluster["hub1"].crash()                                           # all its processes end at once

Every host reaches the others by name. None of them reaches another network. All see the files of this machine; each has a folder in
`cluster.folder`, which it sees as /srv, too, and /proc, /dev/shm and a host name of its own. `cluster.folder / "shared"` is /srv/shared
of all hosts. Nothing is left of a cluster when its process ends, however it does,
except `cluster.folder` after SIGKILL: the next cluster removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from hosts import namespaces
from hosts.switch import ADDRESSES

PREFIX = "kvspool-cluster-"
STATE, SWITCH, SHARED = "state.json", "switch", "shared"
MTU = 1500
MOST_HOSTS = 250
PATIENCE = 60.0  # seconds for an answer of the switch, which is idle or busy but never waits

T = TypeVar("T")


class NoNamespaces(Exception):
    """This process may not make hosts; the message has the reason."""


class Link:
    """The connection of two hosts. With `one_way`, a call changes only the direction from the first one to the second one."""

    def __init__(self, folder: Path, first: str, second: str) -> None:
        self.folder, self.first, self.second = folder, first, second

    def set(self, *, one_way: bool = False, **faults: float | bool) -> None:
        """Set some of the faults: cut, loss, delay, jitter, reorder, duplicate, rate. Others stay."""
        for a, b in self._ways(one_way):
            command(self.folder, {"from": a, "to": b, "set": faults})

    def cut(self, *, one_way: bool = False) -> None:
        """Let nothing arrive."""
        self.set(one_way=one_way, cut=True)

    def heal(self, *, one_way: bool = False) -> None:
        """Take back all faults."""
        self.set(one_way=one_way, cut=False, loss=0.0, delay=0.0, jitter=0.0, reorder=0.0, duplicate=0.0, rate=0.0)

    def counts(self, *, one_way: bool = False) -> dict[str, int]:
        """Return how many packets passed, and how often each fault happened."""
        found = [way["counts"] for way in command(self.folder, {}) if (way["from"], way["to"]) in self._ways(one_way)]
        return {name: sum(counts[name] for counts in found) for name in found[0]}

    def _ways(self, one_way: bool) -> list[tuple[str, str]]:
        return [(self.first, self.second), *([] if one_way else [(self.second, self.first)])]


class Host:
    """One host. A thread of its own has its namespaces, so that children of this thread are processes of the host."""

    def __init__(self, name: str, address: str, folder: Path, crashed: Callable[[], None]) -> None:
        self.name, self.address, self.folder, self._crashed = name, address, folder, crashed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"host {name}")
        self._processes: list[subprocess.Popen[Any]] = []
        self._init: subprocess.Popen[bytes] | None = None
        self._original = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.device = -1

    def boot(self, hosts: Path, mtu: int) -> None:
        """Create its namespaces and its network device. Raises OSError."""
        self.folder.mkdir()
        self._do(lambda: self._boot(hosts, mtu))

    def start(self, words: Sequence[object], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, with the options of subprocess.Popen."""
        self._processes = [process for process in self._processes if process.poll() is None]
        options.setdefault("cwd", self.folder)
        process: subprocess.Popen[Any] = self._do(lambda: subprocess.Popen([str(word) for word in words], **options))
        self._processes.append(process)
        return process

    def run(self, words: Sequence[object], timeout: float | None = None) -> str:
        """Run a command on this host to its end, and return its output. Raises subprocess.CalledProcessError with both outputs."""
        with self.start(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, [str(word) for word in words], output, errors)
        return str(output)

    @property
    def pid(self) -> int:
        """Return the id of its process 1, as seen from outside."""
        assert self._init is not None
        return self._init.pid

    def crash(self) -> None:
        """Kill all its processes at once. Network, mounts and files stay, and new processes can be started."""
        self._end_processes()
        self._do(self._reboot)
        self._crashed()

    def close(self) -> None:
        """End all its processes."""
        if self._init is not None:
            self._end_processes()
        self._thread.shutdown()
        os.close(self._original)

    def _do(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()

    def _boot(self, hosts: Path, mtu: int) -> None:
        namespaces.unshare(sum(namespaces.KINDS.values()))
        socket.sethostname(self.name)
        namespaces.own_mounts(hosts)
        namespaces.own_home(self.folder, hosts.with_name(SHARED))
        self.device = namespaces.open_device(self.address, mtu)
        self._start_init()

    def _reboot(self) -> None:
        namespaces.forget_processes()
        namespaces.restart_processes(self._original)
        self._start_init()

    def _start_init(self) -> None:
        program = [sys.executable, "-I", "-S", namespaces.__file__]
        self._init = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"ready\n":
            raise OSError(f"process 1 of the host {self.name} does not start")

    def _end_processes(self) -> None:
        assert self._init is not None and self._init.stdin is not None and self._init.stdout is not None
        self._init.kill()
        for process in (*self._processes, self._init):  # process 1 ends after all others of its namespace were waited for
            process.wait()
        self._init.stdin.close()
        self._init.stdout.close()
        self._processes = []


class Cluster(Mapping[str, Host]):
    """Hosts by their names, and the switch between them, until it is closed. Raises NoNamespaces if this process may not have them.

    The seed decides about packets that are lost, repeated or passed by others; `mtu` is the largest packet.
    """

    def __init__(self, names: Sequence[str], *, seed: int | None = None, mtu: int = MTU) -> None:
        if not 0 < len(names) == len(set(names)) <= MOST_HOSTS:
            raise ValueError(f"a cluster has 1 to {MOST_HOSTS} hosts, each with a name of its own")
        for name in names:
            if not name.replace("-", "").isalnum() or not name.isascii() or len(name) > 63:
                raise ValueError(f"{name!r} is no name of a host: use letters, digits and hyphens")
        self._refuse()
        remove_remains()
        folder = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
        self._lock = _locked(folder)
        self.name = folder.name.removeprefix(f"new-{PREFIX}")  # for `tools/cluster exec --cluster`
        self.folder = folder.rename(folder.with_name(folder.name.removeprefix("new-")))  # locked before others can see it
        self._hosts: dict[str, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        try:
            self._boot(names, mtu)
            self._connect(random.randrange(1 << 32) if seed is None else seed)
        except OSError as error:
            self.close()
            raise NoNamespaces(f"this machine does not let root make hosts: {error}") from error
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def link(self, first: str, second: str) -> Link:
        """Return the link of two hosts. Raises KeyError if one is unknown, or both are the same."""
        if first == second:
            raise KeyError(f"{first} has no link to itself")
        return Link(self.folder, self[first].name, self[second].name)

    def links(self, name: str) -> list[Link]:
        """Return the links of a host to all others."""
        return [self.link(name, other) for other in self if other != name]

    def close(self) -> None:
        """End all processes of all hosts, and remove `folder`."""
        for host in self._hosts.values():
            host.close()
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait()
        for host in self._hosts.values():
            if host.device >= 0:
                os.close(host.device)
                host.device = -1
        self._hosts = {}
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse(self) -> None:
        if sys.platform != "linux":
            raise NoNamespaces("hosts need Linux")
        if os.geteuid():
            raise NoNamespaces("only root may make hosts: run it with sudo")
        if not os.path.exists("/dev/net/tun"):
            raise NoNamespaces("there is no /dev/net/tun: load the module tun, or give the container this device")

    def _boot(self, names: Sequence[str], mtu: int) -> None:
        table = self.folder / "hosts"
        addresses = {name: f"{ADDRESSES}{number}" for number, name in enumerate(names, 1)}
        table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items()))
        (self.folder / SHARED).mkdir()
        for name, address in addresses.items():
            host = self._hosts[name] = Host(name, address, self.folder / f"host-{name}", self._tell)
            host.boot(table, mtu)
        self._tell()

    def _tell(self) -> None:
        """Write down what other processes need to know of the hosts."""
        state = {"hosts": {name: {"address": host.address, "pid": host.pid} for name, host in self._hosts.items()}}
        new = self.folder / f"{STATE}.new"
        new.write_text(json.dumps(state))
        new.replace(self.folder / STATE)

    def _connect(self, seed: int) -> None:
        devices = {name: host.device for name, host in self._hosts.items()}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.folder / SWITCH))
            listener.listen()
            program = [sys.executable, str(Path(__file__).with_name("switch.py")), json.dumps([listener.fileno(), seed, devices])]
            descriptors = [listener.fileno(), *devices.values()]
            self._switch = subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=descriptors, start_new_session=True)
        command(self.folder, {})  # it runs


def command(folder: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a command to the switch of a cluster, and return the state of all ways. Raises ValueError if the switch refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(PATIENCE)
        client.connect(str(folder / SWITCH))
        client.sendall(json.dumps(request).encode())
        client.shutdown(socket.SHUT_WR)
        answer = json.loads(client.recv(1 << 22) or b'{"error": "the switch has ended"}')
    if "error" in answer:
        raise ValueError(answer["error"])
    ways: list[dict[str, Any]] = answer["ways"]
    return ways


def running() -> dict[str, Path]:
    """Return the folders of the clusters that run on this machine, by their names."""
    found = {}
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _locked(folder)
        if lock is not None:
            os.close(lock)
        elif (folder / SWITCH).exists():
            found[folder.name.removeprefix(PREFIX)] = folder
    return found


def remove_remains() -> None:
    """Remove the folders of clusters whose process was killed. Their processes and networks have ended with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return the lock of a cluster's folder, None if its process runs."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
