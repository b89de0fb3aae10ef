"""Faults of links, chosen by dice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hosts.cluster import Link

WAYS = ("both", "up", "down")
FAULTS: tuple[tuple[str, str, float], ...] = (  # names, their counts, and largest values
    ("cut", "cut", 1.0),
    ("loss", "lost", 0.4),
    ("delay", "delayed", 0.2),
    ("jitter", "delayed", 0.2),
    ("reorder", "reordered", 0.4),
    ("duplicate", "duplicated", 0.4),
    ("rate", "delayed", 100_000.0),
)


def break_link(link: Link, dice: random.Random, counts: Counter[str], wait_for: Callable[[Callable[[], bool], str], None]) -> None:
    """Set one or two faults, count them, and wait until one of them has hit a packet.

    wait_for: waits until a function returns True, or raises an error with the words.
    """
    way = dice.choice(WAYS)
    towards = Link(link.folder, link.second, link.first) if way == "down" else link
    faults = dice.sample(FAULTS, dice.randint(1, 2))
    before = link.counts()
    for fault, _, most in faults:
        value = True if fault == "cut" else most * (0.2 + 0.8 * dice.random())
        towards.set(one_way=way != "both", **{fault: value})
    wait_for(lambda: any(link.counts()[count] > before[count] for _, count, _ in faults), f"no packet is hit by {faults}")
    for fault, _, _ in faults:
        counts[f"{fault} {way}"] += 1
