"""What can go wrong in a query. Spark keeps the words of an error and loses its class, so each begins with a code in brackets."""

from __future__ import annotations

from kvspool import KvspoolError


class DataLossError(KvspoolError):
    """Records that the query was planned for are gone. `failOnDataLoss=false` leaves them out.

    [KVSPOOL_DATA_LOSS]: overwritten, trimmed or damaged. [KVSPOOL_LOG_REPLACED]: another log lies there now, which the option doesn't
    allow either.
    """
