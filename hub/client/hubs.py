"""The choice between several hubs of a client."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

Choice = Literal["hash", "first"]
_LOCATION = re.compile(r"grpc(\+tls)?://([^/@\s]+):([0-9]{1,5})")


def check(location: str) -> str:
    """Return the location of a hub. Raises ValueError for an invalid one."""
    if not _LOCATION.fullmatch(location):
        raise ValueError(f"a hub is grpc+tls://HOST:PORT, or grpc://HOST:PORT without TLS, not {location!r}")
    return location


def parse(text: str) -> list[str]:
    """Return the locations in a text, separated by commas or by `|`. Raises ValueError for an invalid or repeated one."""
    found = [check(location.strip()) for location in re.split("[,|]", text)]
    if len(set(found)) < len(found):
        raise ValueError(f"a hub is named twice in {text!r}")
    return found


def chosen(client: str, locations: list[str], choose: Choice = "hash") -> str:
    """Return the hub of a client.

    "hash": the client's first hub by rendezvous hash. Clients are spread evenly, and adding or removing a hub moves only clients of that
    hub. "first": the first of the list.
    """
    if not locations:
        raise ValueError("name at least one hub")
    for location in locations:
        check(location)
    return locations[0] if choose == "first" else max(locations, key=lambda location: (_weight(client, location), location))


def name(location: str) -> str:
    """Return a short name for a hub, used in the name of a durable reader."""
    return hashlib.sha256(location.encode()).hexdigest()[:12]


def _weight(client: str, location: str) -> bytes:
    return hashlib.sha256(f"{client}\n{location}".encode()).digest()
