"""The pages for newcomers and operators are followed to the letter, and the commands of all pages and of the container exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub.errors import AccessError
from hub.security.access import Access
from kvspool.cli import completion, readers
from kvspool.cli.command import make_parser

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))
import examples  # noqa: E402

ADDRESS = re.compile(r"\b(127\.0\.0\.1|localhost):(707\d)\b")


def follow(program: str, place: Path) -> str:
    """Run a program of a page's examples with this kvspool, at free ports, and return what it printed; fail with all of it if it failed."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = {"7070": first.getsockname()[1], "7071": second.getsockname()[1]}
    program = ADDRESS.sub(lambda found: f"{found[1]}:{ports[found[2]]}", program)
    commands = place / "bin"
    commands.mkdir()
    for name, arguments in (("kvspool", "-m kvspool.cli"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    variables = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    (place / "work").mkdir()
    done = subprocess.run(["bash", "-c", program], cwd=place / "work", env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", ["backup", "upgrade", "capacity", "writers", "readers"])
def test_the_commands_of_a_page_do_what_it_says(page: str, tmp_path: Path) -> None:
    """All blocks run in one shell, in the order of the page; only the ports are others."""
    found = examples.examples(page)
    assert len(found) >= 2
    follow(examples.program(found), tmp_path)


def test_the_first_pages_append_read_and_ship(tmp_path: Path) -> None:
    said = follow(examples.program([*examples.examples("start"), *examples.examples("start-hub")]), tmp_path)
    assert said.count("billed") == 4  # by the first run of two
    assert '"logout"' in said  # followed
    assert re.findall(r"^me 0 (\d+) ", said, re.MULTILINE) == ["0", "1", "2", "3", "4"]  # client, shard and sequence, from the hub's root


PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
BEFORE_COMMAND = {"do", "exec", "if", "nohup", "sudo", "then", "while"}


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words after `kvspool` of each command in lines of a shell. Two spaces begin a remark, and so does #."""
    for line in text.replace("\\\n", " ").splitlines():
        if "kvspool " not in line or line.lstrip().startswith("#"):
            continue
        lexer = shlex.shlex(re.split(r"(?<=\S) {2,}(?=[^|&-])", line.strip())[0], posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;()<>"):
                words.append(word)
                continue
            while words and (words[0] in BEFORE_COMMAND or "=" in words[0]):
                del words[0]
            if words and words[0] == "kvspool":
                yield words[1:]
            words = ["(a file)"] if set(word) <= set("<>") else []


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of the pages, and of the examples in the help of commands, with its place."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [body for _, kind, body in BLOCK.findall(text) if kind in ("", "sh", "text")] + INDENTED.findall(BLOCK.sub("", text))
        yield from ((page.name, words) for block in blocks for words in commands_in(block))
    for name, parser in completion.commands(make_parser()):
        yield from ((f"{name} --help", words) for words in commands_in(parser.epilog or ""))


def test_each_command_of_the_pages_and_of_the_help_exists_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands are parsed, not run."""
    parser = make_parser()
    found = list(shown_commands())
    refused = []
    for place, words in found:
        try:
            parser.parse_args(words)
        except SystemExit as ended:
            if ended.code:
                refused.append((place, words, capsys.readouterr().err.splitlines()[-1]))
    assert refused == []
    assert len(found) > 300


def test_each_command_in_the_text_of_the_pages_exists_with_its_options() -> None:
    """As in `kvspool hub stats ROOT`, which may be without its arguments."""
    known = dict(completion.commands(make_parser()))
    wrong, count = [], 0
    for page in PAGES:
        for shown in re.findall(r"`kvspool ([^`]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            words, name = shown.split(), "kvspool"
            while words and f"{name} {words[0]}" in known:
                name = f"{name} {words.pop(0)}"
            options = {word.partition("=")[0] for word in words if word.startswith("-")} - {"--"}
            is_command = name != "kvspool" or words[0] in (*readers.ALIASES, "COMMAND", "--help", "--version")
            if options - set(known[name]._option_string_actions) or not is_command:
                wrong.append((page.name, shown))
            count += 1
    assert wrong == []
    assert count > 150


OLD_READER = """\
kvspool create events
python -c 'import kvspool; from hub.client import hubs; kvspool.open("events").reader(hubs.reader_name("grpc+tls://hub1.example.org:7070")).close()'
"""


@pytest.mark.parametrize(
    ("page", "before", "expected"),
    [
        ("hub", "kvspool hub create ROOT", ["jfk*", "audit"]),
        ("security", "", ["ca.pem, ca.key, server.pem and server.key", "of spark is in spark.token"]),
        ("shipping", OLD_READER, ["ship."]),
    ],
)
def test_the_commands_in_the_text_of_a_page_do_what_it_says(page: str, before: str, expected: list[str], tmp_path: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = [block for block in INDENTED.findall(BLOCK.sub("", text)) if "kvspool " in block and "-->" not in block]
    lines = [re.sub(r"(?<=\S) {2,}(?=[^|&-]).*", "", line.strip()) for block in blocks for line in block.splitlines()]
    assert len(lines) >= 3
    said = follow("\n".join(["set -euo pipefail", before, *lines]), tmp_path)
    assert all(word in said for word in expected), said


def test_the_access_file_of_the_page_on_security_is_accepted_and_an_unknown_word_refused(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    path = tmp_path / "access.toml"
    path.touch(0o600)
    text = textwrap.dedent(page[page.index("    [[principals]]") : page.index("\n| | client | reader")])
    path.write_text(text, encoding="utf-8")
    Access.load(path)
    path.write_text(f"unknown = 1\n{text}", encoding="utf-8")
    with pytest.raises(AccessError, match="unknown"):
        Access.load(path)


ENDLESS = re.compile(r" -f\b| --follow\b| --watch\b")  # commands that a user stops


def test_each_line_of_the_page_of_commands_does_what_it_says(tmp_path: Path) -> None:
    """In the order of the page, with 2,000 records before the third line. Commands that don't end are stopped with Ctrl-C."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) for line in block.splitlines()]
    lines.insert(2, "seq 2000 | kvspool append events")
    assert len(lines) > 25
    words = []
    for line in lines:
        line = line.replace("/var/spool", ".")
        run = f"timeout -s INT 3 bash -c {shlex.quote(line)} || [ $? = 124 ]" if ENDLESS.search(line) else line
        words.append(f"echo {shlex.quote('$ ' + line)}; {run}")
    places = 'export HOME=$PWD; mkdir -p .local/share/bash-completion/completions .local/share/man/man1'
    said = follow("\n".join(["set -euo pipefail", places, *words]), tmp_path)
    answers = {one.partition("\n")[0].partition("#")[0].strip(): one.partition("\n")[2] for one in said.split("$ ")}
    assert answers["kvspool get events 1000"].split()[1:] == ["1000", "-", "1000"]
    assert "2001" in answers["kvspool stats events --json"]
    assert answers["kvspool queue get jobs --limit 10"].split() == [str(number) for number in range(1, 11)]
    assert (tmp_path / "work" / ".local/share/man/man1/kvspool-tail.1").exists()


def test_the_container_runs_a_command_that_exists_with_options_that_it_has() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
    found = {word: json.loads(line) for word, line in re.findall(r"^(ENTRYPOINT|CMD) +(\[.*\])$", text, re.MULTILINE)}
    assert found["ENTRYPOINT"] == ["kvspool"]
    arguments = make_parser().parse_args(found["CMD"])
    assert str(arguments.root).startswith("/var/lib/kvspool/") and arguments.listen == ("0.0.0.0", 7070)
    assert arguments.page == ("127.0.0.1", 7071) and "127.0.0.1:7071/healthz" in text  # the health check
    assert "kvspool[hub] @" in text and "USER 10001" in text
