"""The models of readers, wake-ups and the append lock, searched exhaustively by Spin; and their mutants, which must be found wrong.

A model that no mutant breaks proves nothing, so the mutants are half of the proof: each leaves out one rule of `docs/format.md`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")),
    reason="NOT PROVEN HERE: the models need spin and gcc (on Debian or Ubuntu: sudo apt-get install spin gcc)",
)
MODELS = Path(__file__).parent
PROTOCOL = ["HEAD_LATE", "NO_RECHECK", "CHECK_EARLY", "NO_FENCE", "PLAIN_TAIL", "ONE_MARK"]
LOCK = ["NO_GENERATION", "NO_LOOK", "FREE_ANY"]
LOCK_WAITERS = ["NO_WAITERS", "NO_RECHECK", "FORGETFUL"]
WAKEUPS = ["NO_SECOND_LOOK", "NO_FENCE_READER", "NO_FENCE_WRITER", "LATE_RINGS", "NO_COUNT", "WAKE_ONE"]


def search(folder: Path, model: str, *defined: str, is_large: bool = False) -> str:
    """Return the output of Spin's verifier for a model after it has seen every state, or the first error.

    is_large: optimise the verifier. Otherwise the compiler would take longer than the search.
    """
    flags = [f"-D{name}" for name in defined]
    subprocess.run(["spin", *flags, "-a", MODELS / model], cwd=folder, check=True, capture_output=True)
    level = "-O1" if is_large else "-O0"
    subprocess.run(["gcc", level, "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], cwd=folder, check=True, capture_output=True)
    said = subprocess.run(["./pan", "-m1000000"], cwd=folder, check=True, capture_output=True, encoding="utf-8").stdout
    assert "Search not completed" not in said or "errors: 1" in said, said
    assert "max search depth too small" not in said, said
    return said


def states(said: str) -> int:
    return int(re.search(r"(\d+) states, stored", said)[1])  # type: ignore[index]


@pytest.mark.parametrize(("model", "least"), [("protocol.pml", 100_000), ("wakeups.pml", 1000), ("append_lock.pml", 100_000)])
def test_no_order_of_steps_breaks_the_protocol(tmp_path: Path, model: str, least: int) -> None:
    said = search(tmp_path, model, is_large=True)
    assert "errors: 0" in said
    assert states(said) > least
    # No statement is dead: overruns, kills, reorderings and sleeps all occurred.
    unreached = re.findall(r"unreached in proctype (\w+)\n((?:\t.*\n)+)", said)
    assert [where for where, lines in unreached if "(0 of " not in lines] == [], said


@pytest.mark.parametrize("mutant", PROTOCOL)
def test_each_rule_of_the_protocol_is_needed(tmp_path: Path, mutant: str) -> None:
    said = search(tmp_path, "protocol.pml", mutant)
    assert "errors: 1" in said
    assert "assertion violated" in said


@pytest.mark.parametrize("mutant", WAKEUPS)
def test_each_rule_of_sleeping_and_waking_is_needed(tmp_path: Path, mutant: str) -> None:
    said = search(tmp_path, "wakeups.pml", mutant)
    assert "errors: 1" in said
    assert "invalid end state" in said, "a reader sleeps forever"


def test_with_the_poll_no_reader_sleeps_forever_without_all_of_these_rules(tmp_path: Path) -> None:
    assert "errors: 0" in search(tmp_path, "wakeups.pml", *WAKEUPS, "POLL")


def test_a_waiter_for_the_append_lock_is_woken_without_a_poll(tmp_path: Path) -> None:
    said = search(tmp_path, "append_lock.pml", "LIVE")
    assert "errors: 0" in said
    assert states(said) > 10_000


@pytest.mark.parametrize("mutant", LOCK)
def test_each_rule_of_the_append_lock_keeps_out_a_second_owner(tmp_path: Path, mutant: str) -> None:
    said = search(tmp_path, "append_lock.pml", mutant)
    assert "errors: 1" in said
    assert "assertion violated (owners==1)" in said


@pytest.mark.parametrize("mutant", LOCK_WAITERS)
def test_each_rule_of_waiting_for_the_append_lock_is_needed(tmp_path: Path, mutant: str) -> None:
    said = search(tmp_path, "append_lock.pml", mutant, "LIVE")
    assert "errors: 1" in said
    assert "invalid end state" in said, "a waiter sleeps forever"
