"""The limits of the hub's connections, and their table."""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

import msgspec

from hub.errors import HubFull
from kvspool.system.handles import Handle

Address = tuple[str, int]  # IP address and port
SILENT, LATE = 0.5, 5.0  # seconds without a byte, or since it was opened, after which a nameless connection gives its place to a newcomer
LATER = 2.0  # seconds until a retry


class Reason(StrEnum):
    """Why a connection was refused, or cut."""

    CONNECTIONS = "too many connections"
    UNAUTHENTICATED = "too many unauthenticated connections"
    UNAUTHENTICATED_OF_ADDRESS = "too many unauthenticated connections from one address"
    EXHAUSTED = "no descriptors left"
    AUTHENTICATION_SECONDS = "not authenticated in time"
    IDLE = "idle"
    RESET = "reset by one of its ends"
    BY_HANDLER = "closed by the server's handler"
    HANDSHAKE = "no handshake in time"
    PROTOCOL = "not HTTP/2, or against its rules"
    CONTROL_FRAMES = "too many control frames"
    UNSENT = "answers to control frames that it doesn't read"
    SHUTDOWN = "the hub is shutting down"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of connections. An address is an IPv4 address, or the first 64 bits of an IPv6 address, which usually have one owner.

    Connections without an authenticated name count by address, others by name: many clients may share an address.

    Raises ValueError for a limit that is not above 0. Bytes are those of the wire, TLS included; times are exact to a quarter, or to a
    second.
    """

    connections: int = 4096
    connections_per_principal: int = 1024  # authenticated ones
    unauthenticated: int = 256
    unauthenticated_per_address: int = 128
    authentication_seconds: float = 10.0
    idle_seconds: float = 60.0  # without a byte from the client; 60 times as long while it reads a stream
    handshake_seconds: float = 10.0  # until TLS and the first frame of HTTP/2 are complete
    streams: int = 64  # concurrent calls of one connection
    calls: int = 8192  # calls that are being served, of all connections
    queued_calls: int = 1024  # calls that wait for the end of another one
    queued_seconds: float = 5.0  # that a call waits for that
    header_bytes: int = 16 << 10  # of one call
    message_bytes: int = 64 << 20
    received_bytes: int = 512 << 20  # memory of received messages
    working_bytes: int = 512 << 20  # memory that handlers need in addition, as for decompressed messages
    unsent_bytes: int = 256 << 20  # memory of messages that clients have not taken
    stall_seconds: float = 10.0  # of a message, while another call waits for its memory
    control_frames: int = 2000  # of one connection at once, besides messages
    control_rate: float = 200.0  # of one connection a second
    threads: int = 8  # that run the blocking parts of handlers

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"the limit {name} must be above 0, not {getattr(self, name)}")


class Peer:
    """A peer: its address, and its authenticated name, if any. cut: cuts its connection; heard: when it last sent something."""

    def __init__(self, remote: Address, now: float) -> None:
        self.remote = remote
        self.origin = _origin(remote)
        self.name: str | None = None
        self.opened = self.heard = now
        self.cut: Callable[[Reason], object] = lambda reason: None


class ConnectionTable(Handle):
    """Counts present connections, in all ("") and by name, and those without a name, in all and by address.

    Used by the listener's thread and by others.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._present = self._authenticated = 0
        self._named: Counter[str] = Counter()
        self._nameless: dict[str, dict[Peer, None]] = {}  # by address, the oldest one first

    @property
    def unauthenticated(self) -> int:
        return self._present - self._authenticated

    def has_room(self, connections: int) -> bool:
        """Return whether there may be so many connections more."""
        return self._present + connections <= self._limits.connections

    def enter(self, peer: Peer, now: float) -> Reason | None:
        """Count one more connection, unauthenticated; or return why it is refused.

        If there are too many unauthenticated ones, it takes the place of one that is silent or late, which is cut. So clients without a
        token can't shut out those that have one, also if they share an address.
        """
        reason = self._enter(peer)
        if reason is None or reason is Reason.CONNECTIONS:
            return reason
        rival = self._rival("" if reason is Reason.UNAUTHENTICATED else peer.origin, now)
        if rival is None:
            return reason
        rival.cut(reason)  # it leaves
        return self._enter(peer)

    def _enter(self, peer: Peer) -> Reason | None:
        limits, origin = self._limits, peer.origin
        with self._lock:
            if not self.has_room(1):
                return Reason.CONNECTIONS
            if self.unauthenticated >= limits.unauthenticated:
                return Reason.UNAUTHENTICATED
            if len(self._nameless.get(origin, ())) >= limits.unauthenticated_per_address:
                return Reason.UNAUTHENTICATED_OF_ADDRESS
            self._present += 1
            self._nameless.setdefault(origin, {})[peer] = None
        return None

    def _rival(self, origin: str, now: float) -> Peer | None:
        """Return the connection that gives its place to a newcomer; "" means the address with the most connections."""
        with self._lock:
            among = self._nameless.get(origin, {}) if origin else max(self._nameless.values(), key=len, default={})
            return next((peer for peer in among if now - peer.heard > SILENT or now - peer.opened > LATE), None)

    def acquaint(self, peer: Peer, name: str) -> None:
        """Count a connection as authenticated, by its first name. Raises HubFull if there are too many of that name."""
        with self._lock:
            if peer.name is not None:
                return
            if self._named[name] >= self._limits.connections_per_principal:
                raise HubFull(f"{name} has {self._named[name]} connections, which is the limit", LATER)
            peer.name = name
            self._named[name] += 1
            self._authenticated += 1
            self._forget(peer)

    def leave(self, peer: Peer) -> None:
        """Count one connection less. A later authentication of it has no effect."""
        with self._lock:
            self._present -= 1
            if peer.name is None:
                peer.name = ""
                self._forget(peer)
            else:
                self._authenticated -= 1
                self._named[peer.name] -= 1
                if not self._named[peer.name]:
                    del self._named[peer.name]  # absent names and addresses take no memory

    def _forget(self, peer: Peer) -> None:
        among = self._nameless[peer.origin]
        del among[peer]
        if not among:
            del self._nameless[peer.origin]


def _origin(remote: Address) -> str:
    """Return the unit for which the limits of an address are counted."""
    address = ipaddress.ip_address(remote[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)
