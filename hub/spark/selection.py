"""The selection of a query's shards, by `subscribe`, `subscribePattern` and `assign`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hub.spark.shards import ShardKey


@dataclass(frozen=True)
class Selection:
    """Names topics, or shards of them, or a pattern for the whole name of a topic; an empty selection has all shards.

    It is pickled with a reader; the module `re` pickles the compiled pattern.
    """

    topics: frozenset[str] | None = None
    pattern: str | None = None
    shards: frozenset[ShardKey] | None = field(default=None)

    @property
    def is_all(self) -> bool:
        """Return whether every shard is selected."""
        return self.topics is None and self.pattern is None and self.shards is None

    def has_topic(self, topic: str) -> bool:
        """Return whether shards of a topic may be selected."""
        if self.shards is not None:
            return any(key.topic == topic for key in self.shards)
        if self.topics is not None:
            return topic in self.topics
        return self.pattern is None or re.fullmatch(self.pattern, topic) is not None

    def has(self, key: ShardKey) -> bool:
        """Return whether a shard is selected."""
        return key in self.shards if self.shards is not None else self.has_topic(key.topic)

    def missing(self, found: Iterable[ShardKey]) -> list[str]:
        """Return descriptions of shards and topics that are selected by name and don't exist."""
        there = set(found)
        if self.shards is not None:
            return [f"partition {key.partition} of {key.topic}" for key in sorted(self.shards - there)]
        return sorted((self.topics or frozenset()) - {key.topic for key in there})

    def __str__(self) -> str:
        if self.shards is not None:
            return "assign " + ", ".join(f"{key.topic}/{key.partition}" for key in sorted(self.shards))
        if self.topics is not None:
            return "subscribe " + ", ".join(sorted(self.topics))
        return "everything" if self.pattern is None else f"subscribePattern {self.pattern}"


ALL = Selection()
