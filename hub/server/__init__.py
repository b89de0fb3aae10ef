"""The hub over the network: its server, the authentication of callers, received records and reads."""
