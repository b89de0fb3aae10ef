"""The limits of the hub's connections, and their table."""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter
from enum import StrEnum

import msgspec

from kvspool.system.handles import Handle

Address = tuple[str, int]  # IP address and port


class Reason(StrEnum):
    """Why a connection was refused, or cut."""

    CONNECTIONS = "too many connections"
    CONNECTIONS_OF_ADDRESS = "too many connections from one address"
    UNAUTHENTICATED = "too many unauthenticated connections"
    UNAUTHENTICATED_OF_ADDRESS = "too many unauthenticated connections from one address"
    EXHAUSTED = "no descriptors left"
    AUTHENTICATION_SECONDS = "not authenticated in time"
    IDLE = "idle"
    RESET = "reset by one of its ends"
    BY_HANDLER = "closed by the server's handler"
    FLOOD = "a flood of calls"
    HANDSHAKE = "no handshake in time"
    PROTOCOL = "not HTTP/2, or against its rules"
    CONTROL_FRAMES = "too many control frames"
    UNSENT = "answers to control frames that it doesn't read"
    SHUTDOWN = "the hub is shutting down"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of connections. An address is an IPv4 address, or the first 64 bits of an IPv6 address, which usually have one owner.

    Raises ValueError for a limit that is not above 0. Bytes are those of the wire, TLS included; times are exact to a quarter, or to a
    second.
    """

    connections: int = 1024
    connections_per_address: int = 512
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
    """A peer: its address, and its authenticated name, if any."""

    def __init__(self, remote: Address) -> None:
        self.remote = remote
        self.origin = _origin(remote)
        self.name: str | None = None


class ConnectionTable(Handle):
    """Counts present connections, in all and by address; "" stands for all. Used by the listener's thread and by others."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()
        self._unauthenticated: Counter[str] = Counter()

    @property
    def unauthenticated(self) -> int:
        return self._unauthenticated[""]

    def enter(self, peer: Peer) -> Reason | None:
        """Count one more connection, unauthenticated; or return why it is refused."""
        limits, origin = self._limits, peer.origin
        with self._lock:
            if self._inside[""] >= limits.connections:
                return Reason.CONNECTIONS
            if self._inside[origin] >= limits.connections_per_address:
                return Reason.CONNECTIONS_OF_ADDRESS
            if self._unauthenticated[""] >= limits.unauthenticated:
                return Reason.UNAUTHENTICATED
            if self._unauthenticated[origin] >= limits.unauthenticated_per_address:
                return Reason.UNAUTHENTICATED_OF_ADDRESS
            for count in (self._inside, self._unauthenticated):
                count[""] += 1
                count[origin] += 1
        return None

    def acquaint(self, peer: Peer, name: str) -> bool:
        """Count a connection as authenticated, by its first name. Return whether it wasn't before."""
        with self._lock:
            is_new = peer.name is None
            if is_new:
                peer.name = name
                _take_one(self._unauthenticated, peer.origin)
            return is_new

    def leave(self, peer: Peer) -> None:
        """Count one connection less. A later authentication of it has no effect."""
        with self._lock:
            _take_one(self._inside, peer.origin)
            if peer.name is None:
                peer.name = ""
                _take_one(self._unauthenticated, peer.origin)


def _take_one(count: Counter[str], origin: str) -> None:
    for key in ("", origin):
        count[key] -= 1
        if not count[key]:
            del count[key]  # absent addresses take no memory


def _origin(remote: Address) -> str:
    """Return the unit for which the limits of an address are counted."""
    address = ipaddress.ip_address(remote[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)
