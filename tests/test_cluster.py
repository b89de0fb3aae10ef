"""`tools/cluster`: hosts in namespaces of their own, a switch that fails on request, and a slice of the campaign that uses both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.append(str(TOOLS))

from hosts import Cluster, NoNamespaces, switch  # noqa: E402
from hosts.cluster import PREFIX  # noqa: E402

PATIENCE = 120.0
LISTEN = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('0.0.0.0', 7)); print('ready', flush=True)\n"
LISTEN += "while True: print(s.recv(99).decode(), flush=True)"
SEND = "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); [s.sendto(w.encode(), (sys.argv[1], 7)) for w in sys.argv[2:]]"


def eventually(happened: Callable[[], Any], otherwise: str) -> None:
    """Wait until something has happened, for two minutes at most."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


# The switch, with a clock of the test and sockets in the place of network devices.


class Wires:
    """A switch between hosts a and b."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(switch, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.ends, inner = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in "ab"), strict=True)
        self.sockets = [*self.ends, *inner]
        for each in self.sockets:
            each.setblocking(False)
        self.switch = switch.Switch(dict(zip("ab", (each.fileno() for each in inner), strict=True)), self.ends[0], seed=1)
        self.devices = [each.fileno() for each in inner]

    def send(self, *numbers: int) -> None:
        """Send packets of host a to host b."""
        for number in numbers:
            self.ends[0].send(bytes([0x45, *bytes(15)]) + socket.inet_aton(f"{switch.ADDRESSES}2") + bytes([number]))
        self.switch.receive(self.devices[0])

    def arrived(self, at: float) -> list[int]:
        """Return the packets that host b has got since the last call, by a time."""
        self.now = 100.0 + at
        self.switch.send()
        found = []
        while True:
            try:
                found.append(self.ends[1].recv(100)[20])
            except BlockingIOError:
                return found

    def set(self, **faults: float | bool) -> None:
        self.switch.ways["a", "b"].set(faults)

    @property
    def counts(self) -> dict[str, int]:
        return self.switch.ways["a", "b"].counts


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    made = Wires(monkeypatch)
    yield made
    for each in made.sockets:
        each.close()


def test_without_faults_packets_pass_at_once_in_order(wires: Wires) -> None:
    wires.send(1, 2, 3)
    assert wires.arrived(0) == [1, 2, 3] and not any(wires.counts.values())


def test_nothing_passes_a_cut_also_if_it_was_under_way(wires: Wires) -> None:
    wires.set(delay=1.0)
    wires.send(1)
    wires.set(cut=True, delay=0.0)
    wires.send(2, 3)
    assert wires.arrived(5) == [] and wires.counts["cut"] == 3
    wires.set(cut=False)
    wires.send(4)
    assert wires.arrived(6) == [4]


def test_packets_are_lost_and_repeated_as_often_as_was_asked(wires: Wires) -> None:
    wires.set(loss=0.3)
    wires.send(*range(64))
    passed = wires.arrived(0)
    assert 64 - len(passed) == wires.counts["lost"] and 5 < wires.counts["lost"] < 40
    wires.set(loss=0.0, duplicate=1.0)
    wires.send(1, 2)
    assert wires.arrived(0) == [1, 1, 2, 2] and wires.counts["duplicated"] == 2
    wires.set(loss=1.0)
    wires.send(3)
    assert wires.arrived(0) == []


def test_a_delayed_packet_arrives_when_it_is_due_and_jitter_changes_the_order(wires: Wires) -> None:
    wires.set(delay=0.5)
    wires.send(1, 2)
    assert wires.arrived(0.49) == [] and wires.arrived(0.5) == [1, 2]
    wires.set(jitter=1.0)
    wires.send(*range(50))
    found = wires.arrived(9)
    assert sorted(found) == list(range(50)) != found


def test_packets_are_passed_by_later_ones(wires: Wires) -> None:
    wires.set(reorder=0.5)
    wires.send(*range(50))
    first, late = wires.arrived(0), wires.arrived(switch.HELD)
    assert sorted(first + late) == list(range(50)) and len(late) == wires.counts["reordered"] > 5


def test_bandwidth_spreads_packets_and_drops_those_that_would_wait_for_long(wires: Wires) -> None:
    wires.set(rate=210.0)  # ten packets of 21 bytes a second
    wires.send(*range(20))
    assert wires.arrived(0.11) == [0] and wires.arrived(0.31) == [1, 2]
    assert wires.arrived(60) == [3, 4, 5] and wires.counts["dropped"] == 14  # half a second of them waits


@pytest.mark.parametrize("faults", [{"loss": 1.5}, {"delay": -1.0}, {"rate": float("nan")}, {"delay": float("inf")}], ids=str)
def test_an_impossible_fault_is_refused(wires: Wires, faults: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(faults))):
        wires.set(**faults)


# Hosts.


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three hosts, or the reason why there are none."""
    try:
        made = Cluster(["a", "b", "c"], seed=1)
    except NoNamespaces as error:
        pytest.skip(str(error))
    with made:
        yield made


