"""The common base of spools, journals and queues."""
