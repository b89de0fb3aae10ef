"""The heart: a bounded circular log in shared memory. `format` has the bytes, `Spool` the verbs."""

from kvspool.spool.spool import Spool, SpoolStats

__all__ = ["Spool", "SpoolStats"]
