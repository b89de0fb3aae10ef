"""The ids of a hub's clients."""

from __future__ import annotations

from shard import route

LONGEST_ID = 100  # bytes of a client's id


def check_client(client: str) -> str:
    """Return a client's id. Raises ValueError if it is empty, too long, or could leave the root."""
    if not client:
        raise ValueError("a client's id is not empty")
    if not isinstance(client, str) or not route.is_prefix(client):
        raise ValueError(f"a client's id may have only the characters a-z A-Z 0-9 _ -, not {client!r}")
    if len(client) > LONGEST_ID:
        raise ValueError(f"a client's id has at most {LONGEST_ID} bytes, not {len(client)}")
    return client
