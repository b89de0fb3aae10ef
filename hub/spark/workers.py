"""What holds for all of Spark's Python worker processes, whatever their tasks do."""

from __future__ import annotations

import gc
from functools import cache


@cache
def settle() -> None:
    """Take all that this worker process has loaded by now out of the garbage collector's sight. Call it in a task, with its modules loaded.

    PySpark collects garbage after every task: a look at each object of every module, 17 ms, when reading a small range takes less than
    one. What was loaded stays anyway. Outside of a task nothing happens: the process isn't ours.
    """
    from pyspark import TaskContext

    if TaskContext.get() is not None:
        gc.freeze()
