"""The heart: a bounded circular log in shared memory. `format` has the bytes, `Spool` the verbs."""

from kvspool.spool.reader import Lag, Reader, ReaderStats
from kvspool.spool.spool import Spool, SpoolStats
from kvspool.spool.writer import Writer

__all__ = ["Lag", "Reader", "ReaderStats", "Spool", "SpoolStats", "Writer"]
