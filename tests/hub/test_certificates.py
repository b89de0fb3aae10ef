"""Certificates: made, read, watched, and shown to a real server in every bad state."""

from __future__ import annotations

import base64
import os
import re
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import trustme
from clocks import StoppedClock
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from guarded import GuardedServer, ask, served
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

from hub.errors import AccessError, CertificateError
from hub.security import access_file, authority, certificates
from hub.security.access import Access
from hub.security.certificates import Certificate, Certificates, CertifiedKey
from hub.security.tokens import Token
from hub.server.addresses import needs_tls
from kvspool import system
from kvspool.system import Port

DAY = 86400.0


@dataclass
class Pki:
    """The authority in a directory."""

    directory: Path

    @property
    def authority(self) -> bytes:
        return (self.directory / "ca.pem").read_bytes()

    @property
    def server(self) -> CertifiedKey:
        return certificates.read_certified_key(self.directory / "server.pem", self.directory / "server.key")

    def client(self, name: str) -> CertifiedKey:
        return authority.make_client(self.directory, name, replaces=True)

    def shown(self, pair: CertifiedKey | None = None) -> dict[str, Any]:
        """Return the options of a client that trusts this authority, and shows a certificate."""
        mine = {} if pair is None else {"cert_chain": pair.chain, "private_key": pair.key}
        return {"tls_root_certs": self.authority, **mine}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    directory = tmp_path_factory.mktemp("pki") / "a"
    make_old_authority(directory, ["localhost", "127.0.0.1"])
    return Pki(directory)


def make_old_authority(directory: Path, names: list[str]) -> None:
    """Make an authority that is old enough for certificates of it to have expired, and a server's that hasn't."""
    shifted(-500, lambda: authority.make_authority(directory, names))
    authority.make_server(directory, names, replaces=True)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Another authority, for the same host and with a client of the same name."""
    directory = tmp_path_factory.mktemp("pki") / "b"
    authority.make_authority(directory, ["localhost", "127.0.0.1"])
    return Pki(directory)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An access file that knows the certificate jfk."""
    path = tmp_path / "access.toml"
    path.write_text('[[principals]]\nname = "jfk"\ncertificates = ["jfk"]\n')
    path.chmod(0o600)
    return path


@pytest.fixture
def mutual(pki: Pki, path: Path) -> Iterator[GuardedServer]:
    """A server that wants a certificate of its clients."""
    with served(Access.load(path), pki.server, pki.authority) as server:
        yield server


def location(server: GuardedServer, host: str = "localhost") -> str:
    return f"grpc+tls://{host}:{server.port}"


def shifted(days: float, make: Callable[[], CertifiedKey]) -> CertifiedKey:
    """Return what is made when the clock is off by some days."""
    with system.replaced(StoppedClock()) as clock:
        assert isinstance(clock, StoppedClock)
        clock.pass_(days * DAY)
        return make()


# The matrix: only the right client is admitted.


def test_a_certificate_says_who_calls(mutual: GuardedServer, pki: Pki) -> None:
    shown = pki.shown(pki.client("jfk"))
    assert ask(location(mutual), **shown) == ask(location(mutual, "127.0.0.1"), **shown) == "jfk"
    assert ask(location(mutual), None, "write", b"jfk-2", **shown) == "jfk"
    with pytest.raises(flight.FlightUnauthorizedError):
        ask(location(mutual), None, "write", b"lga", **shown)


CLIENTS: dict[str, Callable[[Pki, Pki], CertifiedKey | None]] = {
    "no certificate": lambda pki, stranger: None,
    "expired": lambda pki, stranger: shifted(-400, lambda: pki.client("jfk")),
    "not yet valid": lambda pki, stranger: shifted(2, lambda: pki.client("jfk")),
    "of another authority": lambda pki, stranger: stranger.client("jfk"),
    "of a server": lambda pki, stranger: pki.server,
    "signed by itself": lambda pki, stranger: self_signed(),
    "signed by a client": lambda pki, stranger: signed_by(pki.client("jfk")),
}


