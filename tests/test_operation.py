"""The operator's pages are followed to the letter, and the recipe of the container runs commands that exist."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvspool.cli import plugins
from kvspool.cli.command import make_parser

ROOT = Path(__file__).resolve().parents[1]
START = "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\nset -eumo pipefail\n"
BLOCK = re.compile(r"^( *)```sh run\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["backup", "upgrade", "capacity"])
def test_the_commands_of_a_page_do_what_it_says(page: str, tmp_path: Path) -> None:
    """All blocks run in one shell, in the order of the page; only the port is another one."""
    blocks = [
        block.replace("\n" + indent, "\n") for indent, block in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    ]
    assert len(blocks) >= 2
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = START + "\n".join(blocks).replace("127.0.0.1:7070", f"127.0.0.1:{port}")
    command = Path(tmp_path, "bin", "kvspool")
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvspool.cli "$@"\n')
    command.chmod(0o755)
    variables = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    (tmp_path / "work").mkdir()
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path / "work", env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_container_runs_a_command_that_exists_with_options_that_it_has() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
    found = {word: json.loads(line) for word, line in re.findall(r"^(ENTRYPOINT|CMD) +(\[.*\])$", text, re.MULTILINE)}
    assert found["ENTRYPOINT"] == ["kvspool"]
    arguments = make_parser(plugins.load()).parse_args(found["CMD"])
    assert str(arguments.root).startswith("/var/lib/kvspool/") and arguments.listen == ("0.0.0.0", 7070)
    assert arguments.page == ("127.0.0.1", 7071) and "127.0.0.1:7071/healthz" in text  # the health check
    assert "kvspool[hub] @" in text and "USER 10001" in text
