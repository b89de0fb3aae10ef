"""The logger of the package, imported on the first message: most programs never need the module logging."""

from __future__ import annotations


def warn(words: str, *values: object) -> None:
    """Log a warning to the logger `kvspool`."""
    import logging

    logging.getLogger("kvspool").warning(words, *values)


def inform(words: str, *values: object) -> None:
    """Log a message of level INFO to the logger `kvspool`."""
    import logging

    logging.getLogger("kvspool").info(words, *values)
