"""Epochs: the record of the boot of the machine in which the control block is true.

After a crash of the machine the control block contains whichever pages happened to reach the disk. So it counts only if its newest epoch
has the id of the present boot and the state TRUE; `recovery` sets that. There are two slots, so that a recovery interrupted by another
crash doesn't lose the record of the last one: above all `first_seq`, the first sequence assigned since.
"""

from __future__ import annotations

from kvspool.engine.checksums import checksum, sealed
from kvspool.spool import format


def packed(log_id: bytes, epoch: format.Epoch) -> bytes:
    """Return the bytes of an epoch with its checksum, which need not be set."""
    return sealed(format.EPOCH.pack(epoch), log_id)


def newest(control: memoryview, log_id: bytes) -> tuple[int, format.Epoch] | None:
    """Return the slot of the epoch that counts, and the epoch; None if neither is sound."""
    found = []
    for slot, at in enumerate(format.EPOCHS_AT):
        raw = bytes(control[at : at + format.EPOCH.size])
        epoch = format.EPOCH.unpack(raw)
        is_possible = epoch.state in (format.SEALED, format.TRUE) and not epoch.recoveries >> 63
        if is_possible and epoch.crc == checksum(log_id, raw[:-4]):
            found.append((slot, epoch))
    return max(found, key=lambda each: each[1].recoveries, default=None)


def is_true(control: memoryview, log_id: bytes, boot_id: bytes) -> bool:
    """Return whether the control block is true in the boot with this id."""
    found = newest(control, log_id)
    return found is not None and found[1].state == format.TRUE and found[1].boot_id == boot_id


def store(control: memoryview, log_id: bytes, slot: int, epoch: format.Epoch) -> None:
    """Write an epoch into a slot, its state and checksum last, with one store."""
    words = control.cast("Q")
    at, size = format.EPOCHS_AT[slot] // 8, format.EPOCH.size // 8
    raw = memoryview(packed(log_id, epoch)).cast("Q")
    if bytes(raw[:-1]) != bytes(control[at * 8 : (at + size - 1) * 8]):
        words[at + size - 1] = 0
        for word in range(size - 1):
            words[at + word] = raw[word]
    words[at + size - 1] = raw[size - 1]
