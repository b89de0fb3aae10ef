"""Epochs: in which start of the machine the control block is true."""

from __future__ import annotations

from pathlib import Path

from images import crash_images as images

import kvspool
from kvspool import system
from kvspool.spool import epochs, format
from kvspool.spool.spool_files import SpoolFiles

LOG_ID = images.LOG_ID


def epoch(recoveries: int, state: int = format.TRUE) -> format.Epoch:
    return format.Epoch(bytes([recoveries]) * 16, 0, 1, recoveries, 0, 0, state, 0)


def test_the_epoch_of_a_new_log_is_that_of_its_machine(tmp_path: Path) -> None:
    kvspool.create(tmp_path / "log", capacity=65536).close()
    files = SpoolFiles(tmp_path / "log")
    found = epochs.newest(files.control, files.header.log_id)
    assert found is not None and found[1].boot_id == system.port.boot_id() and found[1].state == format.TRUE
    files.close()


def test_a_flipped_bit_makes_an_epoch_untrue_and_the_other_one_counts() -> None:
    control = memoryview(bytearray(4096))
    epochs.store(control, LOG_ID, 0, epoch(1))
    epochs.store(control, LOG_ID, 1, epoch(2))
    assert epochs.is_true(control, LOG_ID, bytes([2]) * 16)
    for bit in range(format.EPOCH.size * 8):
        at = format.EPOCHS_AT[1] + (bit >> 3)
        control[at] ^= 1 << (bit & 7)
        assert not epochs.is_true(control, LOG_ID, bytes([2]) * 16)
        found = epochs.newest(control, LOG_ID)
        assert found is not None and found[0] == 0
        control[at] ^= 1 << (bit & 7)


def test_a_sealed_epoch_is_not_true_yet() -> None:
    control = memoryview(bytearray(4096))
    epochs.store(control, LOG_ID, 0, epoch(1, format.SEALED))
    assert not epochs.is_true(control, LOG_ID, bytes([1]) * 16)
    epochs.store(control, LOG_ID, 0, epoch(1))
    assert epochs.is_true(control, LOG_ID, bytes([1]) * 16)
    assert not epochs.is_true(control, bytes(16), bytes([1]) * 16), "of another log"