def signed_by(pair: CertifiedKey) -> CertifiedKey:
    """Return a certificate that one who is no authority has signed."""
    certificate, key = x509.load_pem_x509_certificate(pair.chain), serialization.load_pem_private_key(pair.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    signer = authority.Signer(certificate.subject, key, certificate)
    made = authority._issue(signer, "jfk", [x509.DNSName("jfk")], ExtendedKeyUsageOID.CLIENT_AUTH, 1)
    return CertifiedKey.parse(made.chain + pair.chain, made.key)


def self_signed() -> CertifiedKey:
    certificate = trustme.CA(organization_name="jfk")
    return CertifiedKey.parse(certificate.cert_pem.bytes(), certificate.private_key_pem.bytes())


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS.keys())
def test_a_client_s_certificate_that_is_not_good_gets_no_call_through(
    mutual: GuardedServer, pki: Pki, stranger: Pki, make: Callable[[Pki, Pki], CertifiedKey | None]
) -> None:
    with pytest.raises(flight.FlightUnavailableError):
        ask(location(mutual), **pki.shown(make(pki, stranger)))
    assert mutual.calls == 0


SERVERS: dict[str, Callable[[Pki, Pki, Path], CertifiedKey]] = {
    "expired": lambda pki, stranger, path: shifted(-400, lambda: of_server(pki, path, "localhost")),
    "not yet valid": lambda pki, stranger, path: shifted(2, lambda: of_server(pki, path, "localhost")),
    "of another name": lambda pki, stranger, path: of_server(pki, path, "elsewhere.example.com"),
    "of another authority": lambda pki, stranger, path: stranger.server,
    "of a client": lambda pki, stranger, path: pki.client("localhost"),
}


def of_server(pki: Pki, path: Path, name: str) -> CertifiedKey:
    """Return a certificate of a server by the same authority, made aside."""
    for file in ("ca.pem", "ca.key"):
        (path / file).write_bytes((pki.directory / file).read_bytes())
        (path / file).chmod(0o600)
    return authority.make_server(path, [name])


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS.keys())
def test_a_client_tells_no_token_to_a_server_whose_certificate_is_not_good(
    pki: Pki, stranger: Pki, tmp_path: Path, make: Callable[[Pki, Pki, Path], CertifiedKey]
) -> None:
    access, token = tmp_path / "access.toml", Token.make()
    access_file.add_token(access, token, "jfk")
    with served(Access.load(access), make(pki, stranger, tmp_path)) as server:
        with pytest.raises(flight.FlightUnavailableError):
            ask(location(server), token, **pki.shown())
        assert (server.calls, server.authentication.failures) == (0, 0)


def test_a_token_goes_through_tls_that_the_client_verifies(pki: Pki, tmp_path: Path) -> None:
    access, token = tmp_path / "access.toml", Token.make()
    access_file.add_token(access, token, "lga")
    with served(Access.load(access), pki.server) as server:
        assert ask(location(server), token, **pki.shown()) == "lga"
        with pytest.raises(flight.FlightUnauthenticatedError):
            ask(location(server), **pki.shown())
        with pytest.raises(flight.FlightUnavailableError):
            ask(location(server), token)  # the system's authorities don't know ours
        with pytest.raises(flight.FlightUnavailableError):
            ask(f"grpc://localhost:{server.port}", token)  # plain text to the port of TLS
        # A certificate that the server did not ask for does not identify its client.
        with pytest.raises(flight.FlightUnauthenticatedError):
            ask(location(server), **pki.shown(pki.client("jfk")))
        assert server.calls == 1


