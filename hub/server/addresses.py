"""Where a hub listens, and whether what goes there has to be encrypted."""

from __future__ import annotations

import ipaddress


def needs_tls(host: str) -> bool:
    """Return whether traffic to a host must be encrypted: all but loopback addresses and Unix sockets (`unix:...`, or a path).

    A name counts as loopback only if it is `localhost`: what else it stands for may change. Every interface (`0.0.0.0`, `::`, an empty
    host) is no loopback.
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
