"""The access file: the rights of a hub's users, in TOML. It has hashes of tokens, so only its owner may read it.

    [[principals]]
    name = "jfk"                        a client id: it may write jfk, and all ids that begin with jfk-
    role = "client"                     client (the default); reader: never writes; or admin: maintains the hub
    read = ["jfk", "lga-*"]             clients that it may read: an id, or a prefix and a *
    list = ["*"]                        clients that it may list, in addition to those that it may read or write
    deny = ["lga-secret*"]              clients that it may neither read, list nor write, whatever the other keys allow
    certificates = ["jfk.example.com"]  first names of client certificates that identify it
    quota = { bytes = "10GiB", rate = "20MiB", shards = 64, connections = 8 }

    [[tokens]]                          written by `kvspool hub token add`
    principal = "jfk"
    id = "3fa9c2d1"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    created = 2026-01-31T12:00:00Z

    [[revoked]]                         a token's id, or the name of a certificate; this overrides everything above
    token = "3fa9c2d1"
    at = 2026-02-01T12:00:00Z

    [quota]                             of every principal without its own
    bytes = "100GiB"

Rights that are not granted are denied. An unknown key is an error, because a misspelt `deny` would allow.
"""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from hub.client_ids import check_client
from hub.errors import AccessError
from hub.security import private
from hub.security.quotas import UNLIMITED, Quota
from hub.security.tokens import ID, Token
from kvspool import system
from kvspool.engine import sizes
from kvspool.system import documents

