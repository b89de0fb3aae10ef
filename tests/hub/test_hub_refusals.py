"""Wrong uses of the commands of shard sets, hubs, shippers and tables: each ends with its code and one sentence, and changes no file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import Row, Run, table

import hub
import kvspool
import shard
from hub.security.authority import make_authority, make_client
from kvspool.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a hub root, a shard set, a log, an authority, two access files, a file, and roots with missing shards."""
    place = tmp_path_factory.mktemp("place")
    for name in ("root", "without"):
        with hub.create(place / name) as root:
            root.create_client("jfk", bits=2, capacity=4096).close()
    shard.create(place / "set", bits=2, capacity="64KiB").close()
    shard.create(place / "sets", bits=0, prefix="p", capacity=4096).close()
    shard.create(place / "sets", bits=0, prefix="q", capacity=4096).close()
    shard.create(place / "three", bits=2, capacity=4096).close()
    kvspool.create(place / "log", capacity=4096).close()
    shutil.rmtree(place / "without" / "jfk.2.001")
    shutil.rmtree(place / "three" / "2.001")
    make_authority(place / "pki", ["hub.example.com"])
    make_client(place / "pki", "jfk")
    assert main(["hub", "token", "add", str(place / "access.toml"), "--name", "a", "--output", str(place / "token")]) == 0
    for name in ("loose.toml", "loose.token"):
        (place / name).write_text("")
        (place / name).chmod(0o644)
    (place / "file").write_text("no")
    return place


