"""The spool: a bounded circular log in shared memory. `format` defines the bytes, `Spool` the verbs."""

from kvspool.reader import Lag, Reader, ReaderStats
from kvspool.spool.spool import Spool
from kvspool.writer import Writer

__all__ = ["Lag", "Reader", "ReaderStats", "Spool", "Writer"]
