"""Journals: unbounded logs, in the formats of other programs and in kvspool's own."""

from kvspool.engine.reports import ArchiveReport, Removed
from kvspool.engine.retention import Floor, Retention, TrimPlan, TrimReport
from kvspool.engine.stats import Consumer
from kvspool.journal.appender import Torn
from kvspool.journal.damage import SegmentDamage
from kvspool.journal.fixed import FixedJournal
from kvspool.journal.format import JournalBatch
from kvspool.journal.journal import Journal
from kvspool.journal.reader import JournalReader

__all__ = [
    "ArchiveReport",
    "Consumer",
    "FixedJournal",
    "Floor",
    "Journal",
    "JournalBatch",
    "JournalReader",
    "Removed",
    "Retention",
    "SegmentDamage",
    "Torn",
    "TrimPlan",
    "TrimReport",
]
