"""`kvspool completion`: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvspool.cli.command import make_parser

if TYPE_CHECKING:
    from kvspool.cli.parsing import Parser

NAME = "completion"
SUMMARY = "print a script that completes the command in a shell"
DESCRIPTION = """\
Print a script for bash, zsh or fish that completes the names of commands, options and their values, and files elsewhere. It knows the
commands of all packages that are installed now."""
EXAMPLES = """\
  kvspool completion bash > ~/.local/share/bash-completion/completions/kvspool
  kvspool completion zsh > ~/.zfunc/_kvspool        with fpath+=~/.zfunc before compinit
  kvspool completion fish > ~/.config/fish/completions/kvspool.fish"""

BASH = """\
# completion of kvspool for bash
_kvspool() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} path="kvspool" at word
    for ((at = 1; at < COMP_CWORD; at++)); do
        word=${{COMP_WORDS[at]}}
        [[ $word == -* ]] && continue
        case "|{paths}|" in *"|$path $word|"*) path="$path $word" ;; *) break ;; esac
    done
    local choices=""
    case "$path $previous" in
{values}
    esac
    if [[ -z $choices ]]; then
        case "$path" in
{words}
        esac
        [[ $current != -* && -n $choices ]] && choices=" $choices " && choices=${{choices// --+([a-z0-9-])/}}
    fi
    mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$current")
    if [[ ${{#COMPREPLY[@]}} -eq 0 && $current != -* ]]; then
        compopt -o filenames 2> /dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}}
complete -F _kvspool kvspool
"""

ZSH = """\
#compdef kvspool
# completion of kvspool for zsh
_kvspool() {{
    local path="kvspool" word
    local -a found
    for word in ${{words[2,CURRENT-1]}}; do
        [[ $word == -* ]] && continue
        [[ "|{paths}|" == *"|$path $word|"* ]] || break
        path="$path $word"
    done
    case "$path ${{words[CURRENT-1]}}" in
{values}
    esac
    case "$path" in
{words}
    esac
    if [[ ${{words[CURRENT]}} == -* ]]; then
        found=(${{(M)found:#--*}})
    else
        found=(${{found:#--*}})
        (( ${{#found}} )) || {{ _files; return }}
    fi
    _describe -t commands kvspool found
}}
if [[ $funcstack[1] == _kvspool ]]; then _kvspool "$@"; else compdef _kvspool kvspool; fi
"""

FISH = """\
# completion of kvspool for fish
function __kvspool_at
    set -l path kvspool
    for word in (commandline -opc)[2..-1]
        string match -q -- '-*' $word; and continue
        contains -- "$path $word" {paths}; or break
        set path "$path $word"
    end
    test "$path" = "$argv"
end
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SCRIPTS), help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(SCRIPTS[arguments.shell](make_parser()), end="")
    return 0


def commands(parser: Parser, path: str = "kvspool") -> Iterator[tuple[str, Parser]]:
    """Yield each command's words, such as "kvspool hub serve", and its parser; the command itself first."""
    yield path, parser
    for name, child in parser.children().items():
        yield from commands(child, f"{path} {name}")


def options(parser: Parser) -> list[argparse.Action]:
    """Return the options of a command that its help shows."""
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def long_name(option: argparse.Action) -> str:
    """Return the option's long name, or its short one if it has no other."""
    return next((name for name in option.option_strings if name.startswith("--")), option.option_strings[0])


def bash(parser: Parser) -> str:
    """Return the script for bash."""
    words, values = [], []
    for path, one in commands(parser):
        choices = [*one.children(), *(long_name(option) for option in options(one) if long_name(option).startswith("--")), *_places(one)]
        words.append(f'            "{path}") choices="{" ".join(choices)}" ;;')
        for option, known in _choices(one):
            names = " | ".join(f'"{path} {name}"' for name in option.option_strings)
            values.append(f'        {names}) choices="{" ".join(known)}" ;;')
    # The pattern +( ) needs extglob while the function is defined.
    return "shopt -s extglob\n" + BASH.format(paths=_paths(parser), words="\n".join(words), values="\n".join(values))


def zsh(parser: Parser) -> str:
    """Return the script for zsh."""
    words, values = [], []
    for path, one in commands(parser):
        described = [_described(name, text) for name, text in one.summaries().items()]
        described += [_described(long_name(option), option.help or "") for option in options(one) if long_name(option).startswith("--")]
        described += [_described(value, "") for value in _places(one)]
        words.append(f'        "{path}") found=({" ".join(described)}) ;;')
        for option, known in _choices(one):
            names = "|".join(f'"{path} {name}"' for name in option.option_strings)
            values.append(f"        {names}) compadd -- {' '.join(known)}; return ;;")
    return ZSH.format(paths=_paths(parser), words="\n".join(words), values="\n".join(values))


def fish(parser: Parser) -> str:
    """Return the script for fish."""
    paths = " ".join(_quoted(path) for path, _ in commands(parser))
    lines = [FISH.format(paths=paths)]
    for path, one in commands(parser):
        at = f"complete -c kvspool -n '__kvspool_at {path}'"
        summaries = one.summaries()
        lines += [f"{at} -f -a {_quoted(name)} -d {_quoted(text)}" for name, text in summaries.items()]
        lines += [f"{at} -f -a {_quoted(value)}" for value in _places(one)]
        for option in options(one):
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.option_strings)
            known = dict(_choices(one)).get(option)
            takes = f" -x -a {_quoted(' '.join(known))}" if known else "" if option.nargs == 0 else " -r"
            lines.append(f"{at} {names}{takes} -d {_quoted(_first_words(option.help or ''))}")
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _paths(parser: Parser) -> str:
    return "|".join(path for path, _ in commands(parser))


def _choices(parser: Parser) -> list[tuple[argparse.Action, list[str]]]:
    """Return the options with a fixed set of values."""
    return [(option, [str(choice) for choice in option.choices]) for option in options(parser) if option.choices]


def _places(parser: Parser) -> list[str]:
    """Return the possible values of positional arguments."""
    positional = [action for action in parser._actions if not action.option_strings and not parser.children()]
    return [str(choice) for action in positional for choice in action.choices or ()]


def _first_words(text: str) -> str:
    """Return a help text without argparse's placeholders, up to 60 characters."""
    plain = text.replace("(default: %(default)s)", "").replace("%%", "%").strip()
    return plain if len(plain) <= 60 else f"{plain[:59].rpartition(' ')[0]} ..."


def _described(name: str, text: str) -> str:
    escaped = _first_words(text).replace(":", "\\:")
    return _quoted(f"{name}:{escaped}" if escaped else name)


def _quoted(text: str) -> str:
    """Return a text in single quotes, for any of the shells."""
    return "'" + text.replace("\\", "\\\\").replace("'", "'\"'\"'") + "'"
