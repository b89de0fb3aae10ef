"""Certificates, tokens, rights and quotas of a hub's users. It does not depend on the network."""
