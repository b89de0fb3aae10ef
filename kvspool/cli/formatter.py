"""The layout of help and usage in colours. Only what prints them imports this module: rich takes 0.1 s."""

from __future__ import annotations

from rich_argparse import RawDescriptionRichHelpFormatter


class Formatter(RawDescriptionRichHelpFormatter):
    """Help in colours, with line breaks as written. Square brackets are literal: none of the texts is markup."""

    help_markup = False
    text_markup = False
