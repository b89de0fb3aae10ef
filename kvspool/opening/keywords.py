"""Keyword arguments that a function collects by name: unknown ones are refused, with the nearest known name."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def refuse_unknown(function: str, given: Iterable[str], known: Collection[str], owner: str = "") -> None:
    """Raise TypeError for a name in `given` that isn't in `known`. owner: what takes the known names, if that isn't the function."""
    for name in given:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"{owner or 'it'} takes {', '.join(sorted(known)) or 'no options'}"
            whose = f" for {owner}" if owner else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{whose}; {advice}")
