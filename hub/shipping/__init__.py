"""The parts of `hub.shipper` and `hub.mirror`: a connection to a hub, and the transfer of one log or shard."""
