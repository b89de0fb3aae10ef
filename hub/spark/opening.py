"""Which kind of shards the options of a read name."""

from __future__ import annotations

from hub.spark.options import ReadOptions
from hub.spark.shards import Shards


def open_shards(options: ReadOptions) -> Shards:
    """Return the shards that the options name, for the driver; the caller closes them.

    Raises LogNotFound, ValueError for a selection that a single log doesn't have, and what else opening them does.
    """
    if options.path is None:
        raise ValueError("option hub is not possible here")
    from hub.spark.local import LocalShards

    return LocalShards(options.path, options.selection, reader=options.reader, isolation=options.isolation)
