"""Certificates and their keys: read from files, checked, and read again after a renewal."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from hub.errors import AccessError, CertificateError
from hub.security.private import WatchedFile
from kvspool import system
from kvspool.errors import MissingExtra
from kvspool.system.handles import Handle

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
except ImportError as _error:
    raise MissingExtra.of("hub", "certificates need the package cryptography", _error) from _error

INTERVAL = 1.0  # seconds between two checks of the files
_logger = logging.getLogger("kvspool.hub")


@dataclass(frozen=True)
class Certificate:
    """The content of a certificate. Times are ns since 1970; `names`: its DNS names and addresses, in its order.

    identity: the name by which a hub identifies the client, "" if it has none.
    """

    subject: str
    issuer: str
    names: tuple[str, ...]
    identity: str
    not_before: int
    not_after: int
    fingerprint: str  # SHA-256 in hex

    @classmethod
    def parse(cls, pem: bytes, where: object = "it") -> Certificate:
        """Return the content of the first certificate of a PEM text. Raises CertificateError; `where` names the text in messages."""
        return _described(_chain(pem, where)[0], where)

    def problem(self, now: int | None = None) -> str | None:
        """Return why it is not valid at a time (now unless given), None if it is."""
        at = system.port.now() if now is None else now
        if at < self.not_before:
            return f"it is not valid before {moment(self.not_before)}"
        return f"it has expired at {moment(self.not_after)}" if at >= self.not_after else None


@dataclass(frozen=True)
class CertifiedKey:
    """A certificate with its chain up to the authority, and its private key, in PEM."""

    certificate: Certificate
    chain: bytes
    key: bytes = field(repr=False)

    @classmethod
    def parse(cls, chain: bytes, key: bytes, where: object = "it") -> CertifiedKey:
        """Parse both. Raises CertificateError if one is invalid, or they don't match; `where` names the certificate in messages."""
        leaf = _chain(chain, where)[0]
        with _translated(f"the key of {where} is no private key in PEM"):
            try:
                private = serialization.load_pem_private_key(key, password=None)
            except TypeError:
                words = f"the key of {where} is encrypted; store it without a password, readable by its owner alone"
                raise CertificateError(words) from None
        with _translated(f"{where} can't be used"):
            if _public_bytes(private.public_key()) != _public_bytes(leaf.public_key()):
                raise CertificateError(f"the key is not that of {where}")
        return cls(_described(leaf, where), chain, key)


class Certificates(Handle):
    """The certified key of a server, and the authority for its clients' certificates, from files. Can be shared by threads.

    Servers call `refresh` from time to time. A half-replaced one is not used, nor one that isn't valid now: the previous one stays, and
    `error` has the reason.
    """

    def __init__(
        self,
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        authority: str | os.PathLike[str] | None = None,
    ) -> None:
        """Read the files. Raises CertificateError, AccessError for files that others can read or write, and the system's OSError."""
        self.error: str | None = None
        self._certificate = WatchedFile(certificate, is_secret=False)
        self._key = WatchedFile(key, is_secret=True)
        self._authority = None if authority is None else WatchedFile(authority, is_secret=False)
        self._lock = threading.Lock()
        self._looks_at = system.port.monotonic() + INTERVAL
        self.server_key, self.authority = self._read()

    @property
    def not_after(self) -> int:
        """Return when the server's certificate ends, or one of its authority's if that is earlier; ns since 1970."""
        others = [] if self.authority is None else [one.not_after for one in _authorities(self.authority, "the authority")]
        return min([self.server_key.certificate.not_after, *others])

    def refresh(self) -> bool:
        """Check the files, at most once a second. Return whether one changed, so that the server has to use it."""
        with self._lock:
            if system.port.monotonic() < self._looks_at:
                return False
            self._looks_at = system.port.monotonic() + INTERVAL
            return self._take()

    def _take(self) -> bool:
        """Under the lock: use the content of the files if it is valid. Return whether it changed."""
        files = [self._certificate, self._key, *([] if self._authority is None else [self._authority])]
        try:
            if self.error is None and not any(file.has_changed() for file in files):
                return False
            new, authority = self._read()
            problem = new.certificate.problem()
            if problem is not None:
                raise CertificateError(f"{self._certificate.path}: {problem}")
        except (CertificateError, AccessError, OSError) as error:
            if str(error) != self.error:
                _logger.error("the new certificate can't be used; the previous one is still in use: %s", error)
            self.error = str(error)
            return False
        is_new = (new, authority) != (self.server_key, self.authority)
        self.server_key, self.authority, self.error = new, authority, None
        if is_new:
            _logger.info("%s: new, valid until %s", self._certificate.path, moment(new.certificate.not_after))
        return is_new

    def _read(self) -> tuple[CertifiedKey, bytes | None]:
        new = CertifiedKey.parse(self._certificate.read(), self._key.read(), self._certificate.path)
        if self._authority is None:
            return new, None
        authority = self._authority.read()
        _authorities(authority, self._authority.path)
        return new, authority


def read(path: str | os.PathLike[str]) -> Certificate:
    """Return the content of a certificate's file. Raises CertificateError, AccessError for a file that others can write, and OSError."""
    return Certificate.parse(WatchedFile(path, is_secret=False).read(), Path(path))


def read_certified_key(certificate: str | os.PathLike[str], key: str | os.PathLike[str]) -> CertifiedKey:
    """Return a certificate and its key. Raises CertificateError, AccessError for files that others may access, and OSError."""
    return CertifiedKey.parse(WatchedFile(certificate, is_secret=False).read(), WatchedFile(key, is_secret=True).read(), Path(certificate))


def moment(at: int) -> str:
    """Return a time in ns since 1970 as 2026-01-31T12:00:00Z."""
    return datetime.fromtimestamp(at // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _translated(words: str) -> Iterator[None]:
    """Raise CertificateError for any error of the library, whose types vary, and whose texts may quote secrets."""
    try:
        yield
    except CertificateError:
        raise
    except Exception as error:
        raise CertificateError(f"{words} ({type(error).__name__})") from None


def _chain(pem: bytes, where: object) -> list[x509.Certificate]:
    with _translated(f"{where} holds no certificate in PEM"):
        return x509.load_pem_x509_certificates(pem)


def _authorities(pem: bytes, where: object) -> list[Certificate]:
    return [_described(one, where) for one in _chain(pem, where)]


def _described(certificate: x509.Certificate, where: object) -> Certificate:
    with _translated(f"{where} holds a certificate that is damaged"):
        identities = _identities(certificate)
        common = [str(one.value) for one in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        return Certificate(
            subject=certificate.subject.rfc4514_string(),
            issuer=certificate.issuer.rfc4514_string(),
            names=tuple(name for kind, name in identities if kind in (x509.DNSName, x509.IPAddress)),
            identity=next((name for _, name in identities), common[0] if common else ""),
            not_before=_ns(certificate.not_valid_before_utc),
            not_after=_ns(certificate.not_valid_after_utc),
            fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
        )


def _identities(certificate: x509.Certificate) -> list[tuple[type, str]]:
    """Return kind and text of the names that the TLS layer may use as an identity."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    kinds = (x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name, x509.IPAddress)
    return [(type(name), str(name.value)) for name in names if isinstance(name, kinds)]


def _public_bytes(key: object) -> bytes:
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(encoding, form))  # type: ignore[attr-defined]


def _ns(at: datetime) -> int:
    return int(at.timestamp()) * 1_000_000_000
