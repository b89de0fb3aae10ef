"""Four writers, three readers, two durable ones, one small ring, SIGKILL and SIGSTOP: nothing acknowledged is lost, nothing is given
twice, every Gap is said, and no commit is forgotten.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loops import twin_names


@pytest.mark.parametrize("policy", ["overwrite", "block"])
@pytest.mark.parametrize("twin", twin_names())
def test_every_reader_accounts_for_every_sequence_while_writers_are_killed(tmp_path: Path, twin: str, policy: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    environment = {**os.environ, "KVSPOOL_NO_EXTENSIONS": "1" if twin == "interpreted" else "0"}
    script = Path(__file__).with_name("stress.py")
    command = [sys.executable, script, tmp_path, str(seed), "2", policy]
    with open(tmp_path / "said", "w+", encoding="utf-8") as said, open(tmp_path / "wrong", "w+", encoding="utf-8") as wrong:
        main = subprocess.Popen(command, env=environment, stdout=said, stderr=wrong, start_new_session=True)
        try:
            code = main.wait(120)
        finally:
            # Whatever went wrong, none of its writers and readers is left running.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(main.pid, signal.SIGKILL)
            main.wait()
    assert code == 0, f"seed {seed}:\n{(tmp_path / 'wrong').read_text(encoding='utf-8')}"
    found = json.loads((tmp_path / "said").read_text(encoding="utf-8"))
    print(found)
    assert found["twin"] == twin
    assert min(found["kills"], found["kills of durable readers"], found["stops"]) >= 3
    assert found["appended"] > 5 * found["kept"], "the ring was never far too small"
    assert found["acknowledged"] > 300
    assert found["read"] > 300
    assert policy == "block" or found["gaps"] > 0
