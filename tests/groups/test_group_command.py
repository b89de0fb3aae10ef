"""The command `kvspool group`."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Run
from subjects import KINDS, Subject


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_shows_and_resets_groups(tmp_path: Path, kind: str, run: Run) -> None:
    subject = Subject(tmp_path / "log", kind)
    subject.append(8)
    path = str(subject.path)
    with subject.open() as log, log.group("billing") as member:
        for _ in member.follow(limit=5):
            pass
        member.commit()
        found = run("group", path, "billing", "--json").object
        assert (found["name"], found["shards"], len(found["members"]), found["lag"]["records"]) == ("billing", subject.shards, 1, 3)
        assert "billing: 1 member," in run("group", path).out
        run("group", path, "billing", "--reset", "earliest", code=6)
    run("group", path, "billing", "--reset", "latest")
    run("group", path, "billing", "--reset", "7", code=2)
    run("group", path, "nobody", code=2)
    found = run("group", path, "billing", "--json").object
    assert (found["members"], found["lag"]["records"]) == ([], 0)
