"""The measured source trees: this one, and another revision of the repository, built next to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TOOLS = Path(__file__).resolve().parents[1]
ROOT = TOOLS.parent
LAST_WORDS = 20  # lines of a failed command that are shown
Build = Callable[[Path], None]


class TreeError(Exception):
    """A revision cannot be measured; the message says why."""


class Tree(NamedTuple):
    """A folder with the packages, and its name in the output."""

    name: str
    path: Path

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that imports the packages of this tree, and our cases."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.path), str(TOOLS)])}

    def describe(self) -> str:
        """Return the version and the twin of the tree. Raises TreeError if it can't be imported."""
        program = (
            "import json, kvspool\n"
            "try: from kvspool.kernel import frames\n"
            "except ImportError: from kvspool import _frames as frames\n"  # where it was in earlier revisions
            "print(json.dumps([kvspool.__version__, frames.TWIN, kvspool.__file__]))"
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-c", program], env=self.environment(), cwd="/", capture_output=True, text=True)
        if done.returncode:
            raise TreeError(f"{self.name} cannot be imported:\n{_end_of(done.stderr)}")
        version, twin, file = json.loads(done.stdout)
        if not Path(file).is_relative_to(self.path):
            raise TreeError(f"{self.name}: Python imports {file} instead of {self.path}")
        return f"{self.name}: kvspool {version}, {twin} twin"


HERE = Tree("new", ROOT)


def compile_twins(tree: Path) -> None:
    """Build the compiled twins of a tree with the running interpreter. Raises TreeError."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise TreeError(f"setup.py build_ext failed; it needs Cython, setuptools and a C compiler:\n{_end_of(done.stdout)}")
    for source in (source for package in ("kvspool", "shard") for source in tree.glob(f"{package}/**/*_c.pxd")):  # build/ has copies
        if not list(source.parent.glob(f"{source.stem}.*.so")):  # setup.py continues without a twin that does not compile
            raise TreeError(f"setup.py built no {source.stem}:\n{_end_of(done.stdout)}")


@contextmanager
def revision(name: str, folder: Path, build: Build = compile_twins) -> Iterator[Tree]:
    """Check out a revision below `folder`, build its twins, and remove it at the end.

    Raises TreeError for a name that is no revision, and for one that does not build.
    """
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", words=f"{name!r} is no revision of {ROOT}")
    path = folder / commit[:12]
    _git("worktree", "add", "--quiet", "--detach", str(path), commit, words=f"cannot check out {name} ({commit[:12]})")
    try:
        try:
            build(path)
        except TreeError as error:
            raise TreeError(f"{name} ({commit[:12]}) does not build: {error}") from error
        yield Tree("old", path)
    finally:
        _git("worktree", "remove", "--force", str(path), words=f"cannot remove the worktree {path}")


def _git(*arguments: str, words: str) -> str:
    """Return the output of a git command. Raises TreeError, with `words` and git's output."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise TreeError(f"{words}: there is no git on the PATH") from None
    if done.returncode:
        raise TreeError(f"{words}\n{_end_of(done.stderr)}".rstrip())
    return done.stdout.strip()


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_WORDS:])
