"""A slice of the crash images that are made of real files: with the list of producers, and with the stores of the compiled twin."""

from __future__ import annotations

import pytest
from campaigns import campaign

from kvspool.kernel import frames

images = campaign("file_images")


@pytest.mark.parametrize("unit", images.UNITS)
def test_after_a_power_cut_a_durable_batch_that_is_repeated_is_there_exactly_once(unit: int) -> None:
    done = images.campaign(150, 1, unit, by_opcodes=True)
    assert done.images == 150
    assert {"durable:whole", "durable:gone", "plain:gone", "plain:whole"} <= set(done.kinds)
    assert done.stores > 30


@pytest.mark.skipif(frames.TWIN == "interpreted", reason="interpreted, the instructions are the interpreter's")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_after_a_power_cut_between_any_instructions_of_the_compiled_loops_all_that_was_synced_is_there() -> None:
    try:
        done = images.campaign(60, 6, 512, calls=2, producers=False)
    except images.Unsteppable:
        pytest.skip("this process may not trace another one")
    assert done.images == 60
    assert done.stores > 100, "every store of a loop is a version of its own"
