"""The principals whose quota counts a client's shards."""

from __future__ import annotations

from hub.security.access import Principal


class Owners:
    """Caches the possible writers of each client while the rights are unchanged. Can be shared by threads."""

    def __init__(self) -> None:
        self._known: tuple[list[Principal], dict[str, list[Principal]]] = [], {}

    def of(self, client: str, writers: list[Principal]) -> list[Principal]:
        """Return the given principals that may write a client."""
        known_writers, owners = self._known
        if known_writers != writers:
            self._known = known_writers, owners = writers, {}
        found = owners.get(client)
        if found is None:
            found = owners[client] = [principal for principal in writers if principal.may_write(client)]
        return found
