"""Open the shards that the options of a read name."""

from __future__ import annotations

from hub.spark.options import ReadOptions
from hub.spark.shards import SparkShards


def open_shards(options: ReadOptions, columns: frozenset[str] | None = None) -> SparkShards:
    """Return the shards that the options name, for the driver; the caller closes them.

    columns: columns of `kvspool.arrow.SCHEMA` that tasks need, at least; None for all. A hub sends no others. Raises LogNotFound,
    ValueError for a selection of shards of a single log, and the other errors of opening them.
    """
    if options.path is None:
        from hub.spark.remote import HubShards

        return HubShards(
            options.hubs,
            options.selection,
            credentials=options.credentials,
            timeout=options.hub_timeout,
            reader=options.reader,
            isolation=options.isolation,
            columns=columns,
            local_root=options.local_root,
        )
    from hub.spark.local import LocalShards

    return LocalShards(options.path, options.selection, reader=options.reader, isolation=options.isolation)
