"""The answers of several hubs that were asked at once."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from hub.errors import HubError
from kvspool import system

H = TypeVar("H")
T = TypeVar("T")


def gather(calls: Mapping[Future[T], H], least: float | None = None) -> tuple[dict[H, T], dict[H, HubError]]:
    """Return the results of calls, and the errors of those that failed, by hub.

    least: seconds that the others have after the first result; None: all are waited for.
    """
    found: dict[H, T] = {}
    errors: dict[H, HubError] = {}
    waiting, left = set(calls), None
    until = 0.0
    while waiting and (left is None or left > 0):
        done, waiting = wait(waiting, left, FIRST_COMPLETED)
        for future in done:
            try:
                found[calls[future]] = future.result()
            except HubError as error:
                errors[calls[future]] = error
        if found and least is not None:
            now = system.port.monotonic()
            until = until or now + least
            left = until - now
    return found, errors
