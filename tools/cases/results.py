"""The result of a row: medians, quartiles, a ratio, and whether it meets its bar; as a line of text, and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from cases.case import Row, is_rate, median_of

LEAST_ROUNDS = 5  # required to tell a difference from noise
Result = dict[str, Any]


def measured(case: str, row: Row) -> Result:
    """Return the result of a row and its peer."""
    ours = [one for one, _ in row.pairs]
    floor = median_of(other for _, other in row.pairs)
    ratio = median_of(None if not other else one / other for one, other in row.pairs)
    figure = statistics.median(ours)
    return {
        "case": case,
        "row": row.name,
        "unit": row.unit,
        "figure": figure,
        "quartiles": quartiles(ours),
        "peer": row.peer,
        "peer_figure": floor,
        "ratio": ratio,
        **_judged(row, row.bar.is_met(row.unit, ratio=ratio, figure=figure)),
        **({} if row.processor is None else {"processor": row.processor}),
    }


def compared(case: str, new: Row, old: Row | None, missing: str = "") -> Result:
    """Return the result of a row and the same row of another revision; None: that has no such row, for the reason `missing`."""
    figures = [one for one, _ in new.pairs]
    result = {"case": case, "row": new.name, "unit": new.unit, "new": statistics.median(figures), "new_quartiles": quartiles(figures)}
    if old is None:
        return {**result, "verdict": "not there", "missing": missing}
    before = [one for one, _ in old.pairs]
    ratio = statistics.median(one / other for one, other in zip(figures, before, strict=False))
    speed_up = ratio if is_rate(new.unit) else 1 / ratio
    return {
        **result,
        "old": statistics.median(before),
        "old_quartiles": quartiles(before),
        "ratio": ratio,
        "verdict": verdict(figures, before, new.unit),
        **_judged(new, new.bar.is_met(new.unit, figure=result["new"], old=speed_up)),
    }


def quartiles(figures: list[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(figures) < 2:
        return figures[0], figures[0]
    first, _, third = statistics.quantiles(figures, n=4, method="inclusive")
    return first, third


def verdict(new: list[float], old: list[float], unit: str) -> str:
    """Return "slower" or "faster" if the median of each is outside all values of the other, else "same"; "" for too few rounds.

    With five rounds, one row in 50 is reported as slower by chance without any change; with ten, one in 1000. Non-overlapping quartiles
    would be much weaker evidence: one row in 10, and one in 60.
    """
    if min(len(new), len(old)) < LEAST_ROUNDS:
        return ""
    if max(new) < statistics.median(old) and statistics.median(new) < min(old):
        return "slower" if is_rate(unit) else "faster"
    if min(new) > statistics.median(old) and statistics.median(new) > max(old):
        return "faster" if is_rate(unit) else "slower"
    return "same"


def _judged(row: Row, is_met: bool | None) -> Result:
    return {"bar": row.bar.words(row.unit), "met": is_met}


# Lines.


def line(result: Result) -> str:
    """Return a result as a line of text."""
    unit = result["unit"]
    if "new" in result:
        parts = [f"new {_spread(result['new'], result['new_quartiles'])} {unit:<5}"]
        if result["verdict"] == "not there":
            parts.append(f"old: not there: {result['missing']}")
        else:
            parts += [f"old {_spread(result['old'], result['old_quartiles'])}", f"new/old {result['ratio']:6.2f}"]
            parts.append({"slower": "SLOWER", "same": "", "": ""}.get(result["verdict"], result["verdict"]).ljust(6))
    else:
        parts = [f"{_spread(result['figure'], result['quartiles'])} {unit:<5}"]
        peer = result["peer_figure"]
        parts.append(" " * 40 if peer is None else f"{result['peer']:<33} {_number(peer):>6}")
        parts.append(" " * 13 if result["ratio"] is None else f"ratio {result['ratio']:7.2f}")
    if "processor" in result:
        words = "CPU us a record: {client_us:.2f} client, {server_us:.2f} server; {floor_client_us:.2f}, {floor_server_us:.2f}"
        parts.append(words.format_map(result["processor"]))
    return f"{result['row']:<46} {'   '.join([*parts, *_bar(result)])}".rstrip()


def _bar(result: Result) -> Iterable[str]:
    if result.get("bar"):
        met = {True: "met", False: "NOT MET", None: "not measured by this run"}[result["met"]]
        yield f"bar {result['bar']}: {met}"


def _spread(figure: float, spread: tuple[float, float]) -> str:
    words = "" if spread[0] == spread[1] else f"({_number(spread[0])}..{_number(spread[1])})"
    return f"{_number(figure):>8} {words:<18}"


def _number(figure: float) -> str:
    """Return a number with three significant digits."""
    return f"{figure:.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
