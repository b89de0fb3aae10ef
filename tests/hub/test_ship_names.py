"""The SOURCE of `kvspool ship`: a path, or a client's id and a path, either of which may have an =."""

from __future__ import annotations

from pathlib import Path

import pytest

from hub.cli.ship import named
from kvspool.cli.options import BadInput


@pytest.mark.parametrize(
    ("source", "client", "found"),
    [
        ("jfk=events", None, ("jfk", "events")),
        ("jfk=events", "web", ("jfk", "events")),
        ("jfk2=day=1/events", None, ("jfk2", "day=1/events")),
        ("./day=1/events", "web", ("web", "./day=1/events")),
        ("/logs/day=1/events", "web", ("web", "/logs/day=1/events")),
        ("day=1/there", "web", ("web", "day=1/there")),
        ("day=1/gone", "web", ("day", "1/gone")),
    ],
)
def test_an_id_stands_before_the_first_sign_unless_all_of_it_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, client: str | None, found: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day=1" / "there").mkdir(parents=True)
    assert named([source], client) == [(found[0], Path(found[1]))]


def test_several_paths_with_signs_have_ids_after_their_directories(tmp_path: Path) -> None:
    sources = [str(tmp_path / "day=1" / name) for name in "ab"]
    assert named(sources, "web") == [("web-a", Path(sources[0])), ("web-b", Path(sources[1]))]
    with pytest.raises(BadInput, match="no client's id"):
        named(sources, None)
