"""Errors of a query. Spark keeps an error's message but not its class, so each message begins with a code in brackets."""

from __future__ import annotations

from kvspool import KvspoolError


class DataLossError(KvspoolError):
    """Records that the query planned to read are lost. `failOnDataLoss=false` skips them.

    [KVSPOOL_DATA_LOSS]: overwritten, trimmed or damaged. [KVSPOOL_LOG_REPLACED]: the path now has another log; the option does not allow
    this.
    """
