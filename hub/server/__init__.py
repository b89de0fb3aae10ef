"""The hub over the network: the proxy before it, who calls, what comes in and what goes out."""
