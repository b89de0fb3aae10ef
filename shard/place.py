"""The place of a record in a shard set."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """The place of a record: its shard, and its sequence there."""

    shard: int
    sequence: int
