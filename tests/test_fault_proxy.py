"""The network that fails on purpose: each of its faults, against a server that echoes, and that it says how often it happened."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from campaigns import FAULTS, campaign

GUARD = 20.0  # seconds after which a test hangs


faults = campaign("proxy")
Fault = faults.Fault


class Echo:
    """A server that sends back what it gets; `heard` is what came on each connection."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []
        self.ends: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self.listener.accept()
                self.heard.append(bytearray())
                threading.Thread(target=self._serve, args=(end, self.heard[-1]), daemon=True).start()

    def _serve(self, end: socket.socket, heard: bytearray) -> None:
        with end:
            try:
                while data := end.recv(65536):
                    heard += data
                    end.sendall(data)
                self.ends.append("end")
            except OSError:
                self.ends.append("reset")

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with contextlib.closing(Echo()) as echo:
        yield echo


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Any]:
    with faults.Proxy(echo.address) as proxy:
        yield proxy


def connect(proxy: Any) -> socket.socket:
    return socket.create_connection(proxy.address, timeout=GUARD)


def ask(proxy: Any, data: bytes) -> tuple[bytes, str]:
    """Send, end, and read to the end; return what came back and how it ended: "end", "reset", or "silence" after a while."""
    answer = b""
    try:
        with connect(proxy) as client:
            client.sendall(data)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)
            client.settimeout(0.3)
            while part := client.recv(65536):
                answer += part
    except TimeoutError:
        return answer, "silence"
    except OSError:
        return answer, "reset"
    return answer, "end"


def wait_until(happened: Any) -> None:
    ends = time.monotonic() + GUARD
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.002)


def test_without_a_fault_everything_passes(proxy: Any) -> None:
    data = random.Random(1).randbytes(1_000_000)
    assert ask(proxy, data) == (data, "end")
    assert proxy.connections == 1


@pytest.mark.parametrize("at", [0, 1, 500])
def test_cut_after_exactly_so_many_bytes(proxy: Any, echo: Echo, at: int) -> None:
    fault = proxy.add(Fault("cut", at=at))
    ask(proxy, b"x" * 1000)
    wait_until(lambda: echo.ends)
    assert (fault.fired, len(echo.heard[0]), echo.ends) == (1, at, ["end"])
    assert ask(proxy, b"again") == (b"again", "end")
    assert fault.fired == 1


def test_cut_of_the_answer(proxy: Any) -> None:
    fault = proxy.add(Fault("cut", "down", at=300))
    assert ask(proxy, b"x" * 1000) == (b"x" * 300, "end")
    assert fault.fired == 1


def test_reset(proxy: Any, echo: Echo) -> None:
    fault = proxy.add(Fault("reset", at=10))
    _, how = ask(proxy, b"x" * 1000)
    wait_until(lambda: echo.ends)
    assert (fault.fired, len(echo.heard[0]), how, echo.ends) == (1, 10, "reset", ["reset"])


def test_half_open_keeps_the_server_waiting_although_the_client_is_gone(proxy: Any, echo: Echo) -> None:
    fault = proxy.add(Fault("half-open", at=10))
    assert ask(proxy, b"x" * 1000)[1] == "silence"
    assert (fault.fired, len(echo.heard[0]), echo.ends) == (1, 10, [])
    proxy.drop()
    wait_until(lambda: echo.ends == ["reset"])


def test_stall_of_one_way_leaves_the_other(proxy: Any) -> None:
    fault = proxy.add(Fault("stall", at=10))
    assert ask(proxy, b"x" * 1000) == (b"x" * 10, "silence")
    assert fault.fired == 1


def test_truncate_looks_like_an_end(proxy: Any, echo: Echo) -> None:
    fault = proxy.add(Fault("truncate", at=10))
    assert ask(proxy, b"x" * 1000)[0] == b"x" * 10
    assert (fault.fired, bytes(echo.heard[0]), echo.ends) == (1, b"x" * 10, ["end"])


def test_garbage_changes_the_bytes_and_nothing_else(echo: Echo) -> None:
    with faults.Proxy(echo.address, seed=7) as proxy:
        fault = proxy.add(Fault("garbage", at=100, amount=2))
        answer, how = ask(proxy, bytes(1000))
    assert (fault.fired, how, len(answer)) == (1, "end", 1000)
    assert [place for place, byte in enumerate(answer) if byte] == [100, 101]


