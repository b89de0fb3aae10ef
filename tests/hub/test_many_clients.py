"""A slice of tools/faults/many_clients: many clients at one hub, alone, alongside slow and hostile ones, and after its restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "faults" / "many_clients"
CLIENTS, SHARDS = 20, 4

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="networks are tested with the compiled twin")


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run the campaign once; return what each phase has found."""
    folder = tmp_path_factory.mktemp("many")
    command = [sys.executable, str(TOOL), "--clients", str(CLIENTS), "--shards", str(SHARDS), "--processes", "2", "--seconds", "0.3"]
    done = subprocess.run([*command, "--directory", str(folder), "--json"], capture_output=True, text=True, timeout=85)
    assert done.returncode == 0, done.stderr + done.stdout
    return {found["phase"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_every_client_is_served_alone_and_next_to_hostile_ones(phases: dict[str, dict[str, Any]]) -> None:
    for phase in ("load", "hostile"):
        assert phases[phase]["least"] > 0
        assert phases[phase]["outages"] == 0, phases[phase]["errors"]


def test_the_hub_has_each_record_once_and_in_order(phases: dict[str, dict[str, Any]]) -> None:
    assert phases["drain"]["wrong"] == []
    assert phases["drain"]["records"] >= CLIENTS * SHARDS


def test_threads_of_the_hub_are_few_whatever_its_calls(phases: dict[str, dict[str, Any]]) -> None:
    workers, others = 8 + 16, 16  # the listener, the housekeeping, and those of Arrow and gRPC, which vary
    assert phases["hostile"]["hub_threads"] <= workers + others


def test_silence_costs_no_connection(phases: dict[str, dict[str, Any]]) -> None:
    assert phases["idle"]["outages"] == 0
    assert phases["idle"]["most"] == 0, "no client sent anything"


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    """Let a crowd come and come back once; return what each phase has found, in order."""
    folder = tmp_path_factory.mktemp("crowd")
    command = [sys.executable, str(TOOL), "--crowd", "--clients", str(CLIENTS), "--shards", str(SHARDS), "--processes", "2"]
    command += ["--seconds", "0.3", "--rest", "0", "--directory", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    return [(found["phase"], found) for found in map(json.loads, done.stdout.splitlines())]


def test_a_crowd_is_served_and_again_after_the_hub_was_killed(crowd: list[tuple[str, dict[str, Any]]]) -> None:
    assert [phase for phase, _ in crowd] == ["connect", "idle", "list", "restart", "idle", "list", "load", "drain"]
    assert dict(crowd)["load"]["least"] > 0
    assert dict(crowd)["drain"]["wrong"] == []
    assert dict(crowd)["drain"]["records"] >= 2 * CLIENTS * SHARDS


def test_every_shard_is_listed_before_and_after_a_restart(crowd: list[tuple[str, dict[str, Any]]]) -> None:
    assert [found["shards"] for phase, found in crowd if phase == "list"] == [CLIENTS * SHARDS] * 2
