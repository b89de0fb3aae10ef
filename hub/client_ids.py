"""Which ids a client of a hub can have."""

from __future__ import annotations

from shard import route

LONGEST_ID = 100  # bytes of a client's id


def check_client(client: str) -> str:
    """Return a client's id, or raise ValueError if it can't be one: empty, too long, or able to leave the root."""
    if not client:
        raise ValueError("a client's id is not empty")
    if len(route.check_prefix(client)) > LONGEST_ID:
        raise ValueError(f"a client's id has at most {LONGEST_ID} bytes, not {len(client)}")
    return client
