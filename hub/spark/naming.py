"""Names of options: case-insensitive lookup, and errors for other names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def named(given: Mapping[str, str], names: Iterable[str], refused: Mapping[str, str], what: str) -> dict[str, str]:
    """Return the options by their names in `names`.

    refused: why some options of Kafka have no meaning here, by name in lower case, or by a prefix that ends with a dot. what: the use of
    the options, for messages.

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
    return f"unknown option {name!r} for {what}{hint}; the options are {', '.join(sorted(known.values(), key=str.lower))}"
