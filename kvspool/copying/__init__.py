"""Copy logs from any format to any other; see `copier.copy`."""

from kvspool.copying.copier import CopyPlan, CopyReport, copy
from kvspool.copying.progress import CopyProgress

__all__ = ["CopyPlan", "CopyProgress", "CopyReport", "copy"]
