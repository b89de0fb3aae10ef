"""The other end of a hub: the shipper, the mirror, and a reader on another host."""