def listener(cluster: Cluster, name: str) -> subprocess.Popen[str]:
    """Start a process that prints the datagrams that arrive at a host."""
    process: subprocess.Popen[str] = cluster[name].start([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_hosts_have_names_addresses_processes_and_shared_memory_of_their_own(cluster: Cluster) -> None:
    mine = "[name for name in os.listdir('/dev/shm') if name == 'mine']"
    say = f"import os, socket; print(socket.gethostname(), {mine}, sum(map(str.isdigit, os.listdir('/proc'))))"
    cluster["a"].run(["touch", "/dev/shm/mine"])
    assert cluster["a"].run([sys.executable, "-c", say]).split(" [") == ["a", "'mine'] 2\n"]  # process 1 and this one
    assert cluster["b"].run([sys.executable, "-c", say]) == "b [] 2\n"
    assert not os.path.exists("/dev/shm/mine") and socket.gethostname() not in cluster
    with pytest.raises(subprocess.CalledProcessError):  # no other network
        cluster["a"].run([sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 9))"])


def test_a_link_is_cut_in_one_direction_and_healed_while_it_is_in_use(cluster: Cluster) -> None:
    with listener(cluster, "a") as at_a, listener(cluster, "b") as at_b:
        assert at_a.stdout is not None and at_b.stdout is not None
        link = cluster.link("a", "b")
        link.cut(one_way=True)
        cluster["a"].run([sys.executable, "-c", SEND, "b", "lost"])
        eventually(lambda: link.counts(one_way=True)["cut"], "no packet is hit")
        cluster["b"].run([sys.executable, "-c", SEND, "a", "heard"])
        assert at_a.stdout.readline() == "heard\n"
        cluster["c"].run([sys.executable, "-c", SEND, "b", "from c"])
        assert at_b.stdout.readline() == "from c\n"
        link.heal()
        cluster["a"].run([sys.executable, "-c", SEND, "b", "again"])
        assert at_b.stdout.readline() == "again\n"
        at_a.kill()
        at_b.kill()


def test_a_crash_ends_all_processes_of_a_host_and_no_others(cluster: Cluster) -> None:
    words = [sys.executable, "-c", "import subprocess; print(1, flush=True); subprocess.run(['sleep', '1000'])"]
    with cluster["a"].start(words, stdout=subprocess.PIPE) as ended, listener(cluster, "b") as stays:
        assert ended.stdout is not None and ended.stdout.readline()
        cluster["a"].crash()
        assert ended.returncode == -signal.SIGKILL and stays.poll() is None
        assert ended.stdout.read() == b""  # its child has ended, too
        cluster["a"].run([sys.executable, "-c", SEND, "b", "back"])
        assert stays.stdout is not None and stays.stdout.readline() == "back\n"
        stays.kill()


def test_after_sigkill_no_process_is_left_and_the_next_cluster_removes_the_folder(cluster: Cluster) -> None:
    program = "from hosts import Cluster; import time; made = Cluster(['x', 'y']); made['x'].start(['sleep', '1000'], stdout=1)\n"
    program += "print(made.folder, flush=True); time.sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TOOLS)}
    ) as victim:
        assert victim.stdout is not None
        folder = Path(victim.stdout.readline().strip())
        assert folder.name.startswith(PREFIX) and folder.is_dir()
        Cluster(["z"]).close()
        assert folder.is_dir()  # it is in use
        victim.kill()
        assert victim.stdout.read() == ""  # the end of all processes that had it open: sleep too
    Cluster(["z"]).close()
    assert not folder.exists() and cluster.folder.exists()


def test_the_command_runs_enters_changes_and_shows(cluster: Cluster) -> None:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, TOOLS / "cluster", *words], capture_output=True, text=True, timeout=PATIENCE)

    here = ("--cluster", cluster.name)
    assert call("run", "--hosts", "p,q", "--on", "q", "--", "sh", "-c", "hostname; exit 3").stdout == "q\n"
    assert call("run", "--hosts", "p,q", "--", "sh", "-c", "exit 3").returncode == 3
    assert call("exec", *here, "b", "--", "hostname").stdout == "b\n"
    assert call("link", *here, "a", "b", "--loss", "0.25", "--cut", "--one-way").returncode == 0
    shown = call("show", *here).stdout
    assert "a -> b: cut, loss 0.25; " in shown and "b -> a: no faults; " in shown and cluster["c"].address in shown
    assert call("link", *here, "a", "b", "--heal").returncode == 0 and "cut, " not in call("show", *here).stdout
    refused = call("link", *here, "a", "b", "--loss", "7")
    assert refused.returncode == 1 and refused.stderr == "tools/cluster: loss=7.0 is no probability\n"
    assert call("run", "--hosts", "p", "--", "no such program").returncode == 1
    assert call("run", "--hosts", "p").returncode == 2


def test_without_root_hosts_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNamespaces, match="only root may make hosts"):
        Cluster(["a"])


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a b"], ["../a"], ["x" * 64]], ids=str)
def test_names_that_no_host_can_have_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="host"):
        Cluster(names)


def test_each_acknowledged_record_is_at_two_hubs_and_at_each_reader_once_though_hubs_and_links_fail(cluster: Cluster) -> None:
    cluster.close()
    words = [sys.executable, str(TOOLS / "faults" / "copies"), "3", "--seed", "4", "--longest", "0.3", "--clients", "2"]
    done = subprocess.run([*words, "--no-spark", "--json"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["records"] == counts["records of the readers"] > 200  # two hubs, and two readers
    assert sum(counts.get(f"packets {name}", 0) for name in ("cut", "lost", "delayed", "reordered", "duplicated"))


def test_each_acknowledged_record_is_at_the_hub_once_though_hosts_and_links_fail(cluster: Cluster) -> None:
    cluster.close()  # it has shown that there may be one
    words = [sys.executable, str(TOOLS / "faults" / "cluster"), "2", "--seed", "172", "--longest", "0.3", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["SIGKILL of the hub"] == counts["end of all processes of a client's host"] == 1
    assert counts["records"] > 100 and counts["violations"] == 0
    assert sum(counts.get(f"packets {name}", 0) for name in ("cut", "lost", "delayed", "reordered", "duplicated"))
