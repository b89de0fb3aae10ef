"""A few seconds of `tools/faults/fuzz.py`, which runs for hours: the parsers refuse whatever they can't read with kvspool's error."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent.parent / "tools" / "faults" / "fuzz.py"


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="NOT FUZZED HERE: there is no atheris for this machine")
def test_no_input_breaks_a_parser(tmp_path: Path) -> None:
    targets = ["reader", "writer", "header", "checkpoint", "slots", "keys", "keyed", "lines", "sej", "kvj", "fixed"]
    command = [sys.executable, FUZZ, ",".join(targets), "0.2"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("none that broke it") == len(targets)
