"""The command `kvspool`: make, fill, read, watch and examine logs from a shell.

This module imports nothing before `main` runs: from its first line on, Ctrl-C ends the command quietly, with the exit code 130.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is what follows the command's name, by default the process's arguments."""
    try:
        from kvspool.importing import import_whole

        return int(import_whole("kvspool.cli.command").main(argv))
    except KeyboardInterrupt:
        return 130
