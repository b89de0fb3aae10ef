"""Permissions of users: the contents of the file, how it is read again, and that tokens leak nowhere."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from pathlib import Path

import pytest
from clocks import StoppedClock
from hypothesis import given
from hypothesis import strategies as st

from hub.errors import AccessError, NotAuthenticated
from hub.root.root import check_client
from hub.security import access_file, private
from hub.security.access import Access, Patterns, Principal
from hub.security.quotas import UNLIMITED, Quota
from hub.security.tokens import Token
from kvspool import system
from kvspool.errors import LockTimeout
from kvspool.system import Port

NEVER = "kvs_00000000_" + "A" * 43
CLIENT_ID = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.toml"


def give(path: Path, name: str, *arguments: object) -> Token:
    """Return a new token of a principal."""
    token = Token.make()
    access_file.add_token(path, token, name, *arguments)  # type: ignore[arg-type]
    return token


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def _with_token(path: Path, name: str) -> Principal:
    token = give(path, name)
    return Access.load(path).authenticate(token.reveal())


# Rights.


def test_a_client_writes_its_own_id_and_those_that_begin_with_it_and_a_hyphen_and_nothing_else(path: Path) -> None:
    jfk = _with_token(path, "jfk")
    assert [name for name in ("jfk", "jfk-2", "jfk-2-b", "jfk-") if jfk.may_write(name)] == ["jfk", "jfk-2", "jfk-2-b", "jfk-"]
    refused = ["", "jf", "jfk2", "jfk_2", "JFK", "jfk-/x", "jfk-..", "jfk-2.1.000", "../jfk", "jfk\0", "jfk-\n", "jfk-" + "x" * 100, "lga"]
    assert [name for name in refused if jfk.may_write(name)] == []
    assert not jfk.may_read("jfk")
    assert not jfk.may_administer
    assert jfk.may_list("jfk-2")
    assert not jfk.may_list("lga")


def test_reading_listing_and_administering_are_rights_of_their_own(path: Path) -> None:
    write(
        path,
        '[[principals]]\nname = "r"\nrole = "reader"\nread = ["jfk", "l*"]\nlist = ["ewr"]\n'
        '[[principals]]\nname = "a"\nrole = "admin"\n',
    )
    reader, admin = _with_token(path, "r"), _with_token(path, "a")
    assert [name for name in ("jfk", "jfk-2", "lga", "l", "ewr", "r") if reader.may_read(name)] == ["jfk", "lga", "l"]
    assert [name for name in ("jfk", "jfk-2", "lga", "ewr", "r") if reader.may_list(name)] == ["jfk", "lga", "ewr"]
    assert not any(reader.may_write(name) for name in ("r", "r-1", "jfk"))
    assert not reader.may_administer
    assert admin.may_administer
    assert admin.may_list("jfk")
    assert not any(right("jfk") or right("a") for right in (admin.may_read, admin.may_write))


def test_what_is_denied_is_denied_whatever_else_allows_it(path: Path) -> None:
    write(path, '[[principals]]\nname = "jfk"\nread = ["*"]\nlist = ["*"]\ndeny = ["jfk-x*", "lga"]\n')
    jfk = _with_token(path, "jfk")
    for client in ("jfk-x", "jfk-xy", "lga"):
        assert not jfk.may_write(client)
        assert not jfk.may_read(client)
        assert not jfk.may_list(client)
    assert jfk.may_write("jfk-y")
    assert jfk.may_read("lgas")


@given(CLIENT_ID, CLIENT_ID)
def test_a_client_s_right_to_write_is_exactly_that_of_its_beginning(name: str, client: str) -> None:
    found = access_file.parse(f'[[principals]]\nname = "{name}"\n'.encode())
    (entry,) = found.principals
    from hub.security.access import _principal

    assert _principal(entry, UNLIMITED).may_write(client) == (client == name or client.startswith(name + "-"))
    assert _principal(entry, UNLIMITED).may_write(name + "-" + client)


@given(st.lists(st.one_of(CLIENT_ID, CLIENT_ID.map(lambda text: text + "*"), st.just("*")), max_size=5), CLIENT_ID)
def test_a_pattern_matches_what_it_names_or_begins(patterns: list[str], client: str) -> None:
    expected = any(client.startswith(pattern[:-1]) if pattern.endswith("*") else client == pattern for pattern in patterns)
    assert Patterns.parse(tuple(patterns)).matches(client) == expected
    assert all(Patterns.parse((pattern,)).matches(pattern.removesuffix("*") + "x" * pattern.endswith("*")) for pattern in patterns)


@given(st.text(max_size=20))
def test_a_pattern_is_a_client_id_or_how_one_begins_and_nothing_else(text: str) -> None:
    try:
        if text != "*":
            check_client(text.removesuffix("*"))
        is_one = True
    except ValueError:
        is_one = False
    if is_one:
        assert Patterns.parse((text,))
    else:
        with pytest.raises(ValueError):
            Patterns.parse((text,))


@given(st.text(max_size=30))
def test_no_text_that_is_no_client_id_is_ever_allowed(client: str) -> None:
    everything = Access.anonymous().authenticate("")
    try:
        check_client(client)
        is_one = True
    except ValueError:
        is_one = False
    assert everything.may_write(client) == everything.may_read(client) == everything.may_list(client) == is_one


def test_anonymous_access_is_asked_for_and_allows_everything() -> None:
    access = Access.anonymous()
    assert access.is_anonymous
    for found in (access.authenticate("whatever"), access.identify("whoever"), access.renewed(access.authenticate(""))):
        assert found.may_write("jfk") and found.may_read("jfk") and found.may_administer


# Tokens.


def test_a_token_has_its_form_and_is_never_the_same() -> None:
    one, other = Token.make(), Token.make()
    assert len(one.reveal()) == 4 + 8 + 1 + 43
    assert one.reveal() == f"kvs_{one.id}_{one.reveal()[13:]}"
    assert one.reveal() != other.reveal()
    assert one.header == (b"authorization", b"Bearer " + one.reveal().encode())
    for text in ("", "kvs_", one.reveal() + "x", one.reveal()[:-1], one.reveal().upper(), one.reveal() + "\n", " " + one.reveal()):
        with pytest.raises(ValueError) as caught:
            Token(text)
        assert not text or text not in str(caught.value) or text in "kvs_"


def test_a_token_shows_in_no_repr_no_pickle_and_no_error(path: Path) -> None:
    token = give(path, "jfk")
    secret = token.reveal()[13:]
    access = Access.load(path)
    found = access.authenticate(token.reveal())
    assert secret not in f"{token!r} {token} {access!r} {found!r} {vars(access)} {path.read_text()}"
    assert token.digest in path.read_text()
    with pytest.raises(TypeError):
        pickle.dumps(token)
    with pytest.raises(NotAuthenticated) as caught:
        access.authenticate(f"kvs_{token.id}_{'A' * 43}")
    assert "AAAA" not in str(caught.value)
    assert caught.value.principal == "jfk"


def test_a_token_is_read_from_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    token = Token.make()
    file = write(tmp_path / "token", token.reveal() + "\n")
    assert Token.read(file).reveal() == token.reveal()
    file.chmod(0o640)
    with pytest.raises(AccessError, match="chmod 600"):
        Token.read(file)
    with pytest.raises(AccessError, match="holds no token") as caught:
        Token.read(write(tmp_path / "other", "kvs_secret"))
    assert "secret" not in str(caught.value)


def test_two_tokens_of_one_principal_hold_until_each_is_revoked(path: Path, clock: StoppedClock) -> None:
    old, new = give(path, "jfk"), give(path, "jfk")
    access = Access.load(path)
    assert access.authenticate(old.reveal()).name == access.authenticate(new.reveal()).name == "jfk"
    during = access.authenticate(old.reveal())
    assert access_file.revoke(path, token=old.id)
    clock.pass_(2)
    for call in (lambda: access.authenticate(old.reveal()), lambda: access.renewed(during)):
        with pytest.raises(NotAuthenticated, match="is revoked") as caught:
            call()
        assert caught.value.principal == "jfk"
    assert access.renewed(access.authenticate(new.reveal())).name == "jfk"
    assert not access_file.revoke(path, token=old.id)


@pytest.mark.parametrize("text", ["", "x", NEVER, "kvs_" + "\0" * 52])
def test_a_token_that_is_not_in_the_file_has_no_user(path: Path, text: str) -> None:
    give(path, "jfk")
    with pytest.raises(NotAuthenticated) as caught:
        Access.load(path).authenticate(text)
    assert caught.value.principal is None


@given(st.text(max_size=80))
def test_no_text_but_the_token_itself_is_ever_taken(text: str) -> None:
    token = Token.make()
    toml = f'[[principals]]\nname = "a"\n[[tokens]]\nprincipal = "a"\nid = "{token.id}"\nsha256 = "{token.digest}"\n'
    from hub.security.access import _rights

    access = Access(private.WatchedFile("/nowhere", is_secret=True))
    access._rights = _rights(access_file.parse(toml.encode()))
    access._looks_at = float("inf")
    assert access.authenticate(token.reveal()).name == "a"
    for wrong in (text, token.reveal() + text[:1] if text else "", f"kvs_{token.id}_{text}"):
        with pytest.raises(NotAuthenticated):
            access.authenticate(wrong)


# Certificates' names.


def test_a_certificate_stands_for_the_principal_that_names_it_until_it_is_revoked(path: Path, clock: StoppedClock) -> None:
    write(path, '[[principals]]\nname = "jfk"\ncertificates = ["jfk.example.com", "spiffe://x/jfk"]\n')
    access = Access.load(path)
    found = access.identify("JFK.example.com")
    assert found.name == access.identify("spiffe://x/jfk").name == "jfk"
    for nobody in ("", "jfk", "example.com", "jfk.example.com.", "\x1b"):
        with pytest.raises(NotAuthenticated, match="belongs to no principal"):
            access.identify(nobody)
    access_file.revoke(path, identity="Jfk.Example.com")
    clock.pass_(2)
    for call in (lambda: access.identify("jfk.example.com"), lambda: access.renewed(found)):
        with pytest.raises(NotAuthenticated, match="is revoked"):
            call()
    with pytest.raises(NotAuthenticated):
        access.check_identity("JFK.example.com")
    access.check_identity("spiffe://x/jfk")
    assert access.identify("spiffe://x/jfk").name == "jfk"


def test_a_credential_of_another_user_renews_no_peer(path: Path, clock: StoppedClock) -> None:
    write(path, '[[principals]]\nname = "a"\ncertificates = ["c"]\n')
    access = Access.load(path)
    found = access.identify("c")
    write(path, '[[principals]]\nname = "b"\ncertificates = ["c"]\n')
    clock.pass_(2)
    with pytest.raises(NotAuthenticated, match="now belongs to b"):
        access.renewed(found)


# The file.


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o644, 0o666])
def test_a_file_to_which_others_have_any_right_is_refused(path: Path, mode: int) -> None:
    write(path, "[quota]", mode)
    with pytest.raises(AccessError, match=rf"mode {mode:o}\); chmod 600 {path}"):
        Access.load(path)
    path.chmod(0o400)
    Access.load(path)


class Nobody(Port):
    def user_id(self) -> int:
        return 65534


def test_a_file_of_another_user_is_refused(path: Path) -> None:
    write(path, "")
    with system.replaced(Nobody()), pytest.raises(AccessError, match="not to user 65534"):
        Access.load(path)


def test_what_is_no_regular_file_or_not_there_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for odd in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(AccessError, match="not a regular file"):
            Access.load(odd)
    with pytest.raises(FileNotFoundError):
        Access.load(tmp_path / "none")
    (tmp_path / "large").touch(0o600)
    os.truncate(tmp_path / "large", private.LARGEST + 1)
    with pytest.raises(AccessError, match="larger than"):
        Access.load(tmp_path / "large")


def test_a_link_is_followed_and_what_it_points_to_is_checked(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    write(path, "", 0o644)
    with pytest.raises(AccessError):
        Access.load(tmp_path / "link")
    path.chmod(0o600)
    give(tmp_path / "link", "jfk")
    assert (tmp_path / "link").is_symlink()
    assert "jfk" in path.read_text()


WRONG = {
    "misspelt": '[[principals]]\nname = "a"\ndenied = ["b"]',
    "unknown role": '[[principals]]\nname = "a"\nrole = "root"',
    "no name": '[[principals]]\nrole = "admin"',
    "bad name": '[[principals]]\nname = "../a"',
    "dotted name": '[[principals]]\nname = "a.1.000"',
    "bad pattern": '[[principals]]\nname = "a"\nread = ["b*c"]',
    "empty pattern": '[[principals]]\nname = "a"\ndeny = [""]',
    "pattern is no list": '[[principals]]\nname = "a"\nread = "b"',
    "name twice": '[[principals]]\nname = "a"\n[[principals]]\nname = "a"',
    "certificate twice": '[[principals]]\nname = "a"\ncertificates = ["x"]\n[[principals]]\nname = "b"\ncertificates = ["X"]',
    "empty certificate": '[[principals]]\nname = "a"\ncertificates = [""]',
    "token of nobody": f'[[tokens]]\nprincipal = "a"\nid = "00000000"\nsha256 = "{"0" * 64}"',
    "token twice": '[[principals]]\nname = "a"\n' + f'[[tokens]]\nprincipal = "a"\nid = "00000000"\nsha256 = "{"0" * 64}"\n' * 2,
    "bad id": f'[[principals]]\nname = "a"\n[[tokens]]\nprincipal = "a"\nid = "x"\nsha256 = "{"0" * 64}"',
    "bad hash": '[[principals]]\nname = "a"\n[[tokens]]\nprincipal = "a"\nid = "00000000"\nsha256 = "0"',
    "revoked nothing": "[[revoked]]",
    "revoked both": '[[revoked]]\ntoken = "00000000"\nidentity = "a"',
    "revoked no id": '[[revoked]]\ntoken = "jfk"',
    "unknown quota": '[quota]\nbites = "1GiB"',
    "bad quota": '[quota]\nbytes = "much"',
    "no rate": "[quota]\nrate = 0",
    "negative quota": '[[principals]]\nname = "a"\nquota = { shards = -1 }',
    "no TOML": "[[",
    "no text": "\udcff",
    "deep": "a = " + "[" * 20000,
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_a_file_that_says_something_wrong_is_refused_by_name(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(AccessError, match=str(path)):
        Access.load(path)


@given(st.binary(max_size=200))
def test_no_bytes_of_a_file_do_anything_but_parse_or_fail(data: bytes) -> None:
    try:
        access_file.parse(data)
    except ValueError:
        pass


def test_a_quota_is_its_own_or_that_of_all(path: Path) -> None:
    write(
        path,
        '[[principals]]\nname = "a"\nquota = { bytes = "10GiB", rate = "20MB", shards = 64, connections = 8 }\n'
        '[[principals]]\nname = "b"\n[quota]\nbytes = 1000\n',
    )
    assert _with_token(path, "a").quota == Quota(bytes=10 << 30, rate=20_000_000, shards=64, connections=8)
    assert _with_token(path, "b").quota == Quota(bytes=1000)
    write(path, '[[principals]]\nname = "b"\n')
    assert _with_token(path, "b").quota == UNLIMITED


# Reading it again.


def test_a_change_holds_after_a_second_and_the_file_is_looked_at_once_a_second(path: Path) -> None:
    class Counting(StoppedClock):
        looks = 0

        def look_up(self, path: str | os.PathLike[str]) -> os.stat_result | None:
            self.looks += 1
            return super().look_up(path)

    token = give(path, "jfk")
    clock = Counting()
    with system.replaced(clock):
        access = Access.load(path)
        other = Token.make()
        write(path, path.read_text() + f'[[tokens]]\nprincipal = "jfk"\nid = "{other.id}"\nsha256 = "{other.digest}"\n')
        for _ in range(50):
            with pytest.raises(NotAuthenticated):
                access.authenticate(other.reveal())
        assert clock.looks == 0
        clock.pass_(1)
        for _ in range(50):
            assert access.authenticate(other.reveal()).name == access.authenticate(token.reveal()).name == "jfk"
        assert clock.looks == 1
        for looks in (2, 3, 4):
            clock.pass_(5)
            for _ in range(50):
                access.authenticate(token.reveal())
            assert clock.looks == looks


def test_two_changes_within_a_tick_of_the_file_systems_clock_are_both_seen(path: Path) -> None:
    class Coarse(StoppedClock):
        """A file system whose times do not move."""

        def look_up(self, path: str | os.PathLike[str]) -> os.stat_result | None:
            status = super().look_up(path)
            return None if status is None else self._at_one_time(status)

        def status(self, fd: int) -> os.stat_result:
            return self._at_one_time(super().status(fd))

        def _at_one_time(self, status: os.stat_result) -> os.stat_result:
            return os.stat_result(tuple(status), {"st_mtime_ns": self._began, "st_ctime_ns": self._began})

    with system.replaced(Coarse()) as clock:
        assert isinstance(clock, Coarse)
        write(path, '[[principals]]\nname = "a"\ncertificates = ["c"]\n')
        access = Access.load(path)
        write(path, '[[principals]]\nname = "b"\ncertificates = ["c"]\n')
        clock.pass_(1)
        assert access.identify("c").name == "b"


@pytest.mark.parametrize("damage", ["broken", "gone", "readable"])
def test_a_file_that_became_bad_changes_nothing_and_says_so_once(
    path: Path, clock: StoppedClock, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    token = give(path, "jfk")
    good = path.read_text()
    access = Access.load(path)
    if damage == "broken":
        write(path, good + "[[tokens")
    elif damage == "gone":
        path.unlink()
    else:
        path.chmod(0o644)
    with caplog.at_level(logging.INFO, "kvspool.hub"):
        for _ in range(5):
            clock.pass_(1)
            assert access.authenticate(token.reveal()).name == "jfk"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert access.error is not None and str(path) in access.error
    write(path, good)
    other = give(path, "lga")
    clock.pass_(1)
    assert access.authenticate(other.reveal()).name == "lga"
    assert access.error is None


def test_threads_see_the_state_before_or_after_a_change_and_nothing_between(path: Path) -> None:
    tokens = [give(path, "jfk") for _ in range(4)]
    access = Access.load(path)
    failures: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                assert {access.authenticate(token.reveal()).name for token in tokens} == {"jfk"}
                access._looks_at = 0.0  # look at each call
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        give(path, "lga")
    is_over.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert access.error is None


# Editing it.


def test_what_a_person_wrote_stays_as_it_is(path: Path) -> None:
    text = '# ours\n[[principals]]  # New York\nname = "jfk"\nread = ["lga"]'
    write(path, text)
    token = give(path, "jfk")
    access_file.revoke(path, token=token.id)
    assert path.read_text().startswith(text + "\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(path.parent.iterdir()) == [path]


def test_other_rights_of_a_principal_that_is_there_are_refused(path: Path) -> None:
    give(path, "jfk", "client", ("lga",))
    give(path, "jfk", "client", ("lga",))
    before = path.read_text()
    for arguments in (("admin",), ("client", ("*",)), (None, ("*",))):
        with pytest.raises(ValueError, match="other rights"):
            give(path, "jfk", *arguments)
    for name in ("j.fk", "", "../x"):
        with pytest.raises(ValueError):
            give(path, name)
    with pytest.raises(ValueError):
        give(path, "new", "client", ('"]\nrole = "admin',))
    for unknown in ("ffffffff", "x"):
        with pytest.raises(ValueError):
            access_file.revoke(path, token=unknown)
    with pytest.raises(ValueError):
        access_file.revoke(path, identity='a"\n[[principals]]')
    assert path.read_text() == before


def test_a_file_to_whose_end_nothing_can_be_added_says_how_to_write_it(path: Path) -> None:
    write(path, 'principals = [{ name = "a" }]\n')
    with pytest.raises(AccessError, match=r"write its lists as \[\[principals\]\]"):
        give(path, "b")
    assert path.read_text() == 'principals = [{ name = "a" }]\n'


def test_editors_at_once_lose_nothing(path: Path) -> None:
    threads = [threading.Thread(target=give, args=(path, f"c{at}")) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.name for one in access_file.read(path).principals) == sorted(f"c{at}" for at in range(8))


def test_the_wait_for_an_editor_that_never_ends_is_bounded(path: Path, clock: StoppedClock) -> None:
    with private._alone(path.parent), pytest.raises(LockTimeout):
        give(path, "jfk")


def test_an_edit_that_fails_at_any_call_leaves_the_file_whole_and_nothing_else(path: Path) -> None:
    give(path, "jfk")
    before = path.read_bytes()

    class Failing(Port):
        left = 0

        def _count(self) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(5, "broken")

        def write(self, fd: int, data: bytes | bytearray, at: int) -> None:
            self._count()
            super().write(fd, data, at)

        def flush(self, fd: int) -> None:
            self._count()
            super().flush(fd)

        def set_mode(self, fd: int, mode: int) -> None:
            self._count()
            super().set_mode(fd, mode)

        def rename(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
            self._count()
            super().rename(source, target)

    for at in range(1, 5):
        port = Failing()
        port.left = at
        with system.replaced(port), pytest.raises(OSError, match="broken"):
            give(path, "lga")
        assert path.read_bytes() == before
        assert sorted(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "\n", "# to be written\n"])
def test_an_empty_file_is_an_error_and_changes_no_rights(path: Path, clock: StoppedClock, text: str) -> None:
    with pytest.raises(AccessError, match="is empty: it names no principal"):
        Access.load(write(path, text))
    token = give(path, "jfk")  # an empty file may be filled
    access = Access.load(path)
    write(path, text)
    clock.pass_(2)
    assert access.authenticate(token.reveal()).name == "jfk"
    assert "is empty" in str(access.error)
    write(path, '[[revoked]]\nidentity = "jfk"\n')  # no principal on purpose
    clock.pass_(2)
    with pytest.raises(NotAuthenticated):
        access.authenticate(token.reveal())
    assert access.error is None
