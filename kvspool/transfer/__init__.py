"""Copies of logs, from any format into any other; see `copier.copy`. Export and import; see `exchange`."""
