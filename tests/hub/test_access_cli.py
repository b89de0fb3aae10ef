"""`kvspool hub token` and `kvspool hub certificate`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from clocks import StoppedClock
from commands import Run

from hub.errors import NotAuthenticated
from hub.security import certificates
from hub.security.access import Access
from hub.security.tokens import Token
from kvspool import system

TOKEN = re.compile(r"kvs_[0-9a-f]{8}_[A-Za-z0-9_-]{43}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.toml"


def test_add_prints_the_token_once_and_keeps_its_hash(path: Path, run: Run) -> None:
    out, err = run("hub", "token", "add", path, "--name", "jfk", "--read", "lga", "--read", "e*")
    assert TOKEN.fullmatch(out.strip()) and err == ""
    jfk = Access.load(path).authenticate(out.strip())
    assert (jfk.name, jfk.role) == ("jfk", "client")
    assert jfk.may_write("jfk-1") and jfk.may_read("lga") and jfk.may_read("ewr") and not jfk.may_read("jfk")
    assert out.strip() not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not TOKEN.search(run("hub", "token", "list", path).out)


def test_add_to_a_file_shows_the_token_nowhere_else(path: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "token"
    said = run("hub", "token", "add", path, "--name", "op", "--role", "admin", "--output", file).out
    token = Token.read(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert said == f"token {token.id} of op is in {file}\n"
    assert Access.load(path).authenticate(token.reveal()).may_administer


def test_list_shows_tokens_and_certificates_and_whether_they_hold(path: Path, run: Run) -> None:
    path.write_text('[[principals]]\nname = "lga"\ncertificates = ["lga.example.com"]\n[[revoked]]\nidentity = "LGA.example.com"\n')
    path.chmod(0o600)
    (made,) = run("hub", "token", "add", path, "--name", "jfk", "--json").objects
    assert made["token"].startswith(f"kvs_{made['id']}_")
    lga, jfk = run("hub", "token", "list", path, "--json").objects
    assert lga == {"principal": "lga", "role": "client", "certificate": "lga.example.com", "created": None, "revoked": True}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", jfk.pop("created"))
    assert jfk == {"principal": "jfk", "role": "client", "token": made["id"], "revoked": False}
    out = run("hub", "token", "list", path).out
    assert f"token {made['id']}" in out and "certificate lga.example.com" in out and "revoked" in out


def test_revoke_takes_an_id_or_a_certificate_s_name(path: Path, run: Run) -> None:
    token = Token(run("hub", "token", "add", path, "--name", "jfk").out.strip())
    assert run("hub", "token", "revoke", path, token.id).out == f"token {token.id} is revoked\n"
    assert run("hub", "token", "revoke", path, token.id).out == f"token {token.id} was revoked before\n"
    with pytest.raises(NotAuthenticated, match="revoked"):
        Access.load(path).authenticate(token.reveal())
    run("hub", "token", "revoke", path, "--identity", "jfk.example.com")
    assert token.reveal()[13:] not in "".join(run("hub", "token", "revoke", path, token.reveal(), code=2))


def test_certificates_are_made_and_shown(tmp_path: Path, run: Run) -> None:
    pki = tmp_path / "pki"
    assert run("hub", "certificate", "init", pki, "--name", "hub.example.com", "--name", "10.0.0.7").out.startswith(
        f"created ca.pem, ca.key, server.pem and server.key in {pki}, valid until 2"
    )
    assert run("hub", "certificate", "client", pki, "jfk", "--days", "30").out.startswith(
        f"created clients/jfk.pem and .key in {pki}, valid until 2"
    )
    (shown,) = run("hub", "certificate", "show", pki / "server.pem", "--json").objects
    assert shown["names"] == ["hub.example.com", "10.0.0.7"] and shown["valid"]
    assert shown["fingerprint"] == certificates.read(pki / "server.pem").fingerprint
    assert "identity     jfk\n" in run("hub", "certificate", "show", pki / "clients" / "jfk.pem").out
    run("hub", "certificate", "server", pki, "--name", "x", "--force")
    assert certificates.read_certified_key(pki / "server.pem", pki / "server.key").certificate.names == ("x",)


def test_a_certificate_that_has_expired_is_shown_with_code_1(tmp_path: Path, run: Run) -> None:
    run("hub", "certificate", "init", tmp_path / "pki", "--name", "a", "--days", "1")
    with system.replaced(StoppedClock()) as clock:
        assert isinstance(clock, StoppedClock)
        clock.pass_(2 * 86400)
        assert "it has expired at" in run("hub", "certificate", "show", tmp_path / "pki" / "server.pem", code=1).out


def test_a_second_hub_gets_a_certificate_of_the_same_authority_in_its_own_directory(tmp_path: Path, run: Run) -> None:
    pki, second = tmp_path / "pki", tmp_path / "hub2"
    run("hub", "certificate", "init", pki, "--name", "hub.example.com")
    before = {path.name: path.read_bytes() for path in pki.iterdir()}
    command = ["hub", "certificate", "server", str(pki), "--name", "hub2.example.com", "--output", str(second)]
    assert f"created server.pem and server.key in {second}" in run(*command).out
    assert {path.name: path.read_bytes() for path in pki.iterdir()} == before
    assert sorted(path.name for path in second.iterdir()) == ["server.key", "server.pem"]
    assert (second / "server.key").stat().st_mode & 0o777 == 0o600
    of_pki, of_second = certificates.read(pki / "server.pem"), certificates.read(second / "server.pem")
    assert of_second.names == ("hub2.example.com",)
    assert of_second.issuer == of_pki.issuer
    assert "already exists" in run(*command, code=3).err
    run(*command, "--force")


def test_without_the_extra_the_commands_name_it(tmp_path: Path) -> None:
    program = "import sys; sys.modules['cryptography'] = None; from kvspool.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "hub", "certificate", "init", str(tmp_path / "pki"), "--name", "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert "The extra hub has it: pip install 'pyarrow>=18' 'cryptography>=43'" in done.stderr
    assert "Traceback" not in done.stderr