ADD = "hub token add access.toml --name"
SERVE = "hub serve --root root --no-page --listen"
SHIP = "ship log grpc://127.0.0.1:1 --client a"
TLS = "ship log grpc+tls://127.0.0.1:1 --client a"
REFUSED = {
    # Shard sets.
    "no command of shard sets": ("shard", 2, "create"),
    "more bits than ten": ("shard create x --bits 11", 2, "a whole number from 0 to 10, not '11'"),
    "bits that are a word": ("shard create x --bits two", 2, "a whole number from 0 to 10, not 'two'"),
    "a set without bits": ("shard create x", 2, "--bits"),
    "a prefix that is a path": ("shard create x --bits 1 --prefix ../x", 2, "a prefix may have only the characters"),
    "a prefix with a line end": ("shard create x --bits 1 --prefix 'p\n'", 2, "a prefix may have only the characters"),
    "one shard without a name": ("shard create x --bits 0", 2, "a single shard without bits needs a prefix"),
    "a capacity of nothing": ("shard create x --bits 1 --capacity 0", 2, "a capacity is 4096 bytes to"),
    "a capacity that is a word": ("shard create x --bits 1 --capacity big", 2, "a size is a number with a unit"),
    "a mode that is not octal": ("shard create x --bits 1 --mode 9", 2, "a mode is octal digits"),
    "a mode with rights that logs don't have": ("shard create x --bits 1 --mode 777", 2, "mode is 0o600 with rights for others added"),
    "creating a set again": ("shard create set --bits 2", 3, "has a shard set with prefix '' already"),
    "creating a set with other bits": ("shard create set --bits 3", 4, "has 2 bits already, not 3"),
    "one of several sets": ("shard append sets", 2, "several shard sets; give a prefix: 'p', 'q'"),
    "a set of another prefix": ("shard append set --prefix q", 3, "q"),
    "keys of lines that are no JSON": ("shard append set --key-field k", 2, "--json-lines"),
    "a shard without a name": ("shard of k --bits 0", 2, "needs a prefix"),
    "a set without one of its shards": ("read three", 4, "1 of the 4 shards of prefix '' are missing: 2.001"),
    "a sequence of a set": ("get set 1", 2, "no common sequence"),
    "a start of a set at a sequence": ("read set --start 1", 2, "no common sequence"),
    "an end of a set at a sequence": ("read set --end 1", 2, "no common sequence"),
    # Hub roots.
    "no command of hubs": ("hub", 2, "clients"),
    "creating a root again": ("hub create root", 3, "exists already"),
    "creating a root in no directory": ("hub create none/a", 1, "none is not a directory; create it first"),
    "clients of what doesn't exist": ("hub clients none", 3, "none"),
    "clients of a file": ("hub clients file", 4, "file"),
    "a client without one of its shards": ("hub clients without", 4, "jfk.2.001"),
    "rules of what doesn't exist": ("hub retention none", 3, "none"),
    "a floor without another rule": ("hub retention root --floor 3", 2, "a floor or --force alone removes nothing"),
    "ages by record without an age": ("hub retention root --by-record", 2, "--by-record"),
    "rules, and none": ("hub retention root --none --max-bytes 1", 2, "--none"),
    "rules of a client that can't be": ("hub retention root --client a/b --none", 2, "a/b"),
    "forgetting rules that aren't there": ("hub retention root --client x --forget", 2, "x"),
    "trimming by no rule": ("hub trim root", 2, "kvspool hub retention"),
    "trimming an unknown client": ("hub trim root --client lga --max-bytes 1", 2, "lga"),
    "verifying an unknown client": ("hub verify root --client nobody", 2, "nobody"),
    "a page that doesn't answer": ("hub stats http://127.0.0.1:1", 9, "doesn't answer"),
    "a page at an address that is none": ("hub stats 'http://127.0.0.1:1/a b'", 9, "is that the page"),
    "deleting a reader that isn't there": ("hub readers root --delete spark", 2, "no reader"),
    "deleting it, with a next step": ("hub readers root --delete spark", 2, "of a hub root `kvspool hub readers`, lists them"),
    "rules of clients with a space": ("hub retention root --client 'x y' --max-bytes 1", 2, "a client's id may have only the characters"),
    "a log as a root": ("hub stats log", 4, "is one log, not a hub root; `kvspool stats` shows it"),
    "a page at a port without one": ("hub stats http://127.0.0.1:1", 9, "doesn't answer: Connection refused; is that the page"),
    "a hub that isn't there, once": ("hub status grpc://127.0.0.1:1 --copies 3", 2, "--copies is at most the number of hubs, 1, not 3"),
    "copies that are a word": ("hub status grpc://127.0.0.1:1 --copies x", 2, "a whole number of at least 1, not 'x'"),
    "a reader with a name that is a path": ("hub readers root --delete ../x", 2, "a reader's name"),
    # Tokens and certificates.
    "no command of tokens": ("hub token", 2, "Examples:"),
    "a token for a name that is a path": (f"{ADD} ../x", 2, "x"),
    "a token for a name with a dot": (f"{ADD} a.b", 2, "a.b"),
    "a token to read a pattern that is none": (f"{ADD} b --read b*c", 2, "b*c"),
    "a token of an unknown role": (f"{ADD} b --role root", 2, "--role"),
    "a token with other rights": (f"{ADD} a --role reader", 2, "other rights"),
    "a token to a file that exists": (f"{ADD} b --output file", 2, "already exists"),
    "a token in no directory": ("hub token add none/a --name a", 1, "none"),
    "a token in a file of others": ("hub token add loose.toml --name a", 3, "chmod 600"),
    "an unknown token": ("hub token revoke access.toml ffffffff", 2, "ffffffff"),
    "no token": ("hub token revoke access.toml", 2, "--identity"),
    "a token of no file": ("hub token revoke none ffffffff", 1, "none"),
    "no command of certificates": ("hub certificate", 2, "Examples:"),
    "a certificate for a name with a space": ("hub certificate init new --name 'a b'", 2, "a b"),
    "a certificate for no name": ("hub certificate init new", 2, "--name"),
    "a certificate for no day": ("hub certificate init new --name a --days 0", 2, "--days"),
    "a certificate of no authority": ("hub certificate client new jfk", 1, "new"),
    "a certificate for a client that is a path": ("hub certificate client new ../jfk", 2, "jfk"),
    "an authority again": ("hub certificate init pki --name x", 3, "already exists"),
    "a server's certificate again": ("hub certificate server pki --name x", 3, "already exists"),
    "a client's certificate again": ("hub certificate client pki jfk", 3, "already exists"),
    "a certificate that is none": ("hub certificate show file", 3, "no certificate in PEM"),
    # Servers and shippers.
    "plain text for other hosts, of IPv4": (f"{SERVE} 0.0.0.0:0 --access access.toml", 2, "there; kvspool hub certificate init makes one"),
    "plain text for other hosts, of IPv6": (f"{SERVE} [::]:0 --access access.toml", 2, "there; kvspool hub certificate init makes one"),
    "no authentication of other hosts, of IPv4": (f"{SERVE} 0.0.0.0:0 --anonymous", 2, "can be reached from elsewhere"),
    "no authentication of other hosts, of IPv6": (f"{SERVE} [::]:0 --anonymous", 2, "can be reached from elsewhere"),
    "a level of a shipper": (f"{SHIP} --level disk", 2, "hub serve --level"),
    "shipping without an id": ("ship log grpc://127.0.0.1:1", 2, "client's id"),
    "two logs of one id": ("ship a=log a=log grpc://127.0.0.1:1", 2, "same id"),
    "a hub that is none": ("ship log http://x --client a", 2, "a hub is grpc"),
    "clients of a shipper": (f"{SHIP} --only b", 2, "--only"),
    "shipping from hub to hub": ("ship grpc://127.0.0.1:1 grpc://127.0.0.1:2", 2, "one root"),
    "shipping what doesn't exist": ("ship none grpc://127.0.0.1:1 --client a", 3, "does not exist"),
    "a hub for nobody": (f"{SERVE} 127.0.0.1:0", 2, "one of --access or --anonymous is missing; kvspool hub serve --help has examples"),
    "shipping with a token that isn't there": (f"{SHIP} --token-file none", 2, "none can't be read (No such file or directory); check"),
    "shipping with a token of others": (f"{SHIP} --token-file loose.token", 2, "chmod 600"),
    "shipping with an authority that is none": (f"{TLS} --ca file", 2, "file can't be used for TLS"),
    "shipping with a key of another certificate": (f"{TLS} --certificate pki/clients/jfk.pem --key pki/ca.key", 2, "used for TLS"),
    "shipping to more hubs than there are": (f"{SHIP} --copies 2", 2, "as many copies as hubs are possible, at least one: 2 are wanted"),
    "shipping to no hub": (f"{SHIP} --copies 0", 2, "a whole number of at least 1, not '0'"),
    "the state of no shipper": ("ship status", 2, "ship status needs the ADDRESS of a shipper"),
    # Tables.
    "a log as a table": ("table log", 3, "is not a Delta table: it has no _delta_log; give another path"),
    "a table without a source": ("table append new", 2, "table append needs SOURCE and PATH; kvspool table --help"),
    "a table that doesn't exist": ("table none", 3, "none does not exist; kvspool table append SOURCE PATH and pipelines create tables"),
}


@table(REFUSED)
def test_a_wrong_use_ends_with_its_code_and_one_sentence_and_changes_no_file(place: Path, row: Row, run: Run) -> None:
    row.check_refusal(run, place)
