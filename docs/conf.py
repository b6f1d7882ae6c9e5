"""The documentation site, which `make docs` builds: its pages are the Markdown files of this repository, as they are.

Pages link to each other, and to other files, as they do in a viewer of the repository. The lists below "All pages" in index.md
are the navigation; the page of the reference gets the docstrings of all public names.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
START = "docs/index"
REFERENCE = "docs/reference"

# Read by Sphinx. The sources are in the root of the repository (Makefile), so that links to files outside of `docs` stay true.
project = "dagster-checkpoints"
copyright = "the authors of dagster-checkpoints, Apache-2.0"
root_doc = START
include_patterns = ["docs/**", "examples/*/README.md", "*.md"]
exclude_patterns = [".*", "assets", "bench", "dagster_checkpoints", "dist", "resources", "sensors", "simulation", "site", "tests"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
nitpick_ignore_regex = [("py:.*", ".*")]
myst_heading_anchors = 4  # as GitHub makes them
default_role = "literal"  # docstrings have single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # names and defaults; the docstrings say types and units
autodoc_inherit_docstrings = False
html_theme = "furo"
html_title = "dagster-checkpoints"
html_copy_source = True  # llms.txt links the Markdown of each page
linkcheck_ignore = [r"http://localhost.*"]


def navigation() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """The groups of pages in index.md: the caption of each, and title, page and description of its pages."""
    index = (ROOT / START).with_suffix(".md")
    text = index.read_text(encoding="utf-8").partition("\n## All pages\n")[2]
    groups = []
    for part in text.split("\n### ")[1:]:
        caption, _, lines = part.partition("\n")
        pages = [
            (title, posixpath.normpath(posixpath.join("docs", link)).removesuffix(".md"), description)
            for title, link, description in re.findall(r"^- \[(.+?)\]\((.+?\.md)\): (.+)$", lines, re.MULTILINE)
        ]
        groups.append((caption.strip(), pages))
    return groups


def _add_navigation(text: str) -> str:
    trees = [
        "\n".join(
            [f"```{{toctree}}\n:hidden:\n:caption: {caption}\n", *(f"{title} </{page}>" for title, page, _ in pages), "```"]
        )
        for caption, pages in navigation()
    ]
    return text + "\n\n" + "\n\n".join(trees) + "\n"


def _add_docstrings(text: str) -> str:
    import dagster_checkpoints

    lines = [text]
    for name in dagster_checkpoints.__all__:
        kind = "class" if isinstance(getattr(dagster_checkpoints, name), type) else "function"
        members = "   :members:\n" if kind == "class" else ""
        lines.append(f"## `{name}`\n\n```{{eval-rst}}\n.. auto{kind}:: dagster_checkpoints.{name}\n{members}```\n")
    return "\n".join(lines)


def _read(_: Sphinx, page: str, content: list[str]) -> None:
    if page == START:
        content[0] = _add_navigation(content[0])
    elif page == REFERENCE:
        content[0] = _add_docstrings(content[0])


class Sentences:
    """The texts of attributes as they are: napoleon takes what is in front of the first colon for the attribute's type."""

    def __init__(self) -> None:
        self._before: list[str] = []

    def keep(self, _: Sphinx, what: str, name: str, described: object, options: object, lines: list[str]) -> None:
        self._before = list(lines)

    def restore(self, _: Sphinx, what: str, name: str, described: object, options: object, lines: list[str]) -> None:
        if what == "attribute":
            lines[:] = self._before


def llms_txt() -> str:
    """The list of all pages for language models, as https://llmstxt.org describes it; the links lead to Markdown."""
    introduction = (ROOT / START).with_suffix(".md").read_text(encoding="utf-8").split("\n\n")[1].replace("\n", " ")
    lines = [f"# {project}", f"> {introduction}"]
    for caption, pages in navigation():
        listed = (f"- [{title}](_sources/{page}.md.txt): {description}" for title, page, description in pages)
        lines.append("\n".join([f"## {caption}\n", *listed]))
    return "\n\n".join(lines) + "\n"


def _finish(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "llms.txt").write_text(llms_txt(), encoding="utf-8")
        to_start = (
            f'<!doctype html><meta http-equiv="refresh" content="0; url={START}.html"><a href="{START}.html">{project}</a>\n'
        )
        (Path(app.outdir) / "index.html").write_text(to_start, encoding="utf-8")


def setup(app: Sphinx) -> None:
    sys.path.insert(0, str(ROOT))  # for autodoc
    app.connect("source-read", _read)
    sentences = Sentences()
    app.connect("autodoc-process-docstring", sentences.keep, priority=400)  # napoleon's is 500
    app.connect("autodoc-process-docstring", sentences.restore, priority=600)
    app.connect("build-finished", _finish)
