"""Who may do what on a hub. What the file doesn't allow isn't allowed; what it denies is denied. Its words: `hub.security.access_file`.

    access = Access.load("/etc/kvspool/access.toml")
    principal = access.authenticate("kvs_...")      or access.identify("jfk.example.com"), a certificate's name
    principal.may_write("jfk-2")
    principal = access.renewed(principal)           later: what holds now, or NotAuthenticated

The file is looked at once a second at most. One that can't be read or understood changes nothing: what held before holds, and
`access.error` says what is wrong, as does the log, once.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from hub.client_ids import check_client
from hub.errors import AccessError, NotAuthenticated
from hub.security import access_file
from hub.security.access_file import AccessFile, PrincipalEntry, Role, TokenEntry
from hub.security.private import WatchedFile
from hub.security.quotas import UNLIMITED, Quota
from hub.security.tokens import Token
from kvspool import system
from kvspool.handles import Handle

INTERVAL = 1.0  # seconds between two looks at the file
_NOBODY = "0" * 64  # compared with when a token's id is unknown, so that it takes as long
_logger = logging.getLogger("kvspool.hub")


class Patterns(msgspec.Struct, frozen=True):
    """A set of client ids: some of them, and all that begin in some ways."""

    exact: frozenset[str] = frozenset()
    beginnings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, patterns: tuple[str, ...]) -> Patterns:
        """Take patterns; each is a client id, or how one begins and a *. Raises ValueError."""
        for pattern in patterns:
            access_file.check_pattern(pattern)
        beginnings = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
        return cls(frozenset(pattern for pattern in patterns if not pattern.endswith("*")), beginnings)

    def matches(self, client: str) -> bool:
        """Return whether a client id is in the set."""
        return client in self.exact or client.startswith(self.beginnings)


EVERYBODY = Patterns(beginnings=("",))


class Principal(msgspec.Struct, frozen=True):
    """Somebody who was recognised, and what he may do. credential: by what, in words for a log."""

    name: str
    role: Role
    writes: Patterns
    reads: Patterns
    lists: Patterns
    denied: Patterns
    quota: Quota = UNLIMITED
    credential: str = ""

    @property
    def may_administer(self) -> bool:
        """Return whether he may see all clients, and all durable readers and delete them. That alone lets him read and write no client."""
        return self.role == "admin"

    def may_write(self, client: str) -> bool:
        """Return whether he may append to the shards of a client; False for what can be no client's id."""
        return self._may(client, self.writes)

    def may_read(self, client: str) -> bool:
        """Return whether he may read the records of a client."""
        return self._may(client, self.reads)

    def may_list(self, client: str) -> bool:
        """Return whether he may see that a client is there, and its figures: what he may read or write, and an admin all."""
        return self._may(client, self.lists) or self.may_read(client) or self.may_write(client)

    def _may(self, client: str, allowed: Patterns) -> bool:
        try:
            check_client(client)
        except ValueError:
            return False
        return allowed.matches(client) and not self.denied.matches(client)


ANYBODY = Principal("anonymous", "admin", EVERYBODY, EVERYBODY, EVERYBODY, Patterns(), credential="no credential")


@dataclass(frozen=True)
class _Rights:
    """One state of the file."""

    principals: dict[str, Principal] = field(default_factory=dict)
    tokens: dict[str, TokenEntry] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)  # a certificate's name in small letters: a principal's name
    revoked_tokens: frozenset[str] = frozenset()
    revoked_identities: frozenset[str] = frozenset()


