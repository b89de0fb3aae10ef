"""The spool: a bounded circular log in shared memory. `format` defines the bytes, `Spool` the verbs."""

from kvspool.engine.damage import Damage, VerifyReport
from kvspool.reader import Lag, Reader, ReaderStats
from kvspool.spool.recovery import RecoveryReport
from kvspool.spool.repair import RepairReport, repair
from kvspool.spool.salvage import SalvageReport, salvage
from kvspool.spool.spool import Spool
from kvspool.spool.stats import SpoolStats
from kvspool.writer import Writer

__all__ = [
    "Damage",
    "Lag",
    "Reader",
    "ReaderStats",
    "RecoveryReport",
    "RepairReport",
    "SalvageReport",
    "Spool",
    "SpoolStats",
    "VerifyReport",
    "Writer",
    "repair",
    "salvage",
]
