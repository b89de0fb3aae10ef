from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def left_open(open_files: Callable[[], set[str]]) -> Callable[..., set[str]]:
    """Return what a call that raises leaves open: `left_open(OSError, call)`."""

    def call_and_look(error: type[Exception], call: Callable[[], Any]) -> set[str]:
        before = open_files()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                call()
            except error:
                left = open_files() - before
            else:
                raise AssertionError(f"no {error.__name__} was raised")
            gc.collect()
        return left

    return call_and_look
