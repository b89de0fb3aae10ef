"""Four writers, two durable readers and a follower on a journal, SIGKILL and SIGSTOP: no acknowledged record is lost, none is there twice,
and no reader leaves a record out. This is a few seconds of `tools/faults/storm --journals`, which runs for hours. And power cuts, a slice
of `tools/faults/journal_images.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loops import twin_names

IMAGES = Path(__file__).parents[2] / "tools" / "faults" / "journal_images.py"


RUNS = [(form, twin_names()[-1]) for form in ("sej", "fflg", "fixed")] + [("kvj", twin) for twin in twin_names()]


@pytest.mark.parametrize(("form", "twin"), RUNS)
def test_nothing_acknowledged_is_lost_or_left_out_while_writers_and_readers_are_killed(tmp_path: Path, form: str, twin: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    environment = {**os.environ, "KVSPOOL_NO_EXTENSIONS": "1" if twin == "interpreted" else "0"}
    command = [sys.executable, Path(__file__).with_name("stress.py"), tmp_path, str(seed), "1.2", form]
    with open(tmp_path / "said", "w+", encoding="utf-8") as said, open(tmp_path / "wrong", "w+", encoding="utf-8") as wrong:
        main = subprocess.Popen(command, env=environment, stdout=said, stderr=wrong, start_new_session=True)
        try:
            code = main.wait(80)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(main.pid, signal.SIGKILL)
            main.wait()
    assert code == 0, f"seed {seed}:\n{(tmp_path / 'wrong').read_text(encoding='utf-8')}"
    found = json.loads((tmp_path / "said").read_text(encoding="utf-8"))
    print(found)
    assert found["twin"] == twin
    assert min(found["kills"], found["kills of durable readers"], found["acknowledged"], found["commits"]) >= 2


def test_after_a_power_cut_all_that_was_synced_is_there_and_no_reader_is_ahead_of_it() -> None:
    spec = importlib.util.spec_from_file_location("journal_images", IMAGES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["journal_images"] = module
    spec.loader.exec_module(module)
    seed = random.SystemRandom().randrange(1 << 32)
    counts = module.campaign(360, seed, list(module.FORMATS))
    assert counts["images"] >= 360
    assert counts["records not synced that survived"] > 0 and counts["readers checked"] >= 720
