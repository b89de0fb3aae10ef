"""Journals: logs without a bound, in the formats of the ancestors and in our own."""

from kvspool.journal.appender import Torn
from kvspool.journal.archive import ArchiveReport
from kvspool.journal.format import Batch
from kvspool.journal.journal import Journal, JournalStats
from kvspool.journal.reader import Consumer, JournalReader

__all__ = ["ArchiveReport", "Batch", "Consumer", "Journal", "JournalReader", "JournalStats", "Torn"]
