"""A log that you open like a file: many processes append to it and read it at once, and no crash of one loses records.

    import kvspool

    log = kvspool.create("events", capacity="1GiB")
    sequence = log.append({"user": 7, "event": "login"}, key=b"7")
    for record in log.read(start=sequence):
        print(record.sequence, record.time, record.key, record.data)

README.md lists the guarantees of `append`, `kvspool.errors` the errors, and `docs/format.md` the bytes.

Names are imported on first use, so that `import kvspool` takes a millisecond.
"""

TYPE_CHECKING = False  # type checkers set it to True; importing typing takes longer than importing this module
if TYPE_CHECKING:
    from kvspool import arrow as arrow
    from kvspool import errors as errors
    from kvspool import journal as journal
    from kvspool import queue as queue
    from kvspool.engine.damage import Damage, VerifyReport
    from kvspool.engine.exporting import export
    from kvspool.engine.reports import RecoveryReport, RepairReport
    from kvspool.engine.stats import LogStats
    from kvspool.errors import GapError, KvspoolError, Unsupported
    from kvspool.log import Log
    from kvspool.opening.logs import create, open, repair, resize, verify
    from kvspool.opening.naming import delete, rename
    from kvspool.reader import Lag, Reader, ReaderStats
    from kvspool.record import Codec, Gap, Record
    from kvspool.spool import Spool
    from kvspool.spool.salvage import SalvageReport, salvage
    from kvspool.transfer.copier import CopyPlan, CopyReport, copy
    from kvspool.transfer.exchange import import_, import_v1
    from kvspool.transfer.progress import CopyProgress
    from kvspool.writer import Writer

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
    "LogStats",
    "Reader",
    "ReaderStats",
    "Record",
    "RecoveryReport",
    "RepairReport",
    "SalvageReport",
    "Spool",
    "Unsupported",
    "VerifyReport",
    "Writer",
    "__version__",
    "copy",
    "create",
    "delete",
    "export",
    "import_",
    "import_v1",
    "open",
    "rename",
    "repair",
    "resize",
    "salvage",
    "verify",
]

_MODULES = ("arrow", "errors", "journal", "queue")
_PLACES = {
    "kvspool.transfer.copier": "CopyPlan CopyProgress CopyReport copy",
    "kvspool.engine.stats": "LogStats",
    "kvspool.errors": "GapError KvspoolError Unsupported",
    "kvspool.engine.damage": "Damage VerifyReport",
    "kvspool.engine.exporting": "export",
    "kvspool.engine.reports": "RecoveryReport RepairReport",
    "kvspool.transfer.exchange": "import_ import_v1",
    "kvspool.log": "Log",
    "kvspool.opening.logs": "create open repair resize verify",
    "kvspool.opening.naming": "delete rename",
    "kvspool.reader": "Lag Reader ReaderStats",
    "kvspool.record": "Codec Gap Record",
    "kvspool.spool": "Spool",
    "kvspool.spool.salvage": "SalvageReport salvage",
    "kvspool.writer": "Writer",
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULES and name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvspool.importing import import_whole

    if name in _MODULES:
        return import_whole(f"{__name__}.{name}")
    found = globals()[name] = getattr(import_whole(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
