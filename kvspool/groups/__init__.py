"""Groups: processes that share the shards of a log, a shard set or a hub root; each shard has one owner at a time."""
