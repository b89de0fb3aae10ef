"""The Pythons that are installed here and that kvspool supports."""

from __future__ import annotations

import os
import re
from pathlib import Path

import environment

PLACES = ("/usr/bin", "/usr/local/bin", "/opt/python/*/bin")  # besides the PATH and pyenv
QUESTION = "import sys; print(*sys.version_info[:3])"

Version = tuple[int, int]


def find() -> dict[Version, str]:
    """Return the path of the newest Python of each version, the oldest version first."""
    found: dict[Version, tuple[int, str]] = {}
    for path in _candidates():
        answer = environment.answer([path, "-c", QUESTION])
        if not re.fullmatch(r"\d+ \d+ \d+\s*", answer):
            continue  # such as a shim of pyenv for a version that is not selected
        major, minor, release = map(int, answer.split())
        if (major, minor) >= environment.OLDEST:
            found[major, minor] = max(found.get((major, minor), (-1, "")), (release, str(path)))
    return {version: path for version, (_, path) in sorted(found.items())}


def _candidates() -> list[Path]:
    """Return the paths that may be a Python, each once."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions", "*", "bin")
    folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep), *PLACES, str(pyenv)]
    paths = [path for folder in folders if folder for path in Path("/").glob(f"{folder.strip('/')}/python3.*")]
    return sorted({path.resolve() for path in paths if re.fullmatch(r"python3\.\d+", path.name)})
