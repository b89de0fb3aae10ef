"""A few seconds of what `tools/faults/fuzz.py` does for hours: the parsers refuse whatever they can't read with an error of ours."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent.parent / "tools" / "faults" / "fuzz.py"


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="NOT FUZZED HERE: there is no atheris for this machine")
@pytest.mark.parametrize("target", ["reader", "writer", "header", "checkpoint", "slots", "keys", "keyed", "lines", "sej", "kvj", "fixed"])
def test_no_input_breaks_a_parser(tmp_path: Path, target: str) -> None:
    command = [sys.executable, FUZZ, target, "1"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "none that broke it" in ran.stdout
