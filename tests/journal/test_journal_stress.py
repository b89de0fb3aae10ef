"""Four writers, two durable readers and a follower on a journal, SIGKILL and SIGSTOP: no acknowledged record is lost, none is there twice,
and no reader leaves a record out. This is a few seconds of `tools/faults/storm --journals`, which runs for hours. And power cuts, a slice
of `tools/faults/journal_images.py`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from campaigns import campaign, run_storm
from loops import twin_names

RUNS = [(form, twin_names()[-1]) for form in ("sej", "fflg", "fixed")] + [("kvj", twin) for twin in twin_names()]


@pytest.mark.parametrize(("form", "twin"), RUNS)
def test_nothing_acknowledged_is_lost_or_left_out_while_writers_and_readers_are_killed(tmp_path: Path, form: str, twin: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    found = run_storm(Path(__file__).with_name("stress.py"), tmp_path, twin, seed, "0.4", form)
    assert min(found["kills"], found["kills of durable readers"], found["acknowledged"], found["commits"]) >= 2


def test_after_a_power_cut_all_that_was_synced_is_there_and_no_reader_is_ahead_of_it() -> None:
    module = campaign("journal_images")
    seed = random.SystemRandom().randrange(1 << 32)
    counts = module.campaign(60, seed, list(module.FORMATS))
    assert counts["images"] >= 60
    assert counts["records not synced that survived"] > 0 and counts["readers checked"] >= 120
