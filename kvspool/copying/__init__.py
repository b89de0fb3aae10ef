"""Copies of logs, from any format into any other; see `copier.copy`."""

from kvspool.copying.copier import CopyPlan, CopyReport, copy
from kvspool.copying.progress import CopyProgress

__all__ = ["CopyPlan", "CopyProgress", "CopyReport", "copy"]
