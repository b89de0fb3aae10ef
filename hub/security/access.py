"""The rights of a hub's users. Everything that the file doesn't allow is denied. Its format: `hub.security.access_file`.

    access = Access.load("/etc/kvspool/access.toml")
    principal = access.authenticate("kvs_...")      or access.identify("jfk.example.com"), a certificate's name
    principal.may_write("jfk-2")
    principal = access.renewed(principal)           later: the present rights, or NotAuthenticated

The file is checked at most once a second. An unreadable or invalid file changes nothing: the previous rights apply, and `access.error`
describes the problem, as does the log, once.
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
from kvspool.system.handles import Handle

INTERVAL = 1.0  # seconds between two checks of the file
_NOBODY = "0" * 64  # compared if a token's id is unknown, so that the time is the same
_logger = logging.getLogger("kvspool.hub")


class Patterns(msgspec.Struct, frozen=True):
    """A set of client ids: some ids, and all with some prefixes."""

    exact: frozenset[str] = frozenset()
    beginnings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, patterns: tuple[str, ...]) -> Patterns:
        """Return the set of patterns; each is a client id, or a prefix and a *. Raises ValueError."""
        for pattern in patterns:
            access_file.check_pattern(pattern)
        beginnings = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
        return cls(frozenset(pattern for pattern in patterns if not pattern.endswith("*")), beginnings)

    def matches(self, client: str) -> bool:
        """Return whether a client id is in the set."""
        return client in self.exact or client.startswith(self.beginnings)


EVERYBODY = Patterns(beginnings=("",))


class Principal(msgspec.Struct, frozen=True):
    """An authenticated user, and its rights. credential: its description for a log."""

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
        """Whether it may list all clients and all durable readers, and delete readers. That right alone lets it read and write no client.
        """
        return self.role == "admin"

    def may_write(self, client: str) -> bool:
        """Return whether it may append to the shards of a client; False for an impossible client id."""
        return self._may(client, self.writes)

    def may_read(self, client: str) -> bool:
        """Return whether it may read the records of a client."""
        return self._may(client, self.reads)

    def may_list(self, client: str) -> bool:
        """Return whether it may list a client, with its statistics: clients that it may read or write; for an admin all."""
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
    """The rights of one version of the file."""

    principals: dict[str, Principal] = field(default_factory=dict)
    tokens: dict[str, TokenEntry] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)  # a certificate's name in lower case: a principal's name
    revoked_tokens: frozenset[str] = frozenset()
    revoked_identities: frozenset[str] = frozenset()


class Access(Handle):
    """The rights of a hub's users. Get it from `load` or `anonymous`; it can be shared by threads."""

    def __init__(self, file: WatchedFile | None) -> None:
        """file: not read yet; None: everyone has all rights."""
        self.error: str | None = None  # why the present file is invalid; its previous version applies
        self._file = file
        self._own: dict[str, tuple[str, Principal]] = {}  # by a token's id: its digest, and the hub's own principal
        self._rights = _Rights()
        self._looks_at = 0.0
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Access:
        """Read a file. Raises AccessError with the reason if it is invalid; the system's OSError if it can't be read."""
        access = cls(WatchedFile(path, is_secret=True))
        access._read()
        return access

    @classmethod
    def anonymous(cls) -> Access:
        """Give everyone all rights: for a hub on a loopback address, or on a Unix socket that only its owner can reach."""
        return cls(None)

    @property
    def is_anonymous(self) -> bool:
        """Return whether everyone has all rights."""
        return self._file is None

    # Authentication.

    def add_own(self, name: str, client: str) -> Token:
        """Return a new token for the hub itself, which may write one client. It is valid until this object is gone, and in no file."""
        token = Token.make()
        writes, nothing = Patterns(frozenset([client])), Patterns()
        principal = Principal(name, "client", writes, nothing, nothing, nothing, credential=f"token {token.id}")
        self._own[token.id] = token.digest, principal
        return token

    def authenticate(self, text: str) -> Principal:
        """Return the owner of a token. Raises NotAuthenticated."""
        if self.is_anonymous:
            return ANYBODY
        try:
            token = Token(text)
        except ValueError:
            raise NotAuthenticated("the given text is no token") from None
        if token.id in self._own and token.is_kept_as(self._own[token.id][0]):
            return self._own[token.id][1]
        rights = self._now()
        kept = rights.tokens.get(token.id)
        is_right = token.is_kept_as(_NOBODY if kept is None else kept.sha256)
        if kept is None:
            raise NotAuthenticated(f"token {token.id} is unknown")
        if not is_right:
            raise NotAuthenticated(f"token {token.id} has another secret than the issued one", kept.principal)
        return self._known(rights, "token", token.id)

    def identify(self, identity: str) -> Principal:
        """Return the principal of a certificate, by its first name, after the TLS layer has verified it.

        Raises NotAuthenticated.
        """
        if self.is_anonymous:
            return ANYBODY
        return self._known(self._now(), "certificate", identity.lower())

    def check_identity(self, identity: str) -> None:
        """Raise NotAuthenticated if a certificate's name is revoked, even if its bearer has a token."""
        if identity.lower() in self._now().revoked_identities:
            raise NotAuthenticated(f"certificate {identity} is revoked", self._rights.identities.get(identity.lower()))

    def renewed(self, principal: Principal) -> Principal:
        """Return the present rights of an authenticated principal. Raises NotAuthenticated if its credential is no longer valid."""
        if self.is_anonymous:
            return ANYBODY
        kind, _, credential = principal.credential.partition(" ")
        if kind == "token" and credential in self._own:
            return self._own[credential][1]
        found = self._known(self._now(), "token" if kind == "token" else "certificate", credential)
        if found.name != principal.name:
            raise NotAuthenticated(f"{principal.credential} now belongs to {found.name}", principal.name)
        return found

    def _known(self, rights: _Rights, kind: Literal["token", "certificate"], credential: str) -> Principal:
        """Return the principal of a token's id or a certificate's name, unless it is revoked."""
        if kind == "token":
            kept = rights.tokens.get(credential)
            name, revoked = (None if kept is None else kept.principal), rights.revoked_tokens
        else:
            name, revoked = rights.identities.get(credential), rights.revoked_identities
        if credential in revoked:
            raise NotAuthenticated(f"{kind} {credential} is revoked", name)
        if name is None:
            raise NotAuthenticated(f"{kind} {credential} belongs to no principal")
        return msgspec.structs.replace(rights.principals[name], credential=f"{kind} {credential}")

    def writers(self) -> list[Principal]:
        """Return all principals that may write and have a quota, as in the present file."""
        return [one for one in self._now().principals.values() if one.role == "client" and one.quota != UNLIMITED]

    # The file.

    def _now(self) -> _Rights:
        """Return the present rights."""
        if system.port.monotonic() >= self._looks_at and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._rights

    def _look(self) -> None:
        """Under the lock: read the file again if it has changed; an invalid one changes nothing."""
        self._looks_at = system.port.monotonic() + INTERVAL
        try:
            if self._file is not None and self._file.has_changed():
                self._read()
                _logger.info("%s was read again", self._file.path)
        except (AccessError, OSError) as error:
            words = str(error)
            if words != self.error:
                _logger.error("the access file is invalid, its previous rights still apply: %s", words)
            self.error = words

    def _read(self) -> None:
        if self._file is not None:
            try:
                found = access_file.parse(self._file.read())
            except ValueError as error:
                raise AccessError(f"{self._file.path}: {error}") from error
            if found == AccessFile():  # it was cut short, or is a placeholder; with it every call would be refused without a reason
                raise AccessError(f"{self._file.path} is empty: it names no principal; add one with `kvspool hub token add`")
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
