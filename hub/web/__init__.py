"""The hub's web page, its metrics and its health."""