Role = Literal["client", "reader", "admin"]
ROLES = ("client", "reader", "admin")
_IDENTITY = re.compile(r"[A-Za-z0-9_.:/@*+=, -]{1,255}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class PrincipalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of [[principals]]."""

    name: str
    role: Role = "client"
    read: tuple[str, ...] = ()
    list: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    quota: dict[str, int | str] | None = None


class TokenEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of [[tokens]]."""

    principal: str
    id: str
    sha256: str
    created: datetime | None = None


class RevokedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of [[revoked]]: a token's id or a certificate's name."""

    token: str | None = None
    identity: str | None = None
    at: datetime | None = None


class AccessFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    principals: tuple[PrincipalEntry, ...] = ()
    tokens: tuple[TokenEntry, ...] = ()
    revoked: tuple[RevokedEntry, ...] = ()
    quota: dict[str, int | str] | None = None

    @property
    def revoked_tokens(self) -> frozenset[str]:
        """Return the ids of revoked tokens."""
        return frozenset(one.token for one in self.revoked if one.token is not None)

    @property
    def revoked_identities(self) -> frozenset[str]:
        """Return the names of revoked certificates, in lower case."""
        return frozenset(one.identity.lower() for one in self.revoked if one.identity is not None)

    def quota_of(self, principal: PrincipalEntry) -> Quota:
        """Return the quota of a principal."""
        words = self.quota if principal.quota is None else principal.quota
        return UNLIMITED if words is None else parse_quota(words)


def parse(data: bytes) -> AccessFile:
    """Return the content of a file. Raises ValueError with the reason."""
    try:
        found = msgspec.convert(documents.from_toml(data), AccessFile)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    if found.quota is not None:
        parse_quota(found.quota)
    names: set[str] = set()
    identities: set[str] = set()
    for principal in found.principals:
        _check_principal(principal)
        _add(names, principal.name, "principal")
        for identity in principal.certificates:
            _add(identities, identity.lower(), "certificate")
        found.quota_of(principal)
    ids: set[str] = set()
    for token in found.tokens:
        _check_token(token)
        _add(ids, token.id, "token")
        if token.principal not in names:
            raise ValueError(f"token {token.id} is of principal {token.principal!r}, which is missing")
    for one in found.revoked:
        _check_revoked(one)
    return found


def parse_quota(words: dict[str, int | str]) -> Quota:
    """Return a quota, whose sizes may have units. Raises ValueError."""
    quota = msgspec.convert({name: sizes.parse(value) for name, value in words.items()}, Quota)
    for name in quota.__struct_fields__:
        limit = getattr(quota, name)
        if limit is not None and limit < (name == "rate"):
            raise ValueError(f"a quota's {name} must be {'above' if name == 'rate' else 'at least'} 0, not {limit}")
    return quota


def check_pattern(pattern: str) -> str:
    """Return a pattern of client ids: an id, or a prefix and a *. Raises ValueError for any other text."""
    beginning = pattern.removesuffix("*")
    if beginning or not pattern:
        check_client(beginning)
    return pattern


def _check_principal(principal: PrincipalEntry) -> None:
    check_client(principal.name)
    for pattern in (*principal.read, *principal.list, *principal.deny):
        check_pattern(pattern)
    for identity in principal.certificates:
        _check_identity(identity)


def _check_token(token: TokenEntry) -> None:
    if not ID.fullmatch(token.id):
        raise ValueError(f"a token's id has 8 hex digits, not {len(token.id)} characters")
    if not _DIGEST.fullmatch(token.sha256):
        raise ValueError(f"the sha256 of token {token.id} has 64 hex digits")


def _check_revoked(one: RevokedEntry) -> None:
    if (one.token is None) == (one.identity is None):
        raise ValueError("each [[revoked]] needs either a token or an identity")
    if one.token is not None and not ID.fullmatch(one.token):
        raise ValueError(f"a token's id has 8 hex digits, not {len(one.token)} characters; it is not the token")
    if one.identity is not None:
        _check_identity(one.identity)


def _check_identity(identity: str) -> None:
    if not _IDENTITY.fullmatch(identity):
        raise ValueError(f"{identity!r} is no name of a certificate")


def _add(known: set[str], name: str, what: str) -> None:
    if name in known:
        raise ValueError(f"{what} {name!r} is repeated")
    known.add(name)


# Editing: additions go to the end, so that text written by a person stays as it is.


def add_token(
    path: str | os.PathLike[str], token: Token, name: str, role: Role | None = None, read: tuple[str, ...] = ()
) -> None:
    """Give a token to a principal; a missing principal or file is created. On disk on return.

    role: of a new principal, client by default. Raises ValueError for invalid arguments, or ones that differ from the file; AccessError
    for an invalid file, LockTimeout, and the system's OSError.
    """

    def change(before: bytes) -> bytes:
        known = {one.name: one for one in _parse_of(path, before).principals}
        new = "" if name in known else _principal_text(name, role or "client", read)
        if name in known:
            _check_same(known[name], role, read)
        text = f'\n[[tokens]]\nprincipal = "{name}"\nid = "{token.id}"\nsha256 = "{token.digest}"\ncreated = {_moment()}\n'
        return _checked(before, new + text)

    private.edit(Path(path), change)


def revoke(path: str | os.PathLike[str], *, token: str | None = None, identity: str | None = None) -> bool:
    """Revoke a token by its id, or a certificate by its name. Return False if it was already revoked. Raises as `add_token`."""
    revoked = RevokedEntry(token, identity)
    _check_revoked(revoked)
    done = False

    def change(before: bytes) -> bytes:
        nonlocal done
        found = _parse_of(path, before)
        if token is not None and token not in {one.id for one in found.tokens}:
            raise ValueError(f"{os.fspath(path)} has no token {token}")
        if token in found.revoked_tokens or (identity or "").lower() in found.revoked_identities:
            return before
        done = True
        what = f'token = "{token}"' if identity is None else f"identity = {json.dumps(identity)}"
        return _checked(before, f"\n[[revoked]]\n{what}\nat = {_moment()}\n")

    if system.port.look_up(os.path.realpath(path)) is None:
        raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
    private.edit(Path(path), change)
    return done


def read(path: str | os.PathLike[str]) -> AccessFile:
    """Return the content of a file. Raises AccessError, and the system's OSError."""
    return _parse_of(path, private.WatchedFile(path, is_secret=True).read())


def _parse_of(path: str | os.PathLike[str], data: bytes) -> AccessFile:
    try:
        return parse(data)
    except ValueError as error:
        raise AccessError(f"{os.fspath(path)}: {error}") from error


def _check_same(there: PrincipalEntry, role: Role | None, read: tuple[str, ...]) -> None:
    if role not in (None, there.role) or (read and read != there.read):
        raise ValueError(f"principal {there.name!r} exists already, with other rights; edit them in the file")


def _principal_text(name: str, role: Role, read: tuple[str, ...]) -> str:
    for pattern in (check_client(name), *read):
        check_pattern(pattern)
    patterns = f"read = {json.dumps(read)}\n" if read else ""
    return f'\n[[principals]]\nname = "{name}"\nrole = "{role}"\n{patterns}'


def _checked(before: bytes, added: str) -> bytes:
    """Return the file with an addition, if the result is valid: some forms of TOML allow no additions at the end."""
    after = before + (b"" if before.endswith(b"\n") or not before else b"\n") + added.encode()
    try:
        parse(after)
    except ValueError as error:
        raise AccessError(f"this file allows no additions at its end ({error}); write its lists as [[principals]] and so on") from None
    return after


def _moment() -> str:
    now: Any = datetime.fromtimestamp(system.port.now() // 1_000_000_000, UTC)
    return str(now.strftime("%Y-%m-%dT%H:%M:%SZ"))
