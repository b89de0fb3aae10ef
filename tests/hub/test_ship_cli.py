"""`kvspool hub serve` and `kvspool ship`: shipping, pulling, signals, wrong words. Commands that end unsignalled run in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from processes_of_a_hub import ServeCommand

import hub
import kvspool
import shard
from shard import route

KVSPOOL = [sys.executable, "-m", "kvspool.cli"]


class Hub(ServeCommand):
    """`kvspool hub serve`, ended by a signal."""

    def __init__(self, root: Path, *words: str | Path) -> None:
        super().__init__(root, "--least-free", "1MiB", *words)

    def end(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        assert self.process.returncode == (0 if number == signal.SIGTERM else -number)
        return errors


@pytest.fixture
def anonymous(tmp_path: Path) -> Iterator[Hub]:
    served = Hub(tmp_path / "root", "--anonymous")
    yield served
    served.end()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Hub]:
    served = Hub(tmp_path / "second", "--anonymous")
    yield served
    served.end()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    with kvspool.create(tmp_path / "events", capacity="1MiB") as made:
        made.append_many([f"record {number}" for number in range(100)])
    return tmp_path / "events"


def received(root: Path) -> list[tuple[str, int, int, bytes]]:
    with hub.open(root) as found:
        return sorted((record.client, record.shard, record.sequence, record.value) for record in found.read())


def test_a_log_and_a_shard_set_are_shipped_and_pulled_again(anonymous: Hub, log: Path, tmp_path: Path, run: Run) -> None:
    with shard.create(tmp_path / "set", bits=1, capacity="1MiB") as made:
        made.append_many([b"one", b"two"], keys=[b"1", b"2"])
    run("ship", f"web={log}", f"set={tmp_path / 'set'}", anonymous.location, "--once")
    there = received(tmp_path / "root")
    assert len(there) == 102 and {client for client, *_ in there} == {"web", "set"}
    assert "0 left" in run("ship", log, anonymous.location, "--client", "web", "--once").err
    assert received(tmp_path / "root") == there
    run("ship", anonymous.location, tmp_path / "mirror", "--once")
    assert received(tmp_path / "mirror") == there
    run("ship", anonymous.location, tmp_path / "part", "--once", "--only", "we*")
    assert {client for client, *_ in received(tmp_path / "part")} == {"web"}


@pytest.mark.parametrize("level", ["process", "disk"])
def test_a_mirror_at_the_level_disk_has_flushed_what_it_counts_as_pulled(
    anonymous: Hub, log: Path, tmp_path: Path, level: str, run: Run
) -> None:
    run("ship", f"web={log}", anonymous.location, "--once")
    run("ship", anonymous.location, tmp_path / "mirror", "--once", "--level", level)
    assert received(tmp_path / "mirror") == received(tmp_path / "root")
    with kvspool.open(tmp_path / "mirror" / route.directory_name("web", 0, 0)) as pulled:
        assert pulled.stats().synced_sequence == (100 if level == "disk" else 0)


@pytest.mark.parametrize("format", ["spool", "kvj"])
def test_a_log_that_moved_to_another_hub_lost_nothing_and_is_rid_of_the_first_ones_reader(
    anonymous: Hub, second: Hub, tmp_path: Path, format: Any, run: Run
) -> None:
    """The words of docs/shipping.md name the reader."""
    path = tmp_path / "events"
    with kvspool.create(path, format=format) as log:
        log.append_many([b"one", b"two"])
        run("ship", path, anonymous.location, "--client", "web", "--once")
        log.append(b"three")
        said = run("ship", path, second.location, "--client", "web", "--once").err
        assert "web: 1 record," in said and "lost" not in said
        words = f"printf %s {anonymous.location} | sha256sum | cut -c1-12"
        old = "ship." + subprocess.run(words, shell=True, capture_output=True, text=True, check=True).stdout.strip()
        assert len(log.readers()) == 2
        run("readers", path, "--delete", old)
        assert [reader.sequence for reader in log.readers()] == [3]
        log.append(b"four")
        run("ship", path, second.location, "--client", "web", "--once")
    with hub.open(tmp_path / "second") as found:
        assert [record.sequence for record in found.read(on_gap="skip")] == [2, 3]


def test_a_shipper_ends_at_a_signal_with_all_acknowledged(anonymous: Hub, log: Path, tmp_path: Path) -> None:
    words = ["ship", str(log), anonymous.location, "--client", "web", "--json", "--interval", "0.05"]
    with subprocess.Popen([*KVSPOOL, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        status = next(found for found in map(json.loads, process.stdout) if found["sent"] == 100 and not found["behind"])
        assert (status["client"], status["state"], status["lost"]) == ("web", "connected", 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert len(received(tmp_path / "root")) == 100


def test_a_secure_hub_lets_in_who_has_a_token(log: Path, tmp_path: Path, run: Run) -> None:
    run("hub", "certificate", "init", tmp_path / "pki", "--name", "127.0.0.1", "--name", "localhost")
    run("hub", "token", "add", tmp_path / "access.toml", "--name", "web", "--output", tmp_path / "token")
    pki, token = tmp_path / "pki", ["--token-file", tmp_path / "token"]
    files = ["--certificate", pki / "server.pem", "--key", pki / "server.key"]
    served = Hub(tmp_path / "root", "--access", tmp_path / "access.toml", *files)
    assert served.location.startswith("grpc+tls://")
    secure = ["--once", "--ca", pki / "ca.pem"]
    run("ship", log, served.location, "--client", "web", *secure, *token)
    assert len(received(tmp_path / "root")) == 100
    # The id of another client, and a missing token: both are tried again until a signal ends the command.
    cases = (["--client", "other", *token], "web may not write other"), (["--client", "web"], "refused access")
    for words, reason in cases:
        refused = subprocess.Popen(
            [*KVSPOOL, *map(str, ["ship", log, served.location, *words, *secure])], stderr=subprocess.PIPE, text=True
        )
        assert refused.stderr is not None
        assert reason in refused.stderr.readline()
        refused.terminate()
        refused.communicate(timeout=30)
    assert len(received(tmp_path / "root")) == 100
    log_of_the_hub = served.end()
    assert "authentication failed" in log_of_the_hub and (tmp_path / "token").read_text().strip() not in log_of_the_hub


def test_a_root_that_another_hub_serves_is_refused(anonymous: Hub, tmp_path: Path, run: Run) -> None:
    serve = ["hub", "serve", "--root", tmp_path / "root", "--no-page", "--anonymous", "--listen", "127.0.0.1:0"]
    assert "another hub serves" in run(*serve, code=9).err


def test_a_conflict_ends_the_command_with_its_code(anonymous: Hub, log: Path, tmp_path: Path, run: Run) -> None:
    run("ship", log, anonymous.location, "--client", "web", "--once")
    with kvspool.create(tmp_path / "other", capacity="1MiB") as other:
        other.append(b"of another log")
    run("ship", tmp_path / "other", anonymous.location, "--client", "web", "--once")
    fenced = run("ship", log, anonymous.location, "--client", "web", "--once", code=9).err
    assert "another log has replaced this one" in fenced
    assert len(received(tmp_path / "root")) == 101


def test_grpc_prints_no_lines_of_its_own(anonymous: Hub) -> None:
    location = anonymous.location.replace("grpc://", "grpc+tls://")
    done = subprocess.run([*KVSPOOL, "hub", "status", location], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"kvspool: {location} doesn't answer: it doesn't use TLS; check the port, or use grpc://\n"