def test_a_certificate_without_a_user_and_a_revoked_one_are_refused_and_logged_with_the_address(
    mutual: GuardedServer, pki: Pki, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jfk = pki.shown(pki.client("jfk"))
    with pytest.raises(flight.FlightUnauthenticatedError):
        ask(location(mutual), **pki.shown(pki.client("lga")))
    assert ask(location(mutual), **jfk) == "jfk"
    access_file.revoke(path, identity="jfk")
    mutual.authentication.access._looks_at = 0.0
    with pytest.raises(flight.FlightUnauthenticatedError, match="not authenticated"):
        ask(location(mutual), **jfk)
    first, second = (record.getMessage() for record in caplog.records)
    assert "certificate lga belongs to no principal; principal unknown, method DoAction, from 127.0.0.1 port " in first
    assert "certificate jfk is revoked; principal jfk, method DoAction, from 127.0.0.1 port " in second


def test_with_both_the_token_says_who_it_is_and_a_revoked_certificate_is_refused(mutual: GuardedServer, pki: Pki, path: Path) -> None:
    token = Token.make()
    access_file.add_token(path, token, "lga")
    access_file.revoke(path, identity="old")
    mutual.authentication.access._looks_at = 0.0
    assert ask(location(mutual), token, **pki.shown(pki.client("jfk"))) == "lga"
    with pytest.raises(flight.FlightUnauthenticatedError):
        ask(location(mutual), token, **pki.shown(pki.client("old")))
    with pytest.raises(flight.FlightUnauthenticatedError):
        ask(location(mutual), "Bearer x", **pki.shown(pki.client("jfk")))
    with pytest.raises(flight.FlightUnavailableError):
        ask(location(mutual), token, **pki.shown())


@pytest.mark.parametrize("names", [("jfk.example.com", "lga"), ("10.0.0.1", "jfk"), ("jfk", "10.0.0.1"), ("*.example.com",)], ids=str)
def test_the_identity_is_the_first_name_as_the_server_sees_it(pki: Pki, tmp_path: Path, names: tuple[str, ...]) -> None:
    ca = trustme.CA()
    leaf = ca.issue_cert(*names)
    pair = CertifiedKey.parse(leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes())
    assert pair.certificate.identity == names[0]
    path = tmp_path / "access.toml"
    path.write_text(f'[[principals]]\nname = "first"\ncertificates = ["{pair.certificate.identity}"]\n')
    path.chmod(0o600)
    with served(Access.load(path), pki.server, ca.cert_pem.bytes()) as server:
        assert ask(location(server), **pki.shown(pair)) == "first"


def test_a_certificate_without_a_name_is_known_by_its_common_name(pki: Pki, tmp_path: Path) -> None:
    ca = trustme.CA()
    leaf = ca.issue_cert(common_name="lga")
    pair = CertifiedKey.parse(leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes())
    assert (pair.certificate.identity, pair.certificate.names) == ("lga", ())
    path = tmp_path / "access.toml"
    path.write_text('[[principals]]\nname = "lga"\ncertificates = ["lga"]\n')
    path.chmod(0o600)
    with served(Access.load(path), pki.server, ca.cert_pem.bytes()) as server:
        assert ask(location(server), **pki.shown(pair)) == "lga"


def handshake(server: GuardedServer, pki: Pki, **versions: ssl.TLSVersion) -> str | None:
    """Return the version of TLS that server and client agree on."""
    context = ssl.create_default_context(cadata=pki.authority.decode())
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, version in versions.items():
            setattr(context, name, version)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as encrypted:
            return encrypted.version()


def test_tls_is_1_3_or_1_2_for_older_clients_and_nothing_older(pki: Pki, path: Path) -> None:
    old = ssl.TLSVersion.TLSv1_1
    with served(Access.load(path), pki.server) as server:
        assert handshake(server, pki) == "TLSv1.3"
        assert handshake(server, pki, maximum_version=ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        with pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION|UNEXPECTED_EOF"):
            handshake(server, pki, minimum_version=ssl.TLSVersion.TLSv1, maximum_version=old)


# Which addresses need it.


@pytest.mark.parametrize(
    ("host", "is_needed"),
    [
        ("127.0.0.1", False),
        ("127.8.9.10", False),
        ("::1", False),
        ("[::1]", False),
        ("::ffff:127.0.0.1", False),
        ("localhost", False),
        ("LOCALHOST", False),
        ("unix:/run/hub", False),
        ("/run/hub", False),
        ("", True),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", True),
        ("192.168.0.1", True),
        ("169.254.1.1", True),
        ("fe80::1", True),
        ("::ffff:10.0.0.1", True),
        ("hub.example.com", True),
        ("localhost.example.com", True),
        ("127.0.0.1.example.com", True),
        ("127.1", True),
        ("2130706433", True),
        ("0x7f000001", True),
    ],
)
def test_everything_but_loopback_and_unix_sockets_needs_tls(host: str, is_needed: bool) -> None:
    assert needs_tls(host) == is_needed


# Made.


def test_what_is_made_says_what_was_asked_for_and_its_key_is_its_owner_s_alone(tmp_path: Path) -> None:
    with system.replaced(StoppedClock()):
        made = authority.make_authority(tmp_path / "new", ["hub.example.com", "10.0.0.7", "::1"])
        client = authority.make_client(tmp_path / "new", "jfk.2027", days=30)
        now = system.port.now() // 10**9 * 10**9
    assert made.certificate.names == ("hub.example.com", "10.0.0.7", "::1")
    assert made.certificate.identity == "hub.example.com"
    assert made.certificate.not_after - now == 397 * 86400 * 10**9
    assert now - made.certificate.not_before == 3600 * 10**9
    assert client.certificate.identity == "jfk.2027"
    assert client.certificate.not_after - now == 30 * 86400 * 10**9
    ca = certificates.read(tmp_path / "new" / "ca.pem")
    assert ca.subject == ca.issuer == made.certificate.issuer
    assert (ca.not_after - now) // (86400 * 10**9) == 3652
    assert re.fullmatch("[0-9a-f]{64}", ca.fingerprint)
    modes = {str(file.relative_to(tmp_path)): oct(file.stat().st_mode & 0o777) for file in sorted(tmp_path.rglob("*"))}
    assert modes == {
        "new": "0o700",
        "new/ca.key": "0o600",
        "new/ca.pem": "0o644",
        "new/clients": "0o700",
        "new/clients/jfk.2027.key": "0o600",
        "new/clients/jfk.2027.pem": "0o644",
        "new/server.key": "0o600",
        "new/server.pem": "0o644",
    }
    key = serialization.load_pem_private_key(made.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp256r1"
    for pair in (made, client):
        found = x509.load_pem_x509_certificate(pair.chain).extensions
        assert not found.get_extension_for_class(x509.BasicConstraints).value.ca
        assert not found.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert b"PRIVATE" not in repr(made).encode() and b"PRIVATE" in made.key


def test_nothing_is_overwritten_unless_it_is_meant(tmp_path: Path) -> None:
    authority.make_authority(tmp_path, ["a"])
    authority.make_client(tmp_path, "c")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    for make in (
        lambda: authority.make_authority(tmp_path, ["a"]),
        lambda: authority.make_server(tmp_path, ["a"]),
        lambda: authority.make_client(tmp_path, "c"),
    ):
        with pytest.raises(CertificateError, match="already exists"):
            make()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before
    new = authority.make_server(tmp_path, ["b"], replaces=True)
    assert certificates.read_certified_key(tmp_path / "server.pem", tmp_path / "server.key") == new
    assert (tmp_path / "ca.pem").read_bytes() == before[tmp_path / "ca.pem"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".a", "-a", "a\0", "a b", "a\n", "x" * 64, "ü"])
def test_a_client_s_name_becomes_a_file_s_name_only_if_it_is_one(tmp_path: Path, name: str) -> None:
    authority.make_authority(tmp_path / "pki", ["a"])
    with pytest.raises(ValueError):
        authority.make_client(tmp_path / "pki", name)
    assert sorted(file.name for file in (tmp_path / "pki").iterdir()) == ["ca.key", "ca.pem", "server.key", "server.pem"]


def test_what_can_not_be_made_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for names in ([], [""], ["a b"], ["a/b"], ["ü"], ["1.2.3.4/8"]):
        with pytest.raises(ValueError):
            authority.make_authority(tmp_path / "none", names)
    assert not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError):
        authority.make_client(tmp_path, "a")
    for days in (0, -1, authority.MOST_DAYS + 1):
        with pytest.raises(ValueError):
            authority.make_authority(tmp_path / "short", ["a"], days=days)


def test_no_certificate_outlives_its_authority_and_an_expired_one_signs_nothing(tmp_path: Path) -> None:
    with system.replaced(StoppedClock()) as clock:
        assert isinstance(clock, StoppedClock)
        authority.make_authority(tmp_path, ["a"])
        clock.pass_(3600 * DAY)
        late = authority.make_client(tmp_path, "late")
        assert late.certificate.not_after == certificates.read(tmp_path / "ca.pem").not_after
        clock.pass_(60 * DAY)
        with pytest.raises(CertificateError, match="expired"):
            authority.make_client(tmp_path, "later")


# Read and watched.


def test_a_key_that_others_can_read_or_a_certificate_that_they_can_write_is_refused(tmp_path: Path) -> None:
    authority.make_authority(tmp_path, ["a"])
    pem, key = tmp_path / "server.pem", tmp_path / "server.key"
    for mode in (0o640, 0o604, 0o644):
        key.chmod(mode)
        with pytest.raises(AccessError, match="chmod 600"):
            certificates.read_certified_key(pem, key)
    key.chmod(0o400)
    for mode in (0o664, 0o646):
        pem.chmod(mode)
        for read in (certificates.read, lambda path: certificates.read_certified_key(path, key)):
            with pytest.raises(AccessError, match="chmod go-w"):
                read(pem)
    pem.chmod(0o444)
    assert certificates.read_certified_key(pem, key).certificate.names == ("a",)


class Other(Port):
    def user_id(self) -> int:
        return 65534


def test_a_key_of_another_user_is_refused_and_a_certificate_of_another_but_root(tmp_path: Path) -> None:
    authority.make_authority(tmp_path, ["a"])
    with system.replaced(Other()):
        with pytest.raises(AccessError, match="belongs to user"):
            certificates.read_certified_key(tmp_path / "server.pem", tmp_path / "server.key")
        if os.geteuid() == 0:
            certificates.read(tmp_path / "ca.pem")


def test_what_is_no_pair_is_refused_without_a_word_of_the_key(tmp_path: Path) -> None:
    one = authority.make_authority(tmp_path / "a", ["a"])
    other = authority.make_authority(tmp_path / "b", ["b"])
    encrypted = serialization.load_pem_private_key(one.key, None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    for chain, key, words in [
        (one.chain, other.key, "is not that of"),
        (b"", one.key, "no certificate"),
        (one.chain[:100], one.key, "no certificate"),
        (one.key, one.key, "no certificate"),
        (one.chain, b"", "no private key"),
        (one.chain, one.key[:100], "no private key"),
        (one.chain, one.chain, "no private key"),
        (one.chain, encrypted, "encrypted"),
    ]:
        with pytest.raises(CertificateError, match=words) as caught:
            CertifiedKey.parse(chain, key)
        assert one.key.decode().splitlines()[1] not in str(caught.value)
    with_chain = CertifiedKey.parse(one.chain + other.chain, one.key)
    assert with_chain.certificate == one.certificate


@given(st.data())
def test_a_damaged_certificate_is_described_or_refused_as_such(pki: Pki, data: st.DataObject) -> None:
    pair = pki.server
    body = bytearray(base64.b64decode(b"".join(pair.chain.splitlines()[1:-1])))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.sampled_from([len(body), len(body) - 1, 200, 1]))]
    pem = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(body) + b"-----END CERTIFICATE-----\n"
    for parse in (lambda: Certificate.parse(pem), lambda: CertifiedKey.parse(pem, pair.key)):
        with suppress(CertificateError):
            parse()


