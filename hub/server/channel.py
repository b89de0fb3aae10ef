"""The bytes of one connection: plain, or encrypted by TLS. Nothing here blocks.

OpenSSL isn't given the socket: it would need two system calls for each record of 16 KiB. Encrypted bytes are received into a buffer that
all connections share, many records at once, and decrypted right into the memory of their message. They are sent in the same way.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from kvspool.system.handles import Handle

RECORD = 1 << 14  # bytes of a TLS record, at most
ENCRYPTED = 1 << 16  # bytes that are received at once of a large message
FEW = 1 << 12  # the same, otherwise: the memory of a connection for them stays as large as it once was
MOST_RECORDS = 64  # that are decrypted before others have their turn


class ByteChannel(Handle):
    """A socket without encryption."""

    def __init__(self, sock: socket.socket) -> None:
        self.is_ended = False  # the client sends no more
        self.has_more = False  # received bytes can be read, of which the socket makes no further report
        self._socket = sock
        self._unsent = memoryview(b"")

    @property
    def unsent(self) -> int:
        """Return how many bytes wait to be sent."""
        return len(self._unsent)

    def read(self, target: memoryview) -> int:
        """Receive bytes into `target`, and return how many; less than it takes if there are no more now. Raises OSError."""
        try:
            size = self._socket.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return 0
        self.is_ended = not size
        return size

    def put(self, data: bytearray) -> None:
        """Take over bytes to be sent, after `flush` has sent the previous ones."""
        self._unsent = memoryview(data)

    def flush(self) -> bool:
        """Send what was put. Return whether all was sent: the socket may have no room. Raises OSError."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return False
        return True

    def close(self, *, is_orderly: bool) -> None:
        """Close the socket. is_orderly: also end TLS, if that is possible at once."""
        self._socket.close()


class TlsChannel(ByteChannel):
    """A socket with TLS; `shake_hands` comes first. encrypted: a buffer for received bytes, which other channels use alternately."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, encrypted: memoryview) -> None:
        super().__init__(sock)
        self._encrypted = encrypted
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    @property
    def unsent(self) -> int:
        return len(self._unsent) + self._outgoing.pending

    def shake_hands(self) -> bool:
        """Continue the handshake, and return whether it is complete. Raises OSError."""
        while True:
            try:
                self.tls.do_handshake()
                return True
            except ssl.SSLWantReadError:
                if not self._receive(FEW):
                    return False
            finally:
                self.flush()

    def read(self, target: memoryview) -> int:
        """Do as `ByteChannel.read`; a large target is filled by many records."""
        room = len(target)
        most = ENCRYPTED if room > RECORD else FEW
        filled, is_drained = 0, False
        self.has_more = False
        for _ in range(MOST_RECORDS):
            try:
                size: int = self.tls.read(room - filled, target[filled:])  # type: ignore[assignment]  # a number, with a buffer
            except ssl.SSLWantReadError:
                if is_drained:
                    return filled
                is_drained = self._receive(most) < most
                continue
            except ssl.SSLEOFError:
                size = 0
            if not size:
                self.is_ended = True
                return filled
            filled += size
            if filled == room:
                break
        self.has_more = self._incoming.pending > 0 or self.tls.pending() > 0
        return filled

    def _receive(self, most: int) -> int:
        """Receive up to `most` encrypted bytes, and return how many."""
        try:
            size = self._socket.recv_into(self._encrypted, most)
        except (BlockingIOError, InterruptedError):
            return 0
        if size:
            self._incoming.write(self._encrypted[:size])
        else:
            self._incoming.write_eof()
        return size

    def put(self, data: bytearray) -> None:
        view = memoryview(data)
        while view:
            view = view[self.tls.write(view) :]

    def flush(self) -> bool:
        while super().flush():
            if not self._outgoing.pending:
                return True
            self._unsent = memoryview(self._outgoing.read())
        return False

    def close(self, *, is_orderly: bool) -> None:
        if is_orderly:
            with suppress(OSError, ValueError):
                self.tls.unwrap()
            with suppress(OSError):
                self.flush()
        super().close(is_orderly=is_orderly)
