"""The Pythons that are installed here and that kvspool supports."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import environment

PLACES = ("/usr/bin", "/usr/local/bin", "/opt/python/*/bin")  # besides the PATH and pyenv
QUESTION = "import sys, sysconfig; print(*sys.version_info[:3], int(sysconfig.get_config_var('Py_GIL_DISABLED') or 0))"


class Version(NamedTuple):
    """A version of Python: 3.14, or 3.14t for a free-threaded build."""

    major: int
    minor: int
    is_free_threaded: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{'t' * self.is_free_threaded}"


def find() -> dict[Version, str]:
    """Return the path of the newest Python of each version, the oldest version first."""
    found: dict[Version, tuple[int, str]] = {}
    for path in _candidates():
        answer = environment.answer([path, "-c", QUESTION])
        if not re.fullmatch(r"\d+ \d+ \d+ \d\s*", answer):
            continue  # such as a shim of pyenv for a version that is not selected
        major, minor, release, is_free_threaded = map(int, answer.split())
        if (major, minor) >= environment.OLDEST:
            version = Version(major, minor, bool(is_free_threaded))
            found[version] = max(found.get(version, (-1, "")), (release, str(path)))
    return {version: path for version, (_, path) in sorted(found.items())}


def choose(names: Sequence[str]) -> dict[Version, str]:
    """Return what `find` returns, or only the versions with these names, in their order. Raises SetupError for a missing one."""
    found = {str(version): (version, path) for version, path in find().items()}
    missing = {*names} - {*found}
    if missing:
        raise environment.SetupError(f"there is no Python {', '.join(sorted(missing))} here, only {', '.join(found)}")
    return dict(found[name] for name in names or found)


def _candidates() -> list[Path]:
    """Return the paths that may be a Python, each once."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions", "*", "bin")
    folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep), *PLACES, str(pyenv)]
    paths = [path for folder in folders if folder for path in Path("/").glob(f"{folder.strip('/')}/python3.*")]
    return sorted({path.resolve() for path in paths if re.fullmatch(r"python3\.\d+t?", path.name)})
