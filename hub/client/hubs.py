"""The choice between several hubs of a client."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

Choice = Literal["hash", "first"]
PREFIX = "ship."  # of the names of shippers' durable readers
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


def chosen(client: str, locations: list[str], choose: Choice = "hash", copies: int = 1) -> list[str]:
    """Return the hubs of a client, as many as `copies`.

    "hash": the client's first hubs by rendezvous hash. Clients are spread evenly, and adding or removing a hub moves only clients of that
    hub. "first": the first of the list. Raises ValueError for an invalid or repeated location, and for fewer locations than copies.
    """
    if not 1 <= copies <= len(locations):
        raise ValueError(f"as many copies as hubs are possible, at least one: {copies} are wanted, and {len(locations)} named")
    for location in locations:
        check(location)
    if len(set(locations)) < len(locations):
        raise ValueError(f"a hub is named twice in {', '.join(locations)}")
    if choose == "hash":
        locations = sorted(locations, key=lambda location: (_weight(client, location), location), reverse=True)
    return locations[:copies]


def name(location: str) -> str:
    """Return a short name for a hub."""
    return hashlib.sha256(location.encode()).hexdigest()[:12]


def reader_name(location: str) -> str:
    """Return the name of the durable reader that ships a log to a hub."""
    return f"{PREFIX}{name(location)}"


def _weight(client: str, location: str) -> bytes:
    return hashlib.sha256(f"{client}\n{location}".encode()).digest()
