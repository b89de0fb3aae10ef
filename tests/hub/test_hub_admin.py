"""The queries of operators to a hub: counts of a root and of a page, verification, retention rules; and the status of a server."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import hub_statuses as statuses
import msgspec
import pytest
from clocks import StoppedClock
from commands import Run

import hub
import kvspool
import shard
from hub.cli import serve
from hub.root import retention
from hub.security.access import Access
from hub.server.limits import Limits, Reason
from hub.server.server import HubServer
from hub.web.page import HubPage
from kvspool import system
from kvspool.journal import Retention

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a client of two shards, whose journals have small segments, and a reader that has read a part."""
    path = tmp_path / "root"
    with hub.create(path) as opened:
        with opened.create_client("jfk", bits=1, format="kvj", segment_bytes=8192) as shards:
            for at in range(400):
                shards.append(b"%0100d" % at, key=b"%d" % at)
        with opened.reader("spark") as reader:
            for _ in reader.read(limit=300):
                pass
            reader.commit()
    return path


def give_generations(root: Path, *bases: int) -> Path:
    """Let the first shard be one to which logs were shipped."""
    table = root / "jfk.1.000" / "generations.json"
    table.write_text(json.dumps([{"log": f"{number:032x}", "base": base} for number, base in enumerate(bases)]))
    table.chmod(0o600)
    return table


# Counts.


def test_stats_of_a_root(root: Path, run: Run) -> None:
    give_generations(root, 0, 10)
    out = run("hub", "stats", root).out
    assert "1 client, 2 shards, 400 records" in out
    (line,) = [line for line in out.splitlines() if "jfk" in line]
    assert re.split(r"\s{2,}", line.strip())[:3] == ["jfk", "2", "400"]
    assert re.split(r"\s{2,}", line.strip())[4:8] == ["2", "-", "-", "-"]
    assert "spark" in out
    assert "jfk 1" in run("hub", "stats", root, "--shards").out
    (found,) = run("hub", "stats", root, "--json").objects
    assert [one["generations"] for one in found["clients"][0]["shards"]] == [2, 0]
    assert found["readers"] == [{"name": "spark", "lag": 100}]
    assert "generations" in run("hub", "clients", root).out


def test_stats_of_a_hub_that_runs_come_from_its_page(run: Run) -> None:
    client = statuses.client("jfk", shards=[statuses.shard(0, lost=7, behind=-1), statuses.shard(1, behind=5)], quota_bytes=1 << 30)
    told = statuses.Told(statuses.hub([client], readers=[statuses.ReaderStatus(name="spark", lag=12)]))
    with HubPage(told) as page:
        (found,) = run("hub", "stats", page.url, "--json").objects
        assert found["readers"] == [{"name": "spark", "lag": 12}]
        assert [(one["lost"], one["behind"], one["generations"]) for one in found["clients"][0]["shards"]] == [(7, None, 2), (0, 5, 2)]
        assert "of 1.0 GiB" in run("hub", "stats", page.url).out
    told = statuses.Told(statuses.hub([client], error="it has a cold"))
    with HubPage(told) as page:
        assert "it has a cold" in run("hub", "stats", page.url, code=1).err


@pytest.mark.parametrize("answer", [b"\x00\x00\x12\x04\x00\x00", b"SSH-2.0-OpenSSH_9.2p1\r\n", b""])
def test_stats_from_a_port_that_is_no_page_are_an_error_with_a_word_of_advice(answer: bytes, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        said = run("hub", "stats", f"http://127.0.0.1:{listener.getsockname()[1]}", code=9)
        thread.join()
    assert "is that the page printed by kvspool hub serve?" in said.err


# Rules and trims.


def test_rules_are_shown_and_changed(root: Path, run: Run) -> None:
    command = ["hub", "retention", str(root)]
    assert run(*command).out == "all records are kept\n"
    run(*command, "--max-age", "30d", "--floor", "records:10")
    assert run(*command, "--client", "jf*", "--max-bytes", "1MiB", "--json").object["jf*"] == {"max_bytes": 1 << 20}
    assert run(*command, "--client", "jfk").out == "jfk: up to 1.0 MiB\n"
    assert "nothing older than 30.0 d, but keeps at least 10 records of each shard" in run(*command, "--client", "lga").out
    shown = run(*command, "--client", "ewr", "--max-age", "1d", "--by-record").out
    assert "nothing older than 24.0 h by its timestamps" in " ".join(shown.split())
    run(*command, "--client", "ewr", "--forget")
    run(*command, "--client", "jf*", "--forget")
    run(*command, "--client", "jfk", "--none")
    assert retention.load(root).rules.keys() == {"*", "jfk"}
    assert retention.load(root).of("jfk") == Retention()


def test_trim_says_what_would_go_and_why_and_then_does_it(root: Path, run: Run) -> None:
    command = ["hub", "trim", str(root)]
    out = run(*command, "--max-bytes", "0", "--dry-run").out
    assert "would go" in out
    assert "jfk has" in out
    assert "hub:spark" in out
    retention.change(root, lambda now: now.with_rules("*", Retention(by_consumers=True)))
    shards = run(*command, "--json").objects
    assert [(one["client"], one["shard"]) for one in shards] == [("jfk", 0), ("jfk", 1)]
    gone = sum(one["removed_records"] for one in shards)
    assert 0 < gone <= 300
    with hub.open(root) as opened:
        assert opened.stats().records == 400 - gone
        with opened.reader("spark") as reader:
            assert len(list(reader.read())) == 100
    assert "loses sequences" in run(*command, "--client", "jfk", "--max-bytes", "0", "--force").out


# Verify.


def test_verify_finds_all_sound_and_nothing_foreign(root: Path, run: Run) -> None:
    give_generations(root, 0, 3)
    assert run("hub", "verify", root).out.startswith("2 shards: 400 sound records")
    *shards, whole = run("hub", "verify", root, "--json").objects
    assert [one["report"]["foreign"] for one in shards] == [[], []]
    assert whole["is_sound"]


def damaged_segment(root: Path) -> None:
    with kvspool.open(root / "jfk.1.001") as log:
        path = log.segments_apart().path_of(log.bases()[0])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def bad_generations(root: Path) -> None:
    give_generations(root, 5, 3)


def generations_beyond_the_end(root: Path) -> None:
    give_generations(root, 0, 5000)


def bad_positions(root: Path) -> None:
    (root / ".hub" / "readers" / "spark.positions").write_text("rubbish")


def bad_rules(root: Path) -> None:
    retention.path_of(root).write_text("{")


def a_shard_is_missing(root: Path) -> None:
    shard.create(root, prefix="lga", bits=1, capacity=4096).close()
    for path in (root / "lga.1.000").iterdir():
        path.unlink()
    (root / "lga.1.000").rmdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damaged_segment, "jfk shard 1:"),
        (bad_generations, "generations.json"),
        (generations_beyond_the_end, "it has lost records"),
        (bad_positions, "spark.positions"),
        (bad_rules, "retention.json"),
        (a_shard_is_missing, "lga.1.000"),
    ],
)
def test_verify_finds(root: Path, run: Run, damage: Any, words: str) -> None:
    damage(root)
    assert words in run("hub", "verify", root, code=5).out


