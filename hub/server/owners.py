"""Whose quota a client's shards count for."""

from __future__ import annotations

from hub.security.access import Principal


class Owners:
    """Remembers who may write which client, as long as the rights are the same. May be used by threads."""

    def __init__(self) -> None:
        self._known: tuple[list[Principal], dict[str, list[Principal]]] = [], {}

    def of(self, client: str, writers: list[Principal]) -> list[Principal]:
        """Return those of some principals who may write a client."""
        known_writers, owners = self._known
        if known_writers != writers:
            self._known = known_writers, owners = writers, {}
        found = owners.get(client)
        if found is None:
            found = owners[client] = [principal for principal in writers if principal.may_write(client)]
        return found
