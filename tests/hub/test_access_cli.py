"""`kvspool hub token` and `kvspool hub certificate`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clocks import StoppedClock

from hub.errors import NotAuthenticated
from hub.security import certificates
from hub.security.access import Access
from hub.security.tokens import Token
from kvspool import system
from kvspool.cli import main

TOKEN = re.compile(r"kvs_[0-9a-f]{8}_[A-Za-z0-9_-]{43}")


def objects(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.toml"


def test_add_prints_the_token_once_and_keeps_its_hash(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", "token", "add", str(path), "--name", "jfk", "--read", "lga", "--read", "e*"]) == 0
    out, err = capfd.readouterr()
    assert TOKEN.fullmatch(out.strip()) and err == ""
    jfk = Access.load(path).authenticate(out.strip())
    assert (jfk.name, jfk.role) == ("jfk", "client")
    assert jfk.may_write("jfk-1") and jfk.may_read("lga") and jfk.may_read("ewr") and not jfk.may_read("jfk")
    assert out.strip() not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["hub", "token", "list", str(path)]) == 0
    assert not TOKEN.search(capfd.readouterr().out)


def test_add_to_a_file_shows_the_token_nowhere_else(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    assert main(["hub", "token", "add", str(path), "--name", "op", "--role", "admin", "--output", str(file)]) == 0
    token = Token.read(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().out == f"token {token.id} of op is in {file}\n"
    assert Access.load(path).authenticate(token.reveal()).may_administer
    before = path.read_bytes()
    assert main(["hub", "token", "add", str(path), "--name", "op", "--output", str(file)]) == 2
    assert "already exists" in capfd.readouterr().err
    assert path.read_bytes() == before
    assert Token.read(file).id == token.id


def test_what_can_not_be_added_leaves_nothing(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    for words in (["--name", "../x"], ["--name", "a", "--read", "b*c"], ["--name", "a.b"]):
        assert main(["hub", "token", "add", str(path), *words, "--output", str(file)]) == 2
    assert main(["hub", "token", "add", str(path), "--name", "a", "--role", "root"]) == 2
    assert main(["hub", "token", "add", str(tmp_path / "none" / "a"), "--name", "a", "--output", str(file)]) == 1
    path.write_text("")
    path.chmod(0o644)
    assert main(["hub", "token", "add", str(path), "--name", "a", "--output", str(file)]) == 3
    assert "chmod 600" in capfd.readouterr().err
    assert sorted(tmp_path.iterdir()) == [path]
    path.chmod(0o600)
    assert main(["hub", "token", "add", str(path), "--name", "a"]) == 0
    assert main(["hub", "token", "add", str(path), "--name", "a", "--role", "reader"]) == 2
    assert "other rights" in capfd.readouterr().err


def test_list_shows_tokens_and_certificates_and_whether_they_hold(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path.write_text('[[principals]]\nname = "lga"\ncertificates = ["lga.example.com"]\n[[revoked]]\nidentity = "LGA.example.com"\n')
    path.chmod(0o600)
    assert main(["hub", "token", "add", str(path), "--name", "jfk", "--json"]) == 0
    (made,) = objects(capfd.readouterr().out)
    assert made["token"].startswith(f"kvs_{made['id']}_")
    assert main(["hub", "token", "list", str(path), "--json"]) == 0
    lga, jfk = objects(capfd.readouterr().out)
    assert lga == {"principal": "lga", "role": "client", "certificate": "lga.example.com", "created": None, "revoked": True}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", jfk.pop("created"))
    assert jfk == {"principal": "jfk", "role": "client", "token": made["id"], "revoked": False}
    assert main(["hub", "token", "list", str(path)]) == 0
    out = capfd.readouterr().out
    assert f"token {made['id']}" in out and "certificate lga.example.com" in out and "revoked" in out


def test_revoke_takes_an_id_or_a_certificate_s_name(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["hub", "token", "add", str(path), "--name", "jfk"]) == 0
    token = Token(capfd.readouterr().out.strip())
    assert main(["hub", "token", "revoke", str(path), token.id]) == 0
    assert main(["hub", "token", "revoke", str(path), token.id]) == 0
    assert capfd.readouterr().out == f"token {token.id} is revoked\ntoken {token.id} was revoked before\n"
    with pytest.raises(NotAuthenticated, match="revoked"):
        Access.load(path).authenticate(token.reveal())
    assert main(["hub", "token", "revoke", str(path), "--identity", "jfk.example.com"]) == 0
    capfd.readouterr()
    assert main(["hub", "token", "revoke", str(path), token.reveal()]) == 2
    assert token.reveal()[13:] not in "".join(capfd.readouterr())
    assert main(["hub", "token", "revoke", str(path), "ffffffff"]) == 2
    assert main(["hub", "token", "revoke", str(path)]) == 2
    assert main(["hub", "token", "revoke", str(path.parent / "none"), "ffffffff"]) == 1


def test_certificates_are_made_and_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pki = tmp_path / "pki"
    assert main(["hub", "certificate", "init", str(pki), "--name", "hub.example.com", "--name", "10.0.0.7"]) == 0
    assert capfd.readouterr().out.startswith(f"created ca.pem, ca.key, server.pem and server.key in {pki}, valid until 2")
    assert main(["hub", "certificate", "client", str(pki), "jfk", "--days", "30"]) == 0
    assert capfd.readouterr().out.startswith(f"created clients/jfk.pem and .key in {pki}, valid until 2")
    assert main(["hub", "certificate", "show", str(pki / "server.pem"), "--json"]) == 0
    (shown,) = objects(capfd.readouterr().out)
    assert shown["names"] == ["hub.example.com", "10.0.0.7"] and shown["valid"]
    assert shown["fingerprint"] == certificates.read(pki / "server.pem").fingerprint
    assert main(["hub", "certificate", "show", str(pki / "clients" / "jfk.pem")]) == 0
    assert "identity     jfk\n" in capfd.readouterr().out
    before = (pki / "server.pem").read_bytes()
    assert main(["hub", "certificate", "init", str(pki), "--name", "x"]) == 3
    assert main(["hub", "certificate", "server", str(pki), "--name", "x"]) == 3
    assert main(["hub", "certificate", "client", str(pki), "jfk"]) == 3
    assert capfd.readouterr().err.count("already exists") == 3
    assert (pki / "server.pem").read_bytes() == before
    assert main(["hub", "certificate", "server", str(pki), "--name", "x", "--force"]) == 0
    assert certificates.read_certified_key(pki / "server.pem", pki / "server.key").certificate.names == ("x",)


def test_certificates_that_can_not_be_made_or_read_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pki = str(tmp_path / "pki")
    assert main(["hub", "certificate", "init", pki, "--name", "a b"]) == 2
    assert main(["hub", "certificate", "init", pki]) == 2
    assert main(["hub", "certificate", "init", pki, "--name", "a", "--days", "0"]) == 2
    assert main(["hub", "certificate", "client", pki, "jfk"]) == 1
    assert main(["hub", "certificate", "client", pki, "../jfk"]) == 2
    assert not Path(pki).exists()
    (tmp_path / "text").write_text("no")
    assert main(["hub", "certificate", "show", str(tmp_path / "text")]) == 3
    assert "no certificate in PEM" in capfd.readouterr().err


def test_a_certificate_that_has_expired_is_shown_with_code_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:


    assert main(["hub", "certificate", "init", str(tmp_path / "pki"), "--name", "a", "--days", "1"]) == 0
    with system.replaced(StoppedClock()) as clock:
        assert isinstance(clock, StoppedClock)
        clock.pass_(2 * 86400)
        assert main(["hub", "certificate", "show", str(tmp_path / "pki" / "server.pem")]) == 1
    assert "it has expired at" in capfd.readouterr().out


def test_a_second_hub_gets_a_certificate_of_the_same_authority_in_its_own_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pki, second = tmp_path / "pki", tmp_path / "hub2"
    assert main(["hub", "certificate", "init", str(pki), "--name", "hub.example.com"]) == 0
    before = {path.name: path.read_bytes() for path in pki.iterdir()}
    command = ["hub", "certificate", "server", str(pki), "--name", "hub2.example.com", "--output", str(second)]
    assert main(command) == 0
    assert f"created server.pem and server.key in {second}" in capfd.readouterr().out
    assert {path.name: path.read_bytes() for path in pki.iterdir()} == before
    assert sorted(path.name for path in second.iterdir()) == ["server.key", "server.pem"]
    assert (second / "server.key").stat().st_mode & 0o777 == 0o600
    of_pki, of_second = certificates.read(pki / "server.pem"), certificates.read(second / "server.pem")
    assert of_second.names == ("hub2.example.com",)
    assert of_second.issuer == of_pki.issuer
    assert main(command) == 3
    assert "already exists" in capfd.readouterr().err
    assert main([*command, "--force"]) == 0


COMMANDS = [["token"], ["certificate"]]
COMMANDS += [["token", name] for name in ("add", "list", "revoke")]
COMMANDS += [["certificate", name] for name in ("init", "server", "client", "show")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_explains_each_command_with_examples(capfd: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main(["hub", *command, "--help"]) == 0
    out = capfd.readouterr().out
    assert "Examples:" in out
    assert f"kvspool hub {' '.join(command)}" in out


@pytest.mark.parametrize("command", ["token", "certificate"])
def test_a_group_alone_prints_its_help_and_ends_with_2(capfd: pytest.CaptureFixture[str], command: str) -> None:
    assert main(["hub", command]) == 2
    assert "Examples:" in capfd.readouterr().err


def test_without_the_extra_the_commands_name_it(tmp_path: Path) -> None:
    program = "import sys; sys.modules['cryptography'] = None; from kvspool.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "hub", "certificate", "init", str(tmp_path / "pki"), "--name", "a"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert "The extra hub has it: pip install 'pyarrow>=18' 'cryptography>=43'" in done.stderr
    assert "Traceback" not in done.stderr
