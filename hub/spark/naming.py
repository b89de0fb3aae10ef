"""Names of options: which ones there are, in whatever case they are written, and what is said of others."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def named(given: Mapping[str, str], names: Iterable[str], refused: Mapping[str, str], what: str) -> dict[str, str]:
    """Return the options by their names in `names`. refused: why some that Kafka has mean nothing here, by name in small letters, or by
    the beginning of one, with a dot at its end. what: they are for.

    Raises ValueError for any other option.
    """
    known = {name.lower(): name for name in names}
    options = {}
    for name, value in given.items():
        if name.lower() not in known:
            raise ValueError(_unknown(name.lower(), known, refused, what))
        options[known[name.lower()]] = value
    return options


def _unknown(name: str, known: Mapping[str, str], refused: Mapping[str, str], what: str) -> str:
    why = next((words for begin, words in refused.items() if name == begin or (begin.endswith(".") and name.startswith(begin))), None)
    if why is not None:
        return f"option {name} has no meaning for {what}: {why}"
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {known[near[0]]}?" if near else ""
    return f"unknown option {name!r} for {what}{hint}; there are {', '.join(sorted(known.values(), key=str.lower))}"
