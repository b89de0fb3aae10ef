from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kinds import OPTIONS, create

from kvspool.log import Log


@pytest.fixture(params=OPTIONS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of log."""
    return str(request.param)


@pytest.fixture
def log(kind: str, tmp_path: Path) -> Iterator[Log]:
    """An empty log of each kind."""
    with create(kind, tmp_path / "log") as made:
        yield made


@pytest.fixture
def filled(log: Log) -> Log:
    """A log of each kind with the records 0 to 29; their values are `b"%04d" % sequence`."""
    log.append_many([b"%04d" % number for number in range(30)])
    return log
