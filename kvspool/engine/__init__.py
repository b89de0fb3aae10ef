"""What spools, journals and queues are built on."""
