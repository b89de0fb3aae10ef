"""The parts of `hub.server`: the gate, authentication, ingest and read service."""
