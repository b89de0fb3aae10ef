"""A log that you open like a file: many processes append to it at once, many read it, nothing is lost when one dies.

    import kvspool

    log = kvspool.create("events", capacity="1GiB")
    sequence = log.append({"user": 7, "event": "login"}, key=b"7")
    for record in log.read(start=sequence):
        print(record.sequence, record.time, record.key, record.data)

See README.md for what an `append` promises, `kvspool.errors` for what can go wrong, `docs/format.md` for the bytes.
"""

from kvspool.copying import CopyPlan, CopyProgress, CopyReport, copy
from kvspool.errors import GapError, KvspoolError, Unsupported
from kvspool.exchange import export, import_, import_v1
from kvspool.log import Log
from kvspool.logs import create, open, repair, resize, verify
from kvspool.reader import Lag, Reader, ReaderStats
from kvspool.record import Codec, Gap, Record
from kvspool.spool import (
    Damage,
    RecoveryReport,
    RepairReport,
    SalvageReport,
    Spool,
    SpoolStats,
    VerifyReport,
    Writer,
    salvage,
)

__version__ = "0.1.0"

__all__ = [
    "Codec",
    "CopyPlan",
    "CopyProgress",
    "CopyReport",
    "Damage",
    "Gap",
    "GapError",
    "KvspoolError",
    "Lag",
    "Log",
    "Reader",
    "ReaderStats",
    "Record",
    "RecoveryReport",
    "RepairReport",
    "SalvageReport",
    "Spool",
    "SpoolStats",
    "Unsupported",
    "VerifyReport",
    "Writer",
    "__version__",
    "copy",
    "create",
    "export",
    "import_",
    "import_v1",
    "open",
    "repair",
    "resize",
    "salvage",
    "verify",
]
