"""Why a hub can't be reached, in plain words with a next step, instead of those of gRPC."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^Flight returned unavailable error, with message: (?:failed to connect to all addresses; last error: )?")
_STATUS = re.compile(r"^[A-Z_]+: (?:ipv[46]:)?\S+?: ")  # UNKNOWN: ipv4:127.0.0.1:7070:
_SECURE, _PLAIN = "grpc+tls://", "grpc://"
_WORDS: tuple[tuple[str, str, str], ...] = (
    # scheme of the location, phrase of gRPC or OpenSSL, words
    (_SECURE, "is not in peer certificate", "its certificate has another name; use a name that kvspool hub certificate show prints"),
    (_SECURE, "certificate verify failed: certificate has expired", "its certificate has expired; create another one on the hub"),
    (_SECURE, "certificate verify failed", "its certificate is from an authority that isn't trusted; give that one with --ca"),
    (_SECURE, "WRONG_VERSION_NUMBER", "it doesn't use TLS; check the port, or use grpc://"),
    (_SECURE, "wrong version number", "it doesn't use TLS; check the port, or use grpc://"),
    (_SECURE, "certificate required", "it wants a certificate of the client; give --certificate and --key"),
    (_PLAIN, "Connection reset by peer", "the connection was reset at once; if the hub uses TLS, use grpc+tls://"),
    (_PLAIN, "Socket closed", "the connection was closed at once; if the hub uses TLS, use grpc+tls://"),
    ("", "Connection refused", "connection refused: no hub listens there; start it, or check the address"),
    ("", "DNS resolution failed", "there is no host of this name; check the address"),
)


def why(location: str, text: str) -> str:
    """Return the reason in the text of an error of Flight."""
    for scheme, phrase, words in _WORDS:
        if phrase in text and location.startswith(scheme):
            return words
    return _STATUS.sub("", _PREFIX.sub("", text))
