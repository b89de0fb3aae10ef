"""Hooks of MkDocs: files of the repository that the documentation links to, and the help of each command, as pages of the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvspool.cli.command import make_parser
from kvspool.cli.completion import commands

ROOT = Path(__file__).resolve().parent.parent
ADDED = ("CHANGELOG.md", "Containerfile", "HACKING.md", "SECURITY.md")  # next to the pages of docs/
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
HELP = "<!-- help -->"
MARKED = re.compile(r"^( *```\w+) \w+$", re.MULTILINE)  # a block with a mark for `tools/examples.py` or a test, which the generator refuses
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository's root."""
    for name in ADDED:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links between docs/ and the root as they are on the site, and with the help of commands.

    Search lists guides before decisions, which have most of their words.
    """
    page.meta["search"] = {"boost": 0.3 if page.file.src_uri.startswith("decisions/") else 1}
    folder = ROOT if page.file.src_uri in ADDED else (ROOT / "docs" / page.file.src_uri).parent
    at = page.file.src_uri.count("/")
    markdown = LINK.sub(lambda link: _on_the_site(folder, link[1], at), MARKED.sub(r"\1", markdown))
    return markdown.replace(HELP, _help() if HELP in markdown else "")


def _on_the_site(folder: Path, target: str, depth: int) -> str:
    """Return the target of a link as it is on the site; unchanged if that is the same, or isn't there. depth: folders above the page."""
    linked = Path(folder / target).resolve()
    if linked.is_relative_to(ROOT / "docs") and folder == ROOT:
        return str(linked.relative_to(ROOT / "docs"))
    if linked.parent == ROOT and linked.name in ADDED:
        return "../" * depth + linked.name
    return target


def _help() -> str:
    """Return a section for each command, with the text that `--help` prints."""
    parts = []
    for path, parser in commands(make_parser()):
        parts += [f"## {path}", "```text", COLOUR.sub("", parser.format_help()).strip(), "```"]
    return "\n\n".join(parts).replace("```text\n\n", "```text\n").replace("\n\n```", "\n```")
