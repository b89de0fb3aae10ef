"""The switch of a cluster: a process between the network devices of its hosts, which passes packets on, or fails to, as it was asked.

Commands arrive at a socket, one JSON object each. `{"from": NAME, "to": NAME, "set": {...}}` sets faults of one direction, and any command
is answered by the faults and counts of all directions. The switch ends when its standard input does.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

ADDRESSES = "10.77.0."  # of the hosts, in no other namespace
TURN = 64  # packets of a host before those of the next one
LARGEST = 1 << 16
HELD = 0.02  # seconds that a packet waits until others have passed it
PROBABILITIES = ("loss", "reorder", "duplicate")
COUNTED = ("cut", "lost", "delayed", "reordered", "duplicated", "dropped")
LONGEST_PAUSE = 60.0  # seconds
QUEUE = 0.5  # seconds of packets that wait for bandwidth; later ones are dropped, as by a router


@dataclass
class Faults:
    """The faults of one direction between two hosts."""

    cut: bool = False  # nothing arrives
    loss: float = 0.0  # the probability that a packet is lost
    delay: float = 0.0  # seconds
    jitter: float = 0.0  # up to so many seconds more, different for each packet
    reorder: float = 0.0  # the probability that a packet is passed by later ones
    duplicate: float = 0.0  # the probability that a packet arrives twice
    rate: float = 0.0  # bytes a second; 0: as fast as it goes


@dataclass
class Way:
    """One direction between two hosts: its faults, and how often each happened."""

    end: int  # the device of the receiver
    faults: Faults = field(default_factory=Faults)
    passed: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    free_at: float = 0.0  # when the bandwidth was used up to

    def set(self, settings: dict[str, float | bool]) -> None:
        """Change some faults. Raises TypeError for an unknown one, and ValueError for an impossible value."""
        faults = Faults(**{**vars(self.faults), **settings})
        for name, value in vars(faults).items():
            most = 1.0 if name in PROBABILITIES else 1e15
            if not 0 <= value <= most:
                raise ValueError(f"{name}={value} is {'no probability' if most == 1.0 else 'out of range'}")
        self.faults = faults


class Switch:
    """Passes packets on until it is ended. `devices` are descriptors, by the names of hosts."""

    def __init__(self, devices: dict[str, int], listener: socket.socket, seed: int) -> None:
        self.dice = random.Random(seed)
        self.names = list(devices)
        self.listener = listener
        self.clients: dict[int, socket.socket] = {}
        self.waiting: list[tuple[float, int, Way, bytes]] = []  # packets and when they are due
        self.number = 0
        self.ways = {(a, b): Way(end) for a in devices for b, end in devices.items() if a != b}
        addresses = [socket.inet_aton(f"{ADDRESSES}{number}") for number in range(1, len(devices) + 1)]
        self.routes = {
            device: {address: self.ways[a, b] for b, address in zip(devices, addresses, strict=True) if a != b}
            for a, device in devices.items()
        }

    def run(self) -> None:
        """Pass packets on, and obey commands, until standard input ends."""
        poll = select.epoll()
        for descriptor in (*self.routes, self.listener.fileno()):
            poll.register(descriptor, select.EPOLLIN)
        poll.register(0, select.EPOLLIN)
        while True:
            pause = min(LONGEST_PAUSE, max(0.0, self.waiting[0][0] - time.monotonic())) if self.waiting else -1.0
            for descriptor, _ in poll.poll(pause):
                if descriptor == 0:
                    return
                if descriptor in self.routes:
                    self.receive(descriptor)
                elif descriptor == self.listener.fileno():
                    client, _ = self.listener.accept()
                    self.clients[client.fileno()] = client
                    poll.register(client, select.EPOLLIN)
                else:
                    self.answer(self.clients[descriptor])
            self.send()

    def receive(self, device: int) -> None:
        """Take packets of one host."""
        routes = self.routes[device]
        for _ in range(TURN):
            try:
                packet = os.read(device, LARGEST)
            except OSError:
                return
            way = routes.get(packet[16:20])
            if way is not None and packet[0] >> 4 == 4:
                self.take(way, packet)

    def take(self, way: Way, packet: bytes) -> None:
        """Let happen to a packet what the faults say, and pass it on at once if it need not wait."""
        faults, counts, dice = way.faults, way.counts, self.dice
        if faults.cut:
            counts["cut"] += 1
            return
        if faults.loss and dice.random() < faults.loss:
            counts["lost"] += 1
            return
        copies = 1
        if faults.duplicate and dice.random() < faults.duplicate:
            counts["duplicated"] += 1
            copies = 2
        now = time.monotonic()
        for _ in range(copies):
            due = now
            if faults.rate:
                start = max(now, way.free_at)
                if start - now > QUEUE:
                    counts["dropped"] += 1
                    continue
                way.free_at = due = start + len(packet) / faults.rate
            due += faults.delay + (faults.jitter and dice.random() * faults.jitter)
            if faults.reorder and dice.random() < faults.reorder:
                counts["reordered"] += 1
                due += HELD
            if due <= now:
                self.deliver(way, packet)
            else:
                counts["delayed"] += 1
                self.number += 1
                heapq.heappush(self.waiting, (due, self.number, way, packet))

    def send(self) -> None:
        """Deliver the packets that are due."""
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now:
            _, _, way, packet = heapq.heappop(self.waiting)
            if way.faults.cut:
                way.counts["cut"] += 1
            else:
                self.deliver(way, packet)

    def deliver(self, way: Way, packet: bytes) -> None:
        """Write a packet to its receiver, which drops it if its queue is full."""
        with suppress(OSError):
            os.write(way.end, packet)
            way.passed += 1

    def answer(self, client: socket.socket) -> None:
        """Obey one command."""
        request = client.recv(LARGEST)
        if not request:
            del self.clients[client.fileno()]
            client.close()
            return
        try:
            command = json.loads(request)
            if "set" in command:
                self.ways[command["from"], command["to"]].set(command["set"])
            answer: dict[str, object] = {"ways": [{"from": a, "to": b, **self.state(way)} for (a, b), way in self.ways.items()]}
        except (ValueError, KeyError, TypeError) as error:
            answer = {"error": str(error)}
        with suppress(OSError):  # it did not wait for the answer
            client.sendall(json.dumps(answer).encode())

    def state(self, way: Way) -> dict[str, object]:
        """Return the faults and counts of one direction, as an answer has them."""
        return {"faults": vars(way.faults), "counts": {"passed": way.passed, **way.counts}}


def main() -> None:
    """Run with the descriptor of the listening socket, a seed, and the descriptors of the devices by names, as JSON."""
    listener, seed, devices = json.loads(sys.argv[1])
    with socket.socket(fileno=listener) as accepting:
        Switch(devices, accepting, seed).run()


if __name__ == "__main__":
    main()
