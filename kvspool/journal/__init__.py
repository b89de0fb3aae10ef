"""Journals: unbounded logs, in the formats of other programs and in kvspool's own."""

from kvspool.journal.appender import Torn
from kvspool.journal.archive import ArchiveReport
from kvspool.journal.damage import SegmentDamage
from kvspool.journal.fixed import FixedJournal
from kvspool.journal.format import JournalBatch
from kvspool.journal.journal import Journal
from kvspool.journal.reader import Consumer, JournalReader
from kvspool.journal.repair import JournalRepairReport, Removed
from kvspool.journal.retention import Floor, Retention
from kvspool.journal.stats import JournalStats
from kvspool.journal.trim import TrimPlan, TrimReport

__all__ = [
    "ArchiveReport",
    "Consumer",
    "FixedJournal",
    "Floor",
    "Journal",
    "JournalBatch",
    "JournalReader",
    "JournalRepairReport",
    "JournalStats",
    "Removed",
    "Retention",
    "SegmentDamage",
    "Torn",
    "TrimPlan",
    "TrimReport",
]
