"""The retention rules of a hub's clients: by pattern, in one file of the root, written manually or by `kvspool hub retention`.

    [root]/.hub/retention.json
    {"version": 1, "rules": {"*": {"max_age": 2592000.0}, "jfk*": {"max_bytes": 10737418240, "by_consumers": true}, "lga": {}}}

A pattern is a client's id, or a prefix and a *. Only the narrowest matching pattern applies to a client: its id, then the longest prefix.
Rules without a limit keep everything. `max_bytes` limits all shards of a client together; a floor applies to each shard.

The file is replaced atomically, and the new one is on disk on return. It is used only if no other user can have written it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from hub.security import access_file, private
from hub.security.private import WatchedFile
from kvspool.errors import Corruption
from kvspool.journal import Retention
from kvspool.system import disk, documents

NAME = "retention.json"
EVERYBODY = "*"


class HubRetention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a hub root, by pattern."""

    version: Literal[1] = 1
    rules: dict[str, Retention] = {}

    def __post_init__(self) -> None:
        for pattern in self.rules:
            access_file.check_pattern(pattern)

    def of(self, client: str) -> Retention | None:
        """Return the rules of a client; None without any."""
        if client in self.rules:
            return self.rules[client]
        beginnings = [pattern for pattern in self.rules if pattern.endswith("*") and client.startswith(pattern[:-1])]
        return self.rules[max(beginnings, key=len)] if beginnings else None

    def with_rules(self, pattern: str, rules: Retention | None) -> HubRetention:
        """Return a copy with other rules for a pattern; None: without any for it. Raises ValueError for an invalid pattern."""
        kept = {other: those for other, those in self.rules.items() if other != pattern}
        return HubRetention(rules=kept if rules is None else {**kept, pattern: rules})


def path_of(root: Path) -> Path:
    """Return the path of a hub root's rules."""
    return root / ".hub" / NAME


def load(root: Path) -> HubRetention:
    """Return the rules of a hub root; none if there is no file. Raises Corruption, AccessError, and the system's OSError."""
    return RetentionFile(root).load()


def change(root: Path, how: Callable[[HubRetention], HubRetention]) -> HubRetention:
    """Replace the rules of a hub root by the result of `how`, one change at a time; on disk on return. Raises as `load`."""
    path = path_of(root)
    disk.make_directory(path.parent)
    private.edit(path, lambda data: msgspec.json.format(msgspec.json.encode(how(_parse(path, data)))) + b"\n")
    return load(root)


class RetentionFile:
    """The file of a hub root, for repeated use."""

    def __init__(self, root: Path) -> None:
        self._file = WatchedFile(path_of(root), is_secret=False)
        self._rules = HubRetention()
        self._error: str | None = None  # why the present file is invalid

    def load(self) -> HubRetention:
        """Return the present rules; the file is read if it has changed. Raises as the function `load`, each time until it is repaired."""
        if self._file.has_changed():
            try:
                data = self._file.read()
            except FileNotFoundError:
                data = b""
            try:
                self._rules, self._error = _parse(self._file.path, data), None
            except Corruption as error:
                self._error = str(error)
        if self._error is not None:
            raise Corruption(self._error)
        return self._rules


def _parse(path: Path, data: bytes) -> HubRetention:
    if not data:
        return HubRetention()
    try:
        return documents.from_json(data, HubRetention)
    except ValueError as error:
        raise Corruption(f"{path} has no valid retention rules: {error}; fix it, or remove it to keep everything") from None