def test_validity_has_a_beginning_and_an_end() -> None:
    found = Certificate("s", "i", (), "", 10**9, 2 * 10**9, "")
    assert found.problem(10**9) is None
    assert found.problem(2 * 10**9 - 1) is None
    assert "not valid before 1970-01-01T00:00:01Z" in str(found.problem(10**9 - 1))
    assert "expired at 1970-01-01T00:00:02Z" in str(found.problem(2 * 10**9))


@pytest.fixture
def watched(tmp_path: Path, clock: StoppedClock) -> tuple[Certificates, Path]:
    make_old_authority(tmp_path, ["localhost"])
    return Certificates(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem"), tmp_path


def test_a_new_pair_is_taken_once_it_is_there(watched: tuple[Certificates, Path], clock: StoppedClock) -> None:
    found, directory = watched
    before = found.server_key
    clock.pass_(5)
    assert not found.refresh()
    new = authority.make_server(directory, ["localhost"], replaces=True)
    assert not found.refresh()  # a look a second
    clock.pass_(1)
    assert found.refresh()
    assert found.server_key == new != before
    assert found.not_after == new.certificate.not_after
    clock.pass_(1)
    assert not found.refresh()


@pytest.mark.parametrize("first", ["server.key", "server.pem"])
def test_a_half_written_pair_is_not_taken_and_the_whole_one_is(
    watched: tuple[Certificates, Path], clock: StoppedClock, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, directory = watched
    old = {name: (directory / name).read_bytes() for name in ("server.key", "server.pem")}
    new = authority.make_server(directory, ["localhost"], replaces=True)
    second = ({"server.key", "server.pem"} - {first}).pop()
    data = (directory / second).read_bytes()
    for state in (old[second], data[:50], b""):
        (directory / second).write_bytes(state)
        before = found.server_key
        for _ in range(3):
            clock.pass_(1)
            assert not found.refresh()
        assert found.server_key is before
        assert found.error is not None
    assert 1 <= len(caplog.records) <= 3
    (directory / second).write_bytes(data)
    clock.pass_(1)
    assert found.refresh()
    assert found.server_key == new
    assert found.error is None


def test_a_pair_that_is_not_valid_now_and_one_that_others_can_read_are_not_taken(
    watched: tuple[Certificates, Path], clock: StoppedClock
) -> None:
    found, directory = watched
    before = found.server_key
    clock.pass_(-400 * DAY)
    made = authority.make_server(directory, ["localhost"], replaces=True)
    clock.pass_(400 * DAY + 2)
    assert not found.refresh()
    assert found.error is not None and "expired" in found.error
    authority.make_server(directory, ["localhost"], replaces=True)
    (directory / "server.key").chmod(0o644)
    clock.pass_(1)
    assert not found.refresh()
    assert found.error is not None and "chmod 600" in found.error
    assert found.server_key == before != made
    (directory / "server.key").chmod(0o600)
    clock.pass_(1)
    assert found.refresh()
    # A file that cannot be examined is an error like any other.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system.Port, "look_up", Mock(side_effect=PermissionError("closed")))
        clock.pass_(1)
        assert not found.refresh()
        assert found.error == "closed"
    for name in ("server.key", "server.pem", "ca.pem"):
        (directory / name).unlink()
    clock.pass_(1)
    assert not found.refresh()
    assert found.error is not None and "No such file" in found.error


def test_a_new_authority_is_noticed_too(watched: tuple[Certificates, Path], clock: StoppedClock) -> None:
    found, directory = watched
    other = (directory / "ca.pem").read_bytes() + trustme.CA().cert_pem.bytes()
    (directory / "ca.pem").write_bytes(other)
    clock.pass_(1)
    assert found.refresh()
    assert found.authority == other


def test_of_several_waiting_threads_one_is_notified(watched: tuple[Certificates, Path], clock: StoppedClock) -> None:
    found, directory = watched
    authority.make_server(directory, ["localhost"], replaces=True)
    clock.pass_(1)
    told: list[bool] = []
    threads = [threading.Thread(target=lambda: told.append(found.refresh())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [False] * 7 + [True]