def test_verify_looks_at_the_access_file_too(root: Path, tmp_path: Path, run: Run) -> None:
    access = tmp_path / "access.toml"
    access.write_text("principals = 3")
    access.chmod(0o600)
    assert "access.toml" in run("hub", "verify", root, "--access", access, code=3).out


# The server.


@pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers are tested with the compiled twin")
def test_the_first_status_after_a_start_has_the_figures_of_idle_shards(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.server.server.FIRST_COUNT", 60.0)
    with HubServer(root, access=Access.anonymous(), listen=("127.0.0.1", 0), least_free=0) as server:
        (client,) = server.status().clients
        assert (client.client, client.stored) == ("jfk", 400) and client.used > 0


@pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers are tested with the compiled twin")
def test_figures_of_clients_that_take_long_are_described_less_often(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, seconds = StoppedClock(), [0], [0.0]
    with closing(HubServer(root, access=Access.anonymous(), listen=("127.0.0.1", 0), least_free=0)) as server, system.replaced(clock):
        server.store.count()
        sizes = server.store.sizes

        def slow() -> Any:
            asked[0] += 1
            clock.pass_(seconds[0])
            return sizes()

        monkeypatch.setattr(server.store, "sizes", slow)
        for _ in range(3):  # quick ones are described each time
            seconds[0] = 0.04
            assert [one.client for one in server._client_statuses()] == ["jfk"]
        assert asked == [3]
        seconds[0] = 0.5
        for _ in range(10):  # and those of half a second each ten seconds
            server._client_statuses()
            clock.pass_(1.0)
        assert asked == [4]
        server._client_statuses()
        assert asked == [5]


@pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="servers are tested with the compiled twin")
def test_a_server_s_status_has_readers_quotas_bits_and_every_cut(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = tmp_path / "access.toml"
    access.write_text('[[principals]]\nname = "jfk"\nquota = { bytes = "1GiB" }\n')
    access.chmod(0o600)
    with HubServer(root, access=Access.load(access), listen=("127.0.0.1", 0), least_free=0) as server:
        end = time.monotonic() + 30
        while not server.status().readers:  # the keeper looks at them when it has counted all shards
            assert time.monotonic() < end
            time.sleep(0.01)
        both = {"refused": {Reason.SHUTDOWN: 2, Reason.IDLE: 1}, "cut": {Reason.SHUTDOWN: 3}}
        stats = msgspec.structs.replace(server.listener.stats(), **both)
        monkeypatch.setattr(server.listener, "stats", lambda: stats)
        status = server.status()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.retention, "error", "what is to be kept can't be looked after")
            assert "looked after" in server.status().error
    (client,) = status.clients
    assert (client.client, client.bits, client.quota_bytes, client.stored) == ("jfk", 1, 1 << 30, 400)
    assert [(one.name, one.lag) for one in status.readers] == [("spark", 100)]
    assert status.cut == {Reason.SHUTDOWN: 5, Reason.IDLE: 1}
    assert status.error == ""


def test_limits_of_connections_are_given_by_name() -> None:
    given = serve.limits("idle-seconds=5,connections=7,received_bytes=1MiB")
    assert given == Limits(idle_seconds=5.0, connections=7, received_bytes=1 << 20)
    for wrong in ("idle=5", "connections=x", "connections=0", "received_bytes=much", ""):
        with pytest.raises(serve.argparse.ArgumentTypeError):
            serve.limits(wrong)