class Access(Handle):
    """Who may do what. Get it from `load` or `anonymous`; may be used by threads."""

    def __init__(self, file: WatchedFile | None) -> None:
        """Take the file, which isn't read yet; None: anybody may do anything."""
        self.error: str | None = None  # what is wrong with the file as it is now; what it said before holds
        self._file = file
        self._rights = _Rights()
        self._looks_at = 0.0
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Access:
        """Read a file. Raises AccessError if it can't be used, which it says; the system's OSError if it can't be read."""
        access = cls(WatchedFile(path, is_secret=True))
        access._read()
        return access

    @classmethod
    def anonymous(cls) -> Access:
        """Let anybody do anything: for a hub on a loopback address, or on a Unix socket that only its owner can reach."""
        return cls(None)

    @property
    def is_anonymous(self) -> bool:
        """Return whether anybody may do anything."""
        return self._file is None

    # Recognising.

    def authenticate(self, text: str) -> Principal:
        """Return to whom a token belongs. Raises NotAuthenticated."""
        if self.is_anonymous:
            return ANYBODY
        try:
            token = Token(text)
        except ValueError:
            raise NotAuthenticated("what was shown is no token") from None
        rights = self._now()
        kept = rights.tokens.get(token.id)
        is_right = token.is_kept_as(_NOBODY if kept is None else kept.sha256)
        if kept is None:
            raise NotAuthenticated(f"token {token.id} is unknown")
        if not is_right:
            raise NotAuthenticated(f"token {token.id} is another one than was given out", kept.principal)
        return self._known(rights, "token", token.id)

    def identify(self, identity: str) -> Principal:
        """Return for whom a certificate stands, by its first name, as the TLS layer gives it when it has verified it.

        Raises NotAuthenticated.
        """
        if self.is_anonymous:
            return ANYBODY
        return self._known(self._now(), "certificate", identity.lower())

    def check_identity(self, identity: str) -> None:
        """Raise NotAuthenticated if a certificate's name is revoked, whomever a token says its bearer is."""
        if identity.lower() in self._now().revoked_identities:
            raise NotAuthenticated(f"certificate {identity} is revoked", self._rights.identities.get(identity.lower()))

    def renewed(self, principal: Principal) -> Principal:
        """Return what now holds for somebody who was recognised before. Raises NotAuthenticated if he isn't any more."""
        if self.is_anonymous:
            return ANYBODY
        kind, _, credential = principal.credential.partition(" ")
        found = self._known(self._now(), "token" if kind == "token" else "certificate", credential)
        if found.name != principal.name:
            raise NotAuthenticated(f"{principal.credential} now stands for {found.name}", principal.name)
        return found

    def _known(self, rights: _Rights, kind: Literal["token", "certificate"], credential: str) -> Principal:
        """Return whose a token's id or a certificate's name is, unless it is revoked."""
        if kind == "token":
            kept = rights.tokens.get(credential)
            name, revoked = (None if kept is None else kept.principal), rights.revoked_tokens
        else:
            name, revoked = rights.identities.get(credential), rights.revoked_identities
        if credential in revoked:
            raise NotAuthenticated(f"{kind} {credential} is revoked", name)
        if name is None:
            raise NotAuthenticated(f"{kind} {credential} stands for nobody")
        return msgspec.structs.replace(rights.principals[name], credential=f"{kind} {credential}")

    def writers(self) -> list[Principal]:
        """Return everybody who may write and has a quota, as the file has it now."""
        return [one for one in self._now().principals.values() if one.role == "client" and one.quota != UNLIMITED]

    # The file.

    def _now(self) -> _Rights:
        """Return what holds now."""
        if system.port.monotonic() >= self._looks_at and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._rights

    def _look(self) -> None:
        """Under the lock: read the file again if it has changed; what can't be used changes nothing."""
        self._looks_at = system.port.monotonic() + INTERVAL
        try:
            if self._file is not None and self._file.has_changed():
                self._read()
                _logger.info("%s was read again", self._file.path)
        except (AccessError, OSError) as error:
            words = str(error)
            if words != self.error:
                _logger.error("the access file can't be used, what it said before still holds: %s", words)
            self.error = words

    def _read(self) -> None:
        if self._file is not None:
            try:
                found = access_file.parse(self._file.read())
            except ValueError as error:
                raise AccessError(f"{self._file.path}: {error}") from error
            self._rights = _rights(found)
            self.error = None
            self._looks_at = system.port.monotonic() + INTERVAL

    def __repr__(self) -> str:
        return f"<Access {'anonymous' if self._file is None else self._file.path}>"


def _rights(found: AccessFile) -> _Rights:
    return _Rights(
        principals={one.name: _principal(one, found.quota_of(one)) for one in found.principals},
        tokens={one.id: one for one in found.tokens},
        identities={identity.lower(): one.name for one in found.principals for identity in one.certificates},
        revoked_tokens=found.revoked_tokens,
        revoked_identities=found.revoked_identities,
    )


def _principal(entry: PrincipalEntry, quota: Quota) -> Principal:
    is_client = entry.role == "client"
    return Principal(
        name=entry.name,
        role=entry.role,
        writes=Patterns(frozenset([entry.name]), (f"{entry.name}-",)) if is_client else Patterns(),
        reads=Patterns.parse(entry.read),
        lists=EVERYBODY if entry.role == "admin" else Patterns.parse(entry.list),
        denied=Patterns.parse(entry.deny),
        quota=quota,
    )
