"""Choose the compiled twin of the loops over kvj frames, or the interpreted one; the same switch as `_frames`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool._frames import TWIN

if TYPE_CHECKING:
    from kvspool._kvj_py import encode, encode_columns, find, gather, pass_over, scan, sequence_at
else:
    try:
        if TWIN == "interpreted":
            raise ImportError
        from kvspool._kvj_c import encode, encode_columns, find, gather, pass_over, scan, sequence_at
    except ImportError:
        from kvspool._kvj_py import encode, encode_columns, find, gather, pass_over, scan, sequence_at

__all__ = ["encode", "encode_columns", "find", "gather", "pass_over", "scan", "sequence_at"]
