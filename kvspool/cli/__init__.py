"""The command `kvspool`: create, fill, read, watch and check logs from a shell.

This module imports nothing before `main` runs: from its first line on, Ctrl-C ends the command without a traceback, with exit code 130.
"""

EXTRA = "arrow"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; `argv`: the arguments, by default the process's."""
    try:
        from kvspool.importing import delayed_interrupts, import_whole

        with delayed_interrupts():
            return int(import_whole("kvspool.cli.command").main(argv))
    except KeyboardInterrupt:
        return 130
