"""Choose the compiled twin of the loops over kvj frames, or the interpreted one; the same switch as `frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.kvj_py import check_columns, encode, encode_columns, encode_records, find, gather, pass_over, scan, sequence_at

__all__ = ["check_columns", "encode", "encode_columns", "encode_records", "find", "gather", "pass_over", "scan", "sequence_at"]
choose(globals(), __all__, TWIN)
