"""The examples of a page as one program for bash, so that tests and `tools/walk` follow the page to the letter.

Blocks of a page that count are, in its order:

    ```sh run                     commands that are run
    ```sh install                 commands that install kvspool; only `tools/walk` runs them
    ```python title="count.py"    the content of a file, which later commands use
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r'^( *)```(sh run|sh install|\w+ title="([\w.-]+)")\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
START = "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\nset -eumo pipefail\n"


class Example(NamedTuple):
    """A block of a page. kind: "run", "install" or "file"; name: of the file."""

    kind: str
    name: str
    text: str

    def commands(self) -> str:
        """Return the commands that do what the block says."""
        return f"cat > {self.name} << 'END OF FILE'\n{self.text}END OF FILE\n" if self.kind == "file" else self.text


def examples(page: str) -> list[Example]:
    """Return the examples of a page of docs, which is given without its suffix."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [
        Example("file" if name else info.split()[1], name, body.removeprefix(indent).replace("\n" + indent, "\n"))
        for indent, info, name, body in BLOCK.findall(text)
    ]


def program(found: Iterable[Example], *, installs: bool = False) -> str:
    """Return a program for bash that follows examples, and ends with the first command that fails. installs: also installs kvspool."""
    return START + "\n".join(one.commands() for one in found if installs or one.kind != "install")
