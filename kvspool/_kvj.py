"""Choose the compiled twin of the loops over kvj frames, or the interpreted one; the same switch as `_frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN
from kvspool._twins import choose

if TYPE_CHECKING:
    from kvspool._kvj_py import encode, encode_columns, encode_records, find, gather, pass_over, scan, sequence_at, survey

__all__ = ["encode", "encode_columns", "encode_records", "find", "gather", "pass_over", "scan", "sequence_at", "survey"]
choose(globals(), __all__, TWIN)
