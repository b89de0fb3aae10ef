"""The messages between a hub and its clients, without any I/O."""
