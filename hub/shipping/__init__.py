"""What `hub.shipper` and `hub.mirror` are made of: a connection to a hub, and one log or shard on its way."""
