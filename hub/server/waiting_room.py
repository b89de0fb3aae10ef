"""Accepted connections for which there is no place yet.

A connection that is refused before its handshake gets no message, and so no time for a retry. So it isn't refused at once: for some
seconds, it waits for the place of another one, unread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from hub.server.limits import Peer, Reason
from kvspool.system.handles import Handle

Enter = Callable[[Peer], Reason | None]


class WaitingRoom(Handle):
    """Connections that wait, the first one first. Used on the event loop."""

    def __init__(self, most: int, seconds: float) -> None:
        """most: connections that may wait; seconds: for how long."""
        self._most = most
        self._seconds = seconds
        self._waiting: dict[Peer, socket.socket] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, peer: Peer) -> bool:
        """Let a connection wait. Return whether there is room."""
        if len(self._waiting) >= self._most:
            return False
        self._waiting[peer] = sock
        return True

    def leave(self, now: float, enter: Enter) -> Iterator[tuple[socket.socket, Peer, Reason | None]]:
        """Yield those that have waited enough, with the reason of their refusal; None: there is a place, which `enter` has taken."""
        refused: dict[str, Reason] = {}
        for peer in list(self._waiting):
            reason = refused.get(peer.origin) or enter(peer)
            if reason is None or now - peer.opened > self._seconds:
                yield self._waiting.pop(peer), peer, reason
            else:
                refused[peer.origin] = reason

    def close(self) -> None:
        """Refuse all."""
        while self._waiting:
            self._waiting.popitem()[1].close()
