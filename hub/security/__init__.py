"""Whom a hub trusts, and with how much: certificates, tokens, rights and quotas. It knows nothing of the network."""
