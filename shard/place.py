"""Where a record of a shard set lies."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a record went: its shard, and its sequence there."""

    shard: int
    sequence: int
