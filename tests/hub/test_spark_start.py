"""The page "Spark in five minutes", followed to the letter: its program runs in the tests' session, in which `session` starts none."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from sessions import MARKS

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import examples

pytestmark = MARKS


def test_the_program_counts_and_copies_and_continues_after_its_last_record(
    spark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = {one.name: one.text for page in ("start", "start-spark") for one in examples.examples(page) if one.kind == "file"}
    counting = programs["count.py"].replace('setLogLevel("ERROR")', 'setLogLevel("OFF")')  # as in the tests' session
    for name in ("events", "copy", "checkpoint"):  # the session was started in another directory
        assert f'"{name}"' in counting
        counting = counting.replace(f'"{name}"', repr(str(tmp_path / name)))
    for round in (1, 2):
        exec(programs["first.py"], {"__name__": "__main__"})
        exec(counting, {"__name__": "__main__"})
        said = capfd.readouterr().out
        assert f"{3 * round} records\n" in said and f"{3 * round} records copied\n" in said
        assert re.search(rf"\| *login\| +{round}\|", said), said
