"""Four writers, three readers, two durable ones, one small ring, SIGKILL and SIGSTOP: nothing acknowledged is lost, nothing is given
twice, every Gap is said, and no commit is forgotten.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from campaigns import run_storm
from loops import twin_names


@pytest.mark.parametrize("policy", ["overwrite", "block"])
@pytest.mark.parametrize("twin", twin_names())
def test_every_reader_accounts_for_every_sequence_while_writers_are_killed(tmp_path: Path, twin: str, policy: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    found = run_storm(Path(__file__).with_name("stress.py"), tmp_path, twin, seed, "0.7", policy)
    assert min(found["kills"], found["kills of durable readers"], found["stops"]) >= 3
    assert found["appended"] > 5 * found["kept"], "the ring was never far too small"
    assert found["acknowledged"] > 100
    assert found["read"] > 100
    assert policy == "block" or found["gaps"] > 0
