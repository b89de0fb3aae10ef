"""The parser of all commands: its help, ages such as -5m as values, and suggestions for mistyped words."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from kvspool.cli.words import suggestion

_AGE = re.compile(r"-\.?\d")


class Parser(argparse.ArgumentParser):
    """A parser with the same help layout for every command, including those of plugins. It takes ages such as -5m, and knows typos."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._negative_number_matcher = _AGE  # values that begin with a dash
        self.input_words = ""  # of a command that reads standard input: how to give it a value

    def format_help(self) -> str:
        """Return the help, in colours for a terminal."""
        self._set_formatter()
        return super().format_help()

    def format_usage(self) -> str:
        """Return the usage, in colours for a terminal."""
        self._set_formatter()
        return super().format_usage()

    def _set_formatter(self) -> None:
        from kvspool.cli.formatter import Formatter

        self.formatter_class = Formatter

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and report options that this command doesn't have, with its own usage."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and not self.children():
            self._refuse(rest)
        return found, rest

    def _refuse(self, rest: list[str]) -> NoReturn:
        """Report the words that are left. Words after an unknown option may be its values, so the option alone is named."""
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if unknown is not None:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            self.error(f"there is no option {unknown}{suggestion(unknown, known) or f'; {self.prog} --help lists all'}")
        hint = f"; {self.input_words}" if self.input_words else f"; {self.prog} --help has examples"
        self.error(f"unknown {'argument' if len(rest) == 1 else 'arguments'}: {' '.join(rest)}{hint}")

    def error(self, message: str) -> NoReturn:
        """End with a message; a mistyped command or choice gets a suggestion."""
        found = re.match(r"argument (.+): invalid choice: '(.*?)' \(choose from (.*)\)$", message)
        if found is not None:
            name, word, choices = found.groups()
            known = [choice.strip(" '") for choice in choices.split(",")]
            hint = suggestion(word, known)
            if name == "COMMAND":
                message = f"there is no command {word}{hint or f'; {self.prog} --help lists all'}"
            else:
                message = f"{name} is {', '.join(known[:-1])} or {known[-1]}, not {word!r}{hint}"
        lone = re.match(r"argument (.+): expected (?:one|at least one) argument$", message)
        if lone is not None:
            message = f"{lone[1]} needs a value; {self.prog} --help has examples"
        several = re.match(r"argument (.+): expected \d+ arguments$", message)
        if several is not None:
            values = self._option_string_actions[several[1].split("/")[0]].metavar or ()
            message = f"{several[1]} needs {' and '.join(values)}; {self.prog} --help has examples"
        either = re.match(r"one of the arguments (.+) is required$", message)
        if either is not None:
            message = f"one of {' or '.join(either[1].split())} is missing; {self.prog} --help has examples"
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            names = " and ".join(missing.rsplit(", ", 1))
            message = f"{names} {'are' if ', ' in missing else 'is'} missing; {self.prog} --help has examples"
        super().error(message)

    def children(self) -> dict[str, Parser]:
        """Return the parsers of the commands below this one, by name; other names of the same command are left out."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names = [one.dest for one in action._choices_actions]
                return {name: action.choices[name] for name in names}
        return {}

    def summaries(self) -> dict[str, str]:
        """Return the one line about each command below this one."""
        found = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {one.dest: one.help or "" for action in found for one in action._choices_actions}
