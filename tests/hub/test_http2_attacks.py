"""A slice of tools/faults/attacks: clients that mean harm, each next to one that doesn't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "faults" / "attacks"

pytest.importorskip("h2")
pytestmark = pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="networks are tested with the compiled twin")


@pytest.mark.parametrize("attack", ["streams", "resets", "unread", "halves", "handshakes", "control", "bombs", "crumbs"])
def test_an_attack_is_bounded_and_another_client_is_served(attack: str) -> None:
    command = [sys.executable, str(TOOL), "--count", "300", "--only", attack, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["guest_calls"] >= 5
