"""Which twin of a module is chosen, and when."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvspool.kernel.twins import choose

names = (f"chosen_{number}" for number in itertools.count())


@pytest.fixture
def chooser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the globals of a chooser whose interpreted twin has `one` and `two`, and the other one only `one`."""
    monkeypatch.delenv("KVSPOOL_NO_EXTENSIONS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    stem = next(names)
    (tmp_path / f"{stem}_py.py").write_text("one = two = 'interpreted'\n", encoding="utf-8")
    (tmp_path / f"{stem}_c.py").write_text("one = 'compiled'\n", encoding="utf-8")
    return {"__name__": stem}


def test_the_compiled_twin_is_chosen_where_there_is_one(chooser: dict[str, Any]) -> None:
    assert choose(chooser, ["one"]) == chooser["one"] == "compiled"


def test_an_old_build_without_a_name_is_not_mixed_with_the_interpreted_twin(chooser: dict[str, Any]) -> None:
    assert choose(chooser, ["one", "two"]) == chooser["one"] == chooser["two"] == "interpreted"


def test_where_nothing_was_built_it_is_the_interpreted_one(chooser: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / f"{chooser['__name__']}_c.py").unlink()
    assert choose(chooser, ["one"]) == chooser["one"] == "interpreted"


def test_the_environment_or_another_chooser_forces_the_interpreted_one(
    chooser: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(chooser, ["one"], "interpreted") == chooser["one"] == "interpreted"
    monkeypatch.setenv("KVSPOOL_NO_EXTENSIONS", "1")
    assert choose(chooser, ["one"]) == chooser["one"] == "interpreted"
