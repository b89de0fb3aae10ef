"""A hub for tests: on a loopback port of its own, where anybody may do anything."""

from __future__ import annotations

import os
from typing import Any

from hub.security.access import Access
from hub.server import server


class HubServer(server.HubServer):
    """A hub as tests want it; `options` as the real one has them."""

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(root, **{"access": Access.anonymous(), "listen": ("127.0.0.1", 0), "least_free": 1 << 20, **options})

    def close(self, grace: float = 0.1) -> None:
        """End it; idle connections of the tests' own clients are not waited for."""
        super().close(grace)
