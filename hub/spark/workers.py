"""Settings for all of Spark's Python worker processes."""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_modules() -> None:
    """Exclude all loaded objects of this worker process from garbage collection. Call it in a task, after its modules are loaded.

    PySpark collects garbage after every task. That visits each object of every module and takes 17 ms, while reading a small range takes
    less than one. Loaded modules stay anyway. Outside a task nothing happens, because the process isn't ours.
    """
    from pyspark import TaskContext

    if TaskContext.get() is not None:
        gc.freeze()
