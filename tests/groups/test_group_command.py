"""The command `kvspool group`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from subjects import KINDS, Subject

from kvspool.cli import main


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_shows_and_resets_groups(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    subject = Subject(tmp_path / "log", kind)
    subject.append(8)
    path = str(subject.path)
    with subject.open() as log, log.group("billing") as member:
        for _ in member.follow(limit=5):
            pass
        member.commit()
        assert main(["group", path, "billing", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["name"], found["shards"], len(found["members"]), found["lag"]["records"]) == ("billing", subject.shards, 1, 3)
        assert main(["group", path]) == 0
        assert "billing: 1 members" in capsys.readouterr().out
        assert main(["group", path, "billing", "--reset", "earliest"]) == 6
    assert main(["group", path, "billing", "--reset", "latest"]) == 0
    assert main(["group", path, "billing", "--reset", "7"]) == 2
    assert main(["group", path, "nobody"]) == 2
    capsys.readouterr()
    assert main(["group", path, "billing", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["members"], found["lag"]["records"]) == ([], 0)
