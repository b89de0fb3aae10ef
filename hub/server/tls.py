"""TLS of a listener."""

from __future__ import annotations

import os
import ssl
from typing import Any

ALPN = ["h2"]


def server_context(chain: bytes, key: bytes, authority: bytes | None = None) -> ssl.SSLContext:
    """Return the context of a server with a certificate, its chain and its key, in PEM.

    authority: certificates that sign those of clients, which are then required. Raises OSError for what isn't accepted.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(ALPN)
    context.options |= ssl.OP_NO_RENEGOTIATION
    fd = os.memfd_create("certified key", os.MFD_CLOEXEC)  # Python's ssl loads a key only from a file; this one is never on a disk
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(key.rstrip() + b"\n" + chain)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=authority.decode("ascii"))
    return context


def identity(certificate: dict[str, Any]) -> str:
    """Return the first name in a verified certificate, or its common name; "" if it has none."""
    for _, name in certificate.get("subjectAltName", ()):
        return str(name)
    names = [value for part in certificate.get("subject", ()) for field, value in part if field == "commonName"]
    return str(names[0]) if names else ""
