"""Keys of kept records that an older or damaged control block has lost with the end of its key table.

A new key must not get the index of a lost one: the records that name it would be read with the wrong key. So a recovery that can't trust
the control block decodes every keyed value that it keeps. If one can't be decoded it closes the key table for good: such records stay
undecodable, and new keys stay in their records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool import keyed
from kvspool.record import Codec
from kvspool.spool import format
from kvspool.spool.keys import KeyTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvspool.spool.memory import FrameRun, Memory

BATCH = 256  # records read at once


def close_table(memory: Memory, kept: list[FrameRun]) -> None:
    """Under all locks: close the key table, on disk, if a kept record can't be decoded with it. Raises the system's OSError."""
    if memory.header.codec != Codec.KEYED:
        return
    table = KeyTable(memory.control[format.KEYS_AT : format.INDEX_AT], memory.header.log_id)
    if not all(_is_decodable(value, table.keys) for value in _keyed_values(memory, kept)):
        table.end()
        memory.flush_control()  # before any word states that the control block is true


def _keyed_values(memory: Memory, kept: list[FrameRun]) -> Iterator[bytes]:
    reader = memory.ring_reader()
    for run in kept:
        reader.position, reader.sequence = run.start, run.first
        while rows := reader.fetch(run.end, BATCH, lambda *fields: fields[-2:]):
            yield from (value for value, codec in rows if codec == Codec.KEYED)
    reader.close()


def _is_decodable(value: bytes, keys: keyed.Keys) -> bool:
    try:
        keyed.unpack(value, keys)
    except (ValueError, RecursionError):
        return False
    return True
