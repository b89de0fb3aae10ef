"""The parts that spools, journals and queues share."""
