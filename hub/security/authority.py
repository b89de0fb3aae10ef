"""A certificate authority for a hub and its clients, for users without one.

    DIR/ca.pem  ca.key              the authority; ca.key can forge any identity, so keep it away from the hub
    DIR/server.pem  server.key      of the hub
    DIR/clients/NAME.pem  .key      of a client, whose identity is NAME

Keys are ECDSA on P-256. A certificate is valid for 397 days, from an hour ago, because clocks differ; the authority's for ten years.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hub.errors import CertificateError
from hub.security import private
from hub.security.certificates import CertifiedKey, read_certified_key
from kvspool import system
from kvspool.errors import MissingExtra

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID
except ImportError as _error:
    raise MissingExtra.of("hub", "certificates need the package cryptography", _error) from _error

DAYS = 397
AUTHORITY_DAYS = 3652
MOST_DAYS = 36500
_EARLIER = timedelta(hours=1)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")  # a client's certificate; also a part of a file name, and a common name
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True)
class Signer:
    """An authority that signs, or a certificate that signs itself."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate | None = None


def make_authority(directory: str | os.PathLike[str], names: Sequence[str], *, days: int = DAYS, replaces: bool = False) -> CertifiedKey:
    """Create an authority and a certificate of a server with these names (hosts, addresses). Return the server's.

    A missing directory is created. Raises CertificateError if such files exist, unless `replaces`, which makes every certificate of the old
    authority useless; ValueError for an invalid name; the system's OSError.
    """
    directory = Path(os.path.abspath(directory))
    alternatives = _alternatives(names)
    _refuse_existing(directory, ("ca", "server"), replaces)
    _make_directory(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name(f"kvspool {system.port.random(4).hex()}")
    builder = _builder(Signer(name, key), name, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    signer = Signer(name, key, certificate)
    certified = _issue(signer, names[0], alternatives, _SERVER, days)
    _store(directory / "ca", CertifiedKey.parse(_pem(certificate), _key_pem(key)), replaces)
    _store(directory / "server", certified, replaces)
    return certified


def make_server(
    directory: str | os.PathLike[str],
    names: Sequence[str],
    *,
    days: int = DAYS,
    replaces: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> CertifiedKey:
    """Create a server's certificate, signed by the authority of the directory; raises as `make_authority` and `read_certified_key`.

    output: the directory of the two files, created if it is missing; None: that of the authority.
    """
    directory = Path(os.path.abspath(directory))
    folder = directory if output is None else Path(os.path.abspath(output))
    alternatives = _alternatives(names)
    _refuse_existing(folder, ("server",), replaces)
    certified = _issue(_signer(directory), names[0], alternatives, _SERVER, days)
    _make_directory(folder)
    _store(folder / "server", certified, replaces)
    return certified


def make_client(directory: str | os.PathLike[str], name: str, *, days: int = DAYS, replaces: bool = False) -> CertifiedKey:
    """Create a client's certificate, signed by the authority of the directory; raises as `make_authority` and `read_certified_key`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a client's name has up to 63 letters, digits, _, - and dots, and doesn't begin with - or a dot, not {name!r}")
    directory = Path(os.path.abspath(directory))
    _refuse_existing(directory / "clients", (name,), replaces)
    certified = _issue(_signer(directory), name, [x509.DNSName(name)], _CLIENT, days)
    _make_directory(directory / "clients")
    _store(directory / "clients" / name, certified, replaces)
    return certified


def _issue(
    signer: Signer, name: str, alternatives: Sequence[x509.GeneralName], purpose: x509.ObjectIdentifier, days: int
) -> CertifiedKey:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(signer, _common_name(name[:63]), key, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    return CertifiedKey.parse(_pem(builder.sign(signer.key, hashes.SHA256())), _key_pem(key))


def _builder(signer: Signer, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    if not 1 <= days <= MOST_DAYS:
        raise ValueError(f"a certificate is valid for 1 to {MOST_DAYS} days, not {days}")
    now = datetime.fromtimestamp(system.port.now() // 1_000_000_000, UTC)
    end = now + timedelta(days=days)
    if signer.certificate is not None:
        end = min(end, signer.certificate.not_valid_after_utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(signer.name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - _EARLIER).not_valid_after(end)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key()), critical=False)


def _signer(directory: Path) -> Signer:
    """Return the authority of a directory."""
    certified = read_certified_key(directory / "ca.pem", directory / "ca.key")
    problem = certified.certificate.problem()
    if problem is not None:
        raise CertificateError(f"{directory / 'ca.pem'}: {problem}")
    certificate = x509.load_pem_x509_certificate(certified.chain)
    key = serialization.load_pem_private_key(certified.key, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{directory / 'ca.key'} is no key of this command: those are ECDSA")
    return Signer(certificate.subject, key, certificate)


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    """Return a server's names in the form of a certificate. Raises ValueError."""
    if not names:
        raise ValueError("a server's certificate needs at least one name")
    return [_alternative(name) for name in names]


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not _HOST.fullmatch(name):
            raise ValueError(f"{name!r} is neither a host's name nor an address") from None
        return x509.DNSName(name)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


# Files.


def _refuse_existing(directory: Path, names: Sequence[str], replaces: bool) -> None:
    for path in (directory / f"{name}{ending}" for name in names for ending in (".pem", ".key")):
        if not replaces and system.port.look_up(path) is not None:
            raise CertificateError(f"{path} already exists; nothing was created")


def _make_directory(directory: Path) -> None:
    if system.port.look_up(directory) is None:
        system.port.make_directory(directory)


def _store(path: Path, certified: CertifiedKey, replaces: bool) -> None:
    """Write key and certificate; a process that watches them uses neither before it has both."""
    private.write(path.with_name(f"{path.name}.key"), certified.key, replaces=replaces)
    private.write(path.with_name(f"{path.name}.pem"), certified.chain, replaces=replaces, mode=0o644)
