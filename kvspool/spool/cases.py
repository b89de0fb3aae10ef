"""The decision of a recovery: which frames count, and where the log ends."""

from __future__ import annotations

from typing import Literal, NamedTuple

CONDITIONS: dict[str, tuple[str, ...]] = {
    # The last sound frame: none; included in the checkpoint, as its last one or not; or newer.
    "newest": ("none", "last", "known", "newer"),
    # Whether the ring can hold all from the checkpoint's head to the end of that frame.
    "room": ("fits", "over"),
    # Whether frames newer than the checkpoint follow the last one. Later: yes, of the previous lap, and all frames of the checkpoint were
    # dropped. Doubtful: or else the last one is of a writer that was killed before it published it.
    "lap": ("same", "doubtful", "later"),
    # The tail in the control block, compared to the end; unknown: it has no mark.
    "recorded": ("before", "at", "ahead", "unknown"),
}
ANY = "any"


class Case(NamedTuple):
    """Conditions, and the conclusions: the end of the log, the frames that count, and whether records are reported as cut."""

    name: str
    newest: str
    room: str
    lap: str
    recorded: tuple[str, ...] | str
    ends: Literal["checkpoint", "newest"]
    counts: Literal["all", "newer"]
    is_cut: bool


_NOT_AHEAD = ("before", "at", "unknown")

CASES = (
    # No record: the log was empty, or all records of the checkpoint are damaged.
    Case("no record found", "none", ANY, ANY, _NOT_AHEAD, "checkpoint", "all", False),
    Case("no record found, unsynced ones lost", "none", ANY, ANY, "ahead", "checkpoint", "all", True),
    # The newest frame ends before the checkpoint does: the last synced records are damaged, and are not overwritten.
    Case("synced records damaged at the end", "known", ANY, ANY, _NOT_AHEAD, "checkpoint", "all", False),
    Case("synced records damaged at the end, unsynced ones lost", "known", ANY, ANY, "ahead", "checkpoint", "all", True),
    # Only synced records.
    Case("as it was synced", "last", ANY, ANY, _NOT_AHEAD, "checkpoint", "all", False),
    Case("as it was synced, unsynced records lost", "last", ANY, ANY, "ahead", "checkpoint", "all", True),
    # Synced records, and later ones.
    Case("rolled forward", "newer", "fits", "same", _NOT_AHEAD, "newest", "all", False),
    Case("rolled forward, unsynced records lost", "newer", "fits", "same", "ahead", "newest", "all", True),
    # Newer frames have begun to overwrite the oldest ones of the checkpoint.
    Case("oldest records overwritten", "newer", "over", "same", _NOT_AHEAD, "newest", "all", False),
    Case("oldest records overwritten, unsynced ones lost", "newer", "over", "same", "ahead", "newest", "all", True),
    # Perhaps a lap later; synced records win if the two can't be distinguished.
    Case("perhaps a lap on", "newer", ANY, "doubtful", _NOT_AHEAD, "newest", "all", False),
    Case("perhaps a lap on, unsynced records lost", "newer", ANY, "doubtful", "ahead", "newest", "all", True),
    # Newer frames continued into a further lap: all records of the checkpoint were dropped.
    Case("a lap on", "newer", ANY, "later", _NOT_AHEAD, "newest", "newer", False),
    Case("a lap on, unsynced records lost", "newer", ANY, "later", "ahead", "newest", "newer", True),
)


def decide(conditions: dict[str, str]) -> Case:
    """Return the one case whose conditions hold."""
    (case,) = [case for case in CASES if matches(case, conditions)]
    return case


def matches(case: Case, conditions: dict[str, str]) -> bool:
    """Return whether all conditions of a case hold."""
    for kind, value in conditions.items():
        wanted = getattr(case, kind)
        if wanted != ANY and value != wanted and (isinstance(wanted, str) or value not in wanted):
            return False
    return True