def test_the_same_seed_makes_the_same_garbage(echo: Echo) -> None:
    answers = []
    for _ in range(2):
        with faults.Proxy(echo.address, seed=7) as proxy:
            proxy.add(Fault("garbage", at=5))
            answers.append(ask(proxy, bytes(10)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("kind", "amount", "size"), [("trickle", 1000, 100), ("bandwidth", 100_000, 10_000), ("delay", 0.1, 1000)])
def test_slow_ways_lose_nothing(proxy: Any, kind: str, amount: float, size: int) -> None:
    fault = proxy.add(Fault(kind, amount=amount))
    started = time.monotonic()
    assert ask(proxy, b"x" * size) == (b"x" * size, "end")
    assert time.monotonic() - started >= 0.08  # as slow as it has to be: more is no failure
    assert fault.fired == 1


def test_duplicate_sends_once_more_what_the_client_before_had_sent(proxy: Any, echo: Echo) -> None:
    fault = proxy.add(Fault("duplicate"))
    ask(proxy, b"one")
    assert fault.fired == 0
    assert ask(proxy, b"two") == (b"two", "end")
    assert fault.fired == 1
    assert [bytes(heard) for heard in echo.heard] == [b"one", b"one", b"two"]


def test_steps_cut_at_every_byte(proxy: Any, echo: Echo) -> None:
    fault = proxy.add(Fault("cut", at=0, step=1, times=None))
    while ask(proxy, b"0123456789") != (b"0123456789", "end"):
        pass
    wait_until(lambda: len(echo.ends) == len(echo.heard) == 11 + 1)
    heard = [len(heard) for heard in echo.heard]
    assert heard == [*range(11), 10]
    assert fault.fired == 11


def test_a_fault_at_a_time(proxy: Any, echo: Echo) -> None:
    fault = proxy.add(Fault("cut", after=0.05))
    with connect(proxy) as client:
        client.sendall(b"hello")
        assert client.recv(5) == b"hello"
        assert client.recv(5) == b""
    assert fault.fired == 1


def test_a_fault_that_was_not_reached_did_not_fire(proxy: Any) -> None:
    fault = proxy.add(Fault("cut", at=100))
    assert ask(proxy, b"short") == (b"short", "end")
    assert fault.fired == 0
    proxy.clear()
    assert ask(proxy, b"x" * 200) == (b"x" * 200, "end")


def test_a_server_that_comes_back_on_another_port(proxy: Any, echo: Echo) -> None:
    with contextlib.closing(Echo()) as other:
        proxy.retarget(other.address)
        assert ask(proxy, b"hello") == (b"hello", "end")
        assert (len(echo.heard), len(other.heard)) == (0, 1)
    assert ask(proxy, b"hello") == (b"", "reset")


@pytest.mark.parametrize("text", ["nothing", "cut,way=left", "cut,when=1", "cut,at=x"])
def test_faults_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Fault.parse(text)


def test_faults_are_read_from_a_line_and_drawn_by_a_seed() -> None:
    fault = Fault.parse("trickle,way=down,at=5,amount=2.5,times=all,step=3")
    assert (fault.kind, fault.way, fault.at, fault.amount, fault.times, fault.step) == ("trickle", "down", 5, 2.5, None, 3)
    drawn = [Fault.any(random.Random(3), 100) for _ in range(2)]
    assert (drawn[0].kind, drawn[0].at) == (drawn[1].kind, drawn[1].at)


def test_the_command_explains_itself_and_says_its_seed(echo: Echo) -> None:
    program = str(FAULTS / "proxy.py")
    explained = subprocess.run([sys.executable, program, "--help"], capture_output=True, encoding="utf-8", check=True, timeout=GUARD)
    assert all(kind in explained.stdout for kind in faults.KINDS)
    command = [sys.executable, program, f"127.0.0.1:{echo.address[1]}", "--fault", "cut,at=2", "--any", "1", "--seed", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "seed 5\n"
        assert running.stdout.readline().endswith("seed 5\n")
        running.terminate()
