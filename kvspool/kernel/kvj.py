"""Choose the compiled twin of the loops over kvj frames, or the interpreted one; the same switch as `frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel.frames import TWIN
from kvspool.kernel.twins import choose

if TYPE_CHECKING:
    from kvspool.kernel.kvj_py import encode, encode_columns, encode_records, find, gather, pass_over, scan, sequence_at, survey

__all__ = ["encode", "encode_columns", "encode_records", "find", "gather", "pass_over", "scan", "sequence_at", "survey"]
choose(globals(), __all__, TWIN)
