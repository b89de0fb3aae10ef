#!/usr/bin/env python3
"""A TCP proxy between clients and a server that simulates network failures at chosen bytes or times.

    proxy = Proxy(("127.0.0.1", 4242))
    fault = proxy.add(Fault("cut", at=1000))         # when 1000 bytes went from a client to the server
    ... let a client talk to proxy.address ...
    assert fault.fired == 1                          # a fault that never came proves nothing

The faults of a connection:

    cut        both sides are closed
    reset      both sides are reset
    half-open  nothing more is passed on, in either direction, and both sides stay open whatever the other one does
    stall      nothing more is passed on in this direction, nor read
    truncate   this direction ends, as if its sender had said so; what comes later is dropped
    garbage    `amount` bytes (1) are changed, as far as they come together
    trickle    `amount` bytes a second (10), one by one
    bandwidth  `amount` bytes a second (100 000)
    delay      everything comes `amount` seconds (0.05) later
    duplicate  what the client of the previous connection had sent is sent to the server once more, on a connection of its own, before the
               next client is let through

Each in one direction ("up": from client to server, "down") from a byte of it on, or some seconds after the connection was opened; on the
next connection that comes so far (`times`), or on all (times=None). With `step`, the byte moves on by that each time it fired. With step=1,
a client that always reconnects is cut at each byte that it sends.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]

KINDS = ("cut", "reset", "half-open", "stall", "truncate", "garbage", "trickle", "bandwidth", "delay", "duplicate")
AMOUNTS = {"garbage": 1.0, "trickle": 10.0, "bandwidth": 100_000.0, "delay": 0.05}
CHUNK = 1 << 16
RECORDED = 1 << 24  # bytes of a connection that can be sent once more
PENDING = 256  # chunks that are on their way in one direction
LOOK = 0.02  # seconds between two looks at the clock
PATIENCE = 5.0  # seconds for the answers to what is sent once more
SETTINGS = "KIND[,way=up|down][,at=BYTE|,after=SECONDS][,amount=N][,times=N|all][,step=N]"
HANG_UP = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Fault:
    """Something that goes wrong; see the module's docstring. `fired` says how often it did. ValueError for what is none."""

    kind: str
    way: str = "up"
    at: int = 0  # bytes of this direction that pass unharmed
    after: float | None = None  # seconds, instead of bytes
    amount: float | None = None
    times: int | None = 1
    step: int = 0
    fired: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no fault; these are: {', '.join(KINDS)}")
        if self.way not in ("up", "down"):
            raise ValueError(f'a way is "up" or "down", not {self.way!r}')
        if self.amount is None:
            self.amount = AMOUNTS.get(self.kind)

    @property
    def is_armed(self) -> bool:
        return self.times is None or self.fired < self.times

    @classmethod
    def any(cls, dice: random.Random, size: int) -> Fault:
        """Return a fault that the dice choose, somewhere in the first `size` bytes."""
        return cls(dice.choice(KINDS), dice.choice(("up", "down")), dice.randrange(size))

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault that a text like "cut,way=down,at=100,times=all" says."""
        kind, *settings = text.split(",")
        options: dict[str, Any] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in ("way", "at", "after", "amount", "times", "step"):
                raise ValueError(f"{name!r} is nothing that can be set for a fault")
            number = float if name in ("after", "amount") else int
            options[name] = value if name == "way" else None if value == "all" else number(value)
        return cls(kind, **options)


class Proxy:
    """Listens at `address`, passes connections on to `target`, and lets happen what was added, until it is closed."""

    def __init__(
        self, target: Address, listen: Address = ("127.0.0.1", 0), seed: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        """Start. The seed decides which bits of garbage change; `say` hears of everything that happens."""
        self.seed = seed
        self.dice = random.Random(seed)
        self.faults: list[Fault] = []
        self.connections = 0
        self.is_closed = False
        self.lock = threading.Lock()
        self._target = target
        self._say = say
        self._latest = bytearray()  # what the client of the latest connection has sent
        self._links: list[_Link] = []
        self.say(f"seed {seed}")
        self._listener = socket.create_server(listen, backlog=512)
        self._listener.settimeout(LOOK)
        self.address: Address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept, name="fault proxy", daemon=True)
        self._thread.start()

    def add(self, fault: Fault) -> Fault:
        """Let a fault happen to the connections that are opened from now on."""
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """Let nothing more happen to new connections; those that are there keep what they have."""
        self.faults.clear()

    def retarget(self, target: Address) -> None:
        """Pass new connections on to another address."""
        self._target = target

    def drop(self) -> None:
        """Reset all connections that are open now."""
        with self.lock:
            links, self._links = self._links, []
        for link in links:
            link.is_dropped = True
        for link in links:
            link.join()

    def close(self) -> None:
        """Listen no more, and reset what is open."""
        self.is_closed = True
        self._thread.join()
        self._listener.close()
        self.drop()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fire(self, fault: Fault, number: int, at: int) -> bool:
        """Count a fault as having happened to a connection; False if another one took its last time."""
        with self.lock:
            if not fault.is_armed:
                return False
            fault.fired += 1
            fault.at += fault.step
        self.say(f"connection {number}: {fault.kind} {fault.way} at byte {at}")
        return True

    def say(self, text: str) -> None:
        if self._say is not None:
            self._say(text)

    def _accept(self) -> None:
        while not self.is_closed:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # no descriptors
                time.sleep(LOOK)
                continue
            self.connections += 1
            self._duplicate()
            try:
                server = socket.create_connection(self._target, timeout=PATIENCE)
            except OSError as error:
                self.say(f"connection {self.connections}: {self._target[0]}:{self._target[1]}: {error}")
                _reset(client)
                continue
            link = _Link(self, self.connections, client, server)
            link.start()
            self._latest = link.sent_up
            with self.lock:
                self._links = [*(link for link in self._links if link.is_alive()), link]

    def _duplicate(self) -> None:
        again = bytes(self._latest)
        for fault in self.faults:
            if fault.kind == "duplicate" and again and self.fire(fault, self.connections, len(again)):
                with suppress(OSError), socket.create_connection(self._target, timeout=PATIENCE) as server:
                    server.sendall(again)
                    server.shutdown(socket.SHUT_WR)
                    while server.recv(CHUNK):
                        pass


class _Way:
    """One direction of a connection. Bytes are read, wait until they are due, and are sent."""

    def __init__(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        self.name, self.source, self.sink = name, source, sink
        self.read = self.sent = 0
        self.pending: deque[tuple[float, bytes]] = deque()  # and when they are due
        self.delay = 0.0
        self.rate = 0.0  # bytes a second; 0: as they come
        self.piece = CHUNK
        self.next_at = 0.0
        self.is_stalled = self.is_deaf = False
        self.has_ended = self.is_finished = False

    def can_read(self) -> bool:
        return not self.is_stalled and not self.has_ended and len(self.pending) < PENDING

    def can_send(self, now: float) -> bool:
        return not self.is_stalled and bool(self.pending) and self.pending[0][0] <= now and self.next_at <= now

    def take(self, data: bytes, now: float) -> None:
        self.read += len(data)
        if not data:
            self.has_ended = True
        elif not self.is_deaf:
            self.pending.append((now + self.delay, data))

    def send(self, now: float) -> None:
        due, data = self.pending.popleft()
        count = self.sink.send(data[: self.piece])
        self.sent += count
        if data[count:]:
            self.pending.appendleft((due, data[count:]))
        if self.rate:
            self.next_at = now + count / self.rate

    def finish(self) -> None:
        """Pass the end on, once everything before it was."""
        if (self.has_ended or self.is_deaf) and not self.pending and not self.is_finished:
            self.is_finished = True
            self.sink.shutdown(socket.SHUT_WR)


class _Link(threading.Thread):
    """A connection that passes through, in a thread of its own."""

    def __init__(self, proxy: Proxy, number: int, client: socket.socket, server: socket.socket) -> None:
        super().__init__(name=f"fault proxy {number}", daemon=True)
        self.proxy, self.number = proxy, number
        self.client, self.server = client, server
        self.is_dropped = self.is_over = self.is_half_open = False
        self.ways = {"up": _Way("up", client, server), "down": _Way("down", server, client)}
        self.waiting = [(fault, fault.at) for fault in proxy.faults if fault.is_armed and fault.kind != "duplicate"]
        self.opened = time.monotonic()
        self.sent_up = bytearray()
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        try:
            while not self.is_over:
                if self.is_dropped:
                    self._hang_up()
                    break
                self._pass_on()
                if all(way.is_finished for way in self.ways.values()) and not self.is_half_open:
                    break
        except OSError:
            self._hang_up()
        finally:
            self.client.close()
            self.server.close()

    def _pass_on(self) -> None:
        """Let happen what is due, wait for a moment or until something can be passed on, and do that."""
        now = time.monotonic()
        for fault, at in list(self.waiting):
            if self._is_due(fault, at):
                self._happen(fault, now)
        if self.is_over:
            return
        events = self._wait(now)
        for way in self.ways.values():
            with suppress(BlockingIOError):
                if way.can_send(now) and events.get(way.sink.fileno(), 0) & ~select.POLLIN:
                    way.send(now)
                if self._may_read(way) and events.get(way.source.fileno(), 0) & ~select.POLLOUT:
                    self._read(way)
        for way in self.ways.values():
            if not way.is_stalled:
                way.finish()

    def _wait(self, now: float) -> dict[int, int]:
        """Return what the sockets are ready for."""
        poll = select.poll()
        for end, coming, going in ((self.client, "up", "down"), (self.server, "down", "up")):
            wanted = select.POLLIN * self._may_read(self.ways[coming]) | select.POLLOUT * self.ways[going].can_send(now)
            if wanted:
                poll.register(end, wanted)
        return dict(poll.poll(self._pause(now) * 1000))

    def _may_read(self, way: _Way) -> bool:
        return way.can_read() and self._room(way) > 0

    def _pause(self, now: float) -> float:
        """Return until when nothing is due, LOOK at most."""
        times = [max(way.next_at, way.pending[0][0]) for way in self.ways.values() if way.pending and not way.is_stalled]
        return max(0.0, min([LOOK, *(due - now for due in times if due > now)]))

    def _read(self, way: _Way) -> None:
        data = way.source.recv(min(CHUNK, self._room(way)))
        if way.name == "up" and len(self.sent_up) + len(data) <= RECORDED:
            self.sent_up += data
        way.take(self._spoil(way, data), time.monotonic())

    def _room(self, way: _Way) -> int:
        """Return how many bytes may be read before the next fault of a byte."""
        places = [at - way.read for fault, at in self.waiting if self._waits_at_byte(fault, way) and fault.kind != "garbage"]
        return min([CHUNK, *(place for place in places if place >= 0)])

    def _waits_at_byte(self, fault: Fault, way: _Way) -> bool:
        return fault.way == way.name and fault.after is None and fault.is_armed

    def _is_due(self, fault: Fault, at: int) -> bool:
        if fault.kind == "garbage":
            return False  # it comes with the bytes
        return self.ways[fault.way].sent >= at if fault.after is None else self._is_late(fault)

    def _spoil(self, way: _Way, data: bytes) -> bytes:
        """Change the bytes of a chunk that are to be garbage; before it is counted as read."""
        for fault, at in list(self.waiting):
            if fault.kind == "garbage" and fault.way == way.name:
                start = at - way.read if fault.after is None else 0 if self._is_late(fault) else len(data)
                if start < len(data):
                    self.waiting.remove((fault, at))
                    if self.proxy.fire(fault, self.number, way.read + start):
                        data = self._spoiled(data, start, int(fault.amount or 1))
        return data

    def _is_late(self, fault: Fault) -> bool:
        return fault.after is not None and time.monotonic() - self.opened >= fault.after

    def _spoiled(self, data: bytes, start: int, count: int) -> bytes:
        changed = bytearray(data)
        for place in range(start, min(start + count, len(changed))):
            changed[place] ^= self.proxy.dice.randrange(1, 256)
        return bytes(changed)

    def _happen(self, fault: Fault, now: float) -> None:
        way = self.ways[fault.way]
        self.waiting = [(other, at) for other, at in self.waiting if other is not fault]
        if not self.proxy.fire(fault, self.number, way.sent):
            return
        amount = fault.amount or 0.0
        if fault.kind == "cut":
            self._cut()
        elif fault.kind == "reset":
            self._hang_up()
        elif fault.kind == "half-open":
            self.is_half_open = True
            for each in self.ways.values():
                each.is_stalled = True
        elif fault.kind == "stall":
            way.is_stalled = True
        elif fault.kind == "truncate":
            way.is_deaf = True
            way.pending.clear()
        elif fault.kind == "delay":
            way.delay = amount
        elif fault.kind in ("trickle", "bandwidth"):
            way.rate, way.next_at = amount, now
            way.piece = 1 if fault.kind == "trickle" else max(1, int(amount / 100))

    def _cut(self) -> None:
        """Close both sides. Unread bytes of a side would turn its close into a reset, so they are read."""
        self.is_over = True
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_WR)
                while end.recv(CHUNK):
                    pass

    def _hang_up(self) -> None:
        self.is_over = True
        for end in (self.client, self.server):
            _reset(end)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HANG_UP)
    end.close()


def main() -> None:
    """Be a proxy until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT", help="where the server is")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="default: a free port of this machine")
    parser.add_argument("--fault", action="append", default=[], help=SETTINGS)
    parser.add_argument("--any", type=int, default=0, metavar="N", help="also N faults that the seed chooses, in the first MiB")
    parser.add_argument("--seed", type=int, help="repeat a run; it says its seed")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    try:
        faults = [Fault.parse(text) for text in options.fault]
        faults += [Fault.any(dice, 1 << 20) for dice in [random.Random(seed)] for _ in range(options.any)]
        target, listen = _address(options.target), _address(options.listen)
    except ValueError as error:
        parser.error(str(error))
    with Proxy(target, listen, seed, lambda text: print(text, flush=True)) as proxy:
        print(f"{proxy.address[0]}:{proxy.address[1]} passes on to {options.target}, seed {seed}", flush=True)
        for fault in faults:
            print(f"  {proxy.add(fault)}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    for fault in faults:
        print(f"{fault.kind} {fault.way}: fired {fault.fired} times")


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main())
