"""`kvspool completion` and `kvspool man`: made from the parsers, so that they know every command and option."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import Run

from kvspool.cli import completion
from kvspool.cli.command import make_parser

TRIES = {
    "bash": """
source "$1"
try() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=(); _kvspool 2> /dev/null; echo "${{COMPREPLY[*]}}"; }}
try {words}
""",
    "zsh": """
autoload -Uz compinit; compinit -u -D
_describe() {{ print -l -- ${{found%%:*}} }}
_files() {{ print -l -- *(N) }}
compadd() {{ shift; print -l -- "$@" }}
source "$1"
try() {{ words=("$@"); CURRENT=$#; found=(); _kvspool }}
try {words}
""",
    "fish": """
source $argv[1]
complete -C "kvspool {line}"
""",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the script for each shell, and a file to complete."""
    place = tmp_path_factory.mktemp("scripts")
    parser = make_parser()
    for shell, script in completion.SCRIPTS.items():
        (place / f"{shell}.script").write_text(script(parser))
    (place / "events").touch()
    return place


@pytest.mark.parametrize("shell", list(TRIES))
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ta", {"tail", "table", "tasks"}),
        ("hub se", {"serve"}),
        ("hub serve --lev", {"--level"}),
        ("create --format f", {"fflg", "fixed"}),
        ("tail ev", {"events"}),
    ],
)
def test_a_shell_completes_commands_options_values_and_files(scripts: Path, shell: str, line: str, expected: set[str]) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell}")
    words = " ".join(["kvspool", *(word or "''" for word in line.split(" "))])
    program_text = TRIES[shell].format(words=words, line=line)
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    marker = [] if shell == "fish" else ["sh"]
    command = [program, *options, "-c", program_text, *marker, f"{shell}.script"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True)
    begun = line.split(" ")[-1]
    found = {word.partition("\t")[0] for row in done.stdout.splitlines() for word in (row.split() if shell == "bash" else [row])}
    assert {word for word in found if word.startswith(begun)} == expected, done.stderr


def test_every_option_of_every_command_is_in_the_scripts_and_pages(tmp_path: Path, run: Run) -> None:
    parser = make_parser()
    assert run("man", tmp_path).out == f"wrote {len(list(tmp_path.iterdir()))} pages to {tmp_path}\n"
    scripts = {shell: script(parser) for shell, script in completion.SCRIPTS.items()}
    count = 0
    for path, one in completion.commands(parser):
        page = (tmp_path / f"{path.replace(' ', '-')}.1").read_text()
        for option in completion.options(one):
            name = completion.long_name(option)
            assert name.replace("-", "\\-") in page
            assert all((name if shell != "fish" else name.lstrip("-")) in script for shell, script in scripts.items())
            count += 1
    assert count > 200


def test_troff_has_no_complaint_about_a_page(tmp_path: Path, run: Run) -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    run("man", tmp_path)
    pages = sorted(tmp_path.iterdir())
    done = subprocess.run(["groff", "-ww", "-z", "-man", "-Tutf8", *pages], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_shows_lines_that_troff_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    from kvspool.cli.man import page
    from kvspool.cli.parsing import Parser

    parser = Parser(prog="kvspool odd", description=".SH not a section\n'quoted' \\*(rs", epilog="Examples:\n  .so file")
    parser.add_argument("--x", help=argparse.SUPPRESS)
    shown = page("kvspool odd", parser, "100% -odd")
    assert "\\&.SH not a section" in shown and "\\(aqquoted" in shown and "\\e*(rs" in shown and ".so file" in shown
    assert "--x" not in shown and "\\-\\-x" not in shown


COMMANDS = dict(completion.commands(make_parser()))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "kvspool"])
def test_the_help_of_each_command_has_its_usage_and_an_example(command: str, run: Run) -> None:
    shown = run(*command.split()[1:], "--help").out
    assert "Examples:" in shown
    assert shown.count(command) >= 2


GROUPS = [name for name in COMMANDS if any(other.startswith(f"{name} ") for other in COMMANDS) and name != "kvspool"]


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_commands_alone_prints_its_help_and_ends_with_2(group: str, run: Run) -> None:
    assert "Examples:" in run(*group.split()[1:], code=2).err


DIFFERENT = {
    "--client": {"PATTERN", "ID"},  # clients at a hub, and the client itself
    "--forget": {"NAME", None},  # producers, and rules
    "--format": {None},
    "--key": {"TEXT", "FILE"},  # of records, and of certificates
    "--level": {"N", None},  # of compression, and of durability
    "--name": {"HOST", None},
    "--output": {"FILE", "DIR"},
    "--set": {("NAME", "START"), None},  # a reader, and rules
}
"""Options whose values differ between commands."""


def test_an_option_has_the_same_kind_of_value_in_each_command() -> None:
    found: dict[str, set[object]] = {}
    for one in COMMANDS.values():
        for option in completion.options(one):
            name = completion.long_name(option)
            found.setdefault(name, set()).add(option.metavar)
    assert {name: values for name, values in found.items() if len(values) > 1 or name in DIFFERENT} == DIFFERENT
    assert len(found) > 100

