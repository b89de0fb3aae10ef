"""The errors of the library in the words of the command: `kvspool create` instead of `kvspool.create`, options instead of parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# A pattern in a message of the library, and its replacement. Each pattern has a test with the error that it is for.
PHRASES = (
    (r"kvspool\.create creates a log", "`kvspool create` makes a log, `kvspool shard create` a shard set"),
    (r"kvspool\.queue\.create makes a queue", "`kvspool queue put` makes one"),
    (r"hub\.create makes a hub root", "`kvspool hub serve` makes a hub root"),
    (
        r"(exists already(?:, and is not empty)?); (?:kvspool|hub|kvspool\.queue)\.open opens (?:it|a log|a queue)",
        r"\1; choose another path",
    ),
    (r"already; shard\.open opens it", "already; choose another path or prefix, or pass --exist-ok"),
    (r"Open it with kvspool\.open, or choose another path", "Choose another path, or leave out the options that differ"),
    (r"(is a queue, not a log): kvspool\.queue\.open opens it", r"\1: see `kvspool queue`"),
    (r"open one shard set in it with shard\.open, or all of them with hub\.open", "give the path of one of them, or see `kvspool shard`"),
    (r"(is one log, not a hub root); kvspool\.open opens it", r"\1; `kvspool stats` shows it, and `kvspool hub serve` makes a hub root"),
    (r"( is neither a log nor a directory of logs)$", r"\1; `kvspool ls` shows the logs of a directory"),
    (r"give them as options, or create a journal with kvspool\.create", "`kvspool create` makes a journal"),
    (r"kvspool\.(repair|copy) ", r"`kvspool \1` "),
    (r"\b(?:lossy|append)=True \((--\w+)\)", r"\1"),
    (r" does not exist$", " does not exist; `kvspool ls` shows the logs of a directory"),
    (r"^No such file or directory: (.*)", r"\1 does not exist, or its directory doesn't; check the path"),
    (r"^(line \d+: .* imported before.*)", r"\1; `kvspool export` writes such lines, and `kvspool append` takes any"),
    (r"^File exists: (.*)", r"\1 exists already; choose another path"),
    (r"^Not a directory: (.*)", r"a part of \1 is a file, not a directory; check the path"),
    (r"^Is a directory: (.*)", r"\1 is a directory; give a file"),
    (r"^(Permission denied: .*)", r"\1; check the rights of the file and its directories, or run the command as their owner"),
    (r"^(No space left on device.*)", r"\1; free some space on the disk"),
    (r"( has no reader '.*')$", r"\1; `kvspool readers`, or of a hub root `kvspool hub readers`, lists them"),
    (r"( has no durable reader '.*')$", r"\1; `kvspool readers` lists them"),
    (r"( has no task list '.*')$", r"\1; `kvspool tasks` lists them"),
    (r"( has no group '.*')$", r"\1; `kvspool group` lists them"),
    (r": use tasks\(.*\), or delete it with delete_tasks$", "; `kvspool tasks` shows it"),
    (r"pass allow_unsafe_fs=True", "pass --allow-unsafe-fs"),
    (r"use a journal \(format=\"kvj\"\)", "use a journal (--format kvj)"),
)
LIKENESS = 0.6  # of a mistyped word to one that exists


def of_command(message: str) -> str:
    """Return a message of the library in the words of the command."""
    for pattern, words in PHRASES:
        message = re.sub(pattern, words, message)
    return message


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a mistyped word; empty if nothing is like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=LIKENESS)
    return f"; did you mean {close[0]}?" if close else ""
