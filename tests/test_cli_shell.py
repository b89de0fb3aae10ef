"""`kvspool completion` and `kvspool man`: made from the parsers, so that they know every command and option."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from kvspool.cli import completion, main, plugins
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
    parser = make_parser(plugins.load())
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


def test_every_option_of_every_command_is_in_the_scripts_and_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser(plugins.load())
    assert main(["man", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"wrote {len(list(tmp_path.iterdir()))} pages to {tmp_path}\n"
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


def test_troff_has_no_complaint_about_a_page(tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff")
    main(["man", str(tmp_path)])
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
