"""The campaigns of `tools/faults`, for the tests that take a slice of them, and storms in a process of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS = Path(__file__).parents[1] / "tools" / "faults"


def campaign(name: str) -> ModuleType:
    """Return a file of `tools/faults` as a module."""
    spec = importlib.util.spec_from_file_location(name, FAULTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_storm(script: Path, folder: Path, twin: str, seed: int, *arguments: str) -> Any:
    """Return what a storm counted. Whatever went wrong, none of its writers and readers is left running."""
    environment = {**os.environ, "KVSPOOL_NO_EXTENSIONS": "1" if twin == "interpreted" else "0"}
    command = [sys.executable, script, folder, str(seed), *arguments]
    with open(folder / "said", "w+", encoding="utf-8") as said, open(folder / "wrong", "w+", encoding="utf-8") as wrong:
        main = subprocess.Popen(command, env=environment, stdout=said, stderr=wrong, start_new_session=True)
        try:
            code = main.wait(240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(main.pid, signal.SIGKILL)
            main.wait()
    assert code == 0, f"seed {seed}:\n{(folder / 'wrong').read_text(encoding='utf-8')}"
    found = json.loads((folder / "said").read_text(encoding="utf-8"))
    print(found)
    assert found["twin"] == twin
    return found
