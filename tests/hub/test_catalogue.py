"""The catalogue of a root: always what a listing of the root would find, and without listing it."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvspool
from hub.root import catalogue as catalogues
from hub.root.catalogue import Catalogue
from kvspool import system
from shard import route


class Listing(system.Port):
    """Counts listings of the root, and can have no watch to give, or a queue that has overflowed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0
        self.has_overflowed = False

    def names(self, path: str | os.PathLike[str]) -> list[str]:
        self.count += Path(path) == self.root
        return super().names(path)

    def read_events(self, fd: int) -> bytes:
        data = super().read_events(fd)
        return catalogues._EVENT.pack(-1, 0x4000, 0, 0) if self.has_overflowed else data


class Exhausted(Listing):
    """Has no watch left."""

    def add_watch(self, notifier: Any, path: str | os.PathLike[str], mask: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture(params=[Listing, Exhausted])
def port(root: Path, request: pytest.FixtureRequest) -> Iterator[Listing]:
    with system.replaced(request.param(root)) as port:
        yield port


def expected(root: Path) -> dict[str, Any]:
    return {name: found for name, found in route.scan(root).items() if name}


def change(root: Path, dice: random.Random) -> None:
    """Change something in a root as a client, an operator, or a client's own program may."""
    name = dice.choice(["a", "b-1", "c", ".hub", "no.shard", "a.1.000", "a.1.001", "b-1.2.003", "x.3.000", "1.000"])
    path = root / name
    what = dice.randrange(5)
    if os.path.lexists(path):
        if what == 0 and path.is_dir():
            shutil.rmtree(path)
        elif what == 1 and path.is_dir():
            for one in path.iterdir():
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        elif what == 2 and not os.path.lexists(root / "c.1.000"):
            path.rename(root / "c.1.000")
        elif path.is_dir() and not os.listdir(path):
            (path / "spool.ctl").touch()
    elif what < 2:
        path.mkdir()
    elif what == 2:
        path.touch()
    else:
        path.mkdir()
        (path / "spool.ctl").touch()


@pytest.mark.parametrize("seed", range(8))
def test_it_is_always_what_a_listing_would_find(root: Path, port: Listing, seed: int) -> None:
    dice = random.Random(seed)
    with closing(Catalogue(root)) as catalogue:
        for _ in range(60):
            for _ in range(dice.randrange(4)):
                change(root, dice)
            assert catalogue.clients() == expected(root)
            for name in ("a", "b-1", "c", "x"):
                assert catalogue.client(name) == expected(root).get(name)


def test_the_root_is_listed_once(root: Path) -> None:
    for number in range(20):
        (root / f"c{number}.1.000").mkdir()
    with system.replaced(Listing(root)) as port, closing(Catalogue(root)) as catalogue:
        assert isinstance(port, Listing)
        for number in range(20):
            (root / f"c{number}.1.001").mkdir()
            found = catalogue.client(f"c{number}")
            assert found is not None and found.missing == []
        assert len(catalogue.clients()) == 20
        assert port.count == 1


def test_events_that_the_kernel_lost_are_made_up_for(root: Path) -> None:
    with system.replaced(Listing(root)) as port, closing(Catalogue(root)) as catalogue:
        assert isinstance(port, Listing) and catalogue.clients() == {}
        (root / "a.1.000").mkdir()
        port.has_overflowed = True
        assert list(catalogue.clients()) == ["a"]
        assert port.count == 2


def test_a_catalogue_that_was_returned_stays_as_it_is(root: Path) -> None:
    with closing(Catalogue(root)) as catalogue:
        kvspool.create(root / "a.1.000", format="kvj").close()
        before = catalogue.client("a")
        changes = catalogue.changes
        kvspool.create(root / "a.1.001", format="kvj").close()
        after = catalogue.client("a")
        assert before is not None and after is not None
        assert (before.missing, after.missing) == ([1], [])
        assert catalogue.changes > changes
        changes = catalogue.changes
        assert catalogue.client("a") is after and catalogue.changes == changes


def test_a_closed_catalogue_is_still_right(root: Path) -> None:
    catalogue = Catalogue(root)
    assert catalogue.clients() == {}
    catalogue.close()
    (root / "a.1.000").mkdir()
    assert list(catalogue.clients()) == ["a"]
