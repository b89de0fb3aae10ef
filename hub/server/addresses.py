"""Addresses of a hub, and whether traffic to them must be encrypted."""

from __future__ import annotations

import ipaddress


def needs_tls(host: str) -> bool:
    """Return whether traffic to a host must be encrypted: all except loopback addresses and Unix sockets (`unix:...`, or a path).

    The only loopback name is `localhost`, because the address of other names may change. All interfaces (`0.0.0.0`, `::`, an empty
    host) are not loopback.
    """
    if host.startswith(("unix:", "/")) or host.lower() == "localhost":
        return False
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return True
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return not address.is_loopback
