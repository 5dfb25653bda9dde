"""MkDocs hooks that include parts of repository files in pages and convert their links.

A line `--8<-- "README.md:name"` includes the part of README.md between the marks of that name
(pymdownx.snippets, relative to the repository). Links in the sources are relative to the file that
contains them, so that they work in the repository. The hooks convert them to links of the site: to
the page that includes the section or file, or to a copy of the file.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = "docs"
COPIES = "repository"  # Folder of the site for copies of files without a page.
RESULTS = "benchmarks/results/"  # These files are copied as pages without links.

_INCLUDE = re.compile(r'^--8<-- "([^":]+)(?::[^"]+)?"$', re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# Script that the theme loads from the network for search in local files.
_FROM_NETWORK = '<script src="https://unpkg.com/iframe-worker/shim"></script>'


def slug(heading: str) -> str:
    """Returns the anchor of a heading, which is equal on the site and in the repository."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _preprocessor() -> Any:
    import markdown

    settings = {"base_path": [str(ROOT)], "check_paths": True}
    converter = markdown.Markdown(
        extensions=["pymdownx.snippets"], extension_configs={"pymdownx.snippets": settings}
    )
    return converter.preprocessors["snippet"]


class Site:
    """Maps sections and files of the repository to pages of the site.

    Args:
        pages: Source text of each page, by path in `docs`.
    """

    def __init__(self, pages: dict[str, str]) -> None:
        self._snippets = _preprocessor()
        self._places: dict[tuple[str, str], str] = {}
        self.copied: set[str] = set()
        for page, text in pages.items():
            for match in _INCLUDE.finditer(text):
                source = match.group(1)
                self._places.setdefault((source, ""), page)
                for heading in _HEADING.findall(self._included(match.group())):
                    self._places.setdefault((source, slug(heading)), page)

    def expand(self, page: str, text: str) -> str:
        """Returns the text of a page with its includes and with links of the site.

        Args:
            page: Path of the page in `docs`.
            text: Source text of the page.

        Raises:
            FileNotFoundError: The target of a link does not exist.
        """

        def include(match: re.Match[str]) -> str:
            source, included = match.group(1), self._included(match.group())
            return self._linked(page, source, included) if source.endswith(".md") else included

        return _INCLUDE.sub(include, self._linked(page, f"{DOCS}/{page}", text))

    def _included(self, line: str) -> str:
        return "\n".join(self._snippets.run([line]))

    def _linked(self, page: str, source: str, text: str) -> str:
        """Converts the links of a text from the file `source` that is shown on `page`."""

        def rewrite(match: re.Match[str]) -> str:
            mark, words, link = match.groups()
            if link.startswith(("http://", "https://", "#", "mailto:")):
                return match.group()
            path, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(source), path))
            if not (ROOT / target).exists():
                raise FileNotFoundError(f"{source} links to {link}, which does not exist")
            place = self._place(target, anchor)
            if place is None:
                return words
            relative = os.path.relpath(place, os.path.dirname(page) or ".")
            return f"{mark}[{words}]({relative}{'#' + anchor if anchor else ''})"

        parts = _FENCED.split(text)  # Parts with odd indices are code blocks.
        parts[::2] = [_LINK.sub(rewrite, part) for part in parts[::2]]
        return "".join(parts)

    def _place(self, target: str, anchor: str) -> str | None:
        """Returns the path of a repository file in the site, or None for a folder."""
        if target.startswith(f"{DOCS}/"):
            return target[len(DOCS) + 1 :]
        place = self._places.get((target, anchor)) or self._places.get((target, ""))
        if place is not None:
            return place
        if (ROOT / target).is_dir():
            return None
        if target.endswith(".md") and not target.startswith(RESULTS):
            raise FileNotFoundError(
                f"The link target {target} is not included in any page of the site"
            )
        self.copied.add(target)
        return f"{COPIES}/{target}"


_site: Site | None = None


def on_files(files: Any, config: Any) -> Any:
    """Adds copies of the repository files that pages link to."""
    global _site
    from mkdocs.structure.files import File

    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    _site = Site(pages)
    for page, text in pages.items():
        _site.expand(page, text)
    for path in sorted(_site.copied):
        copy = File.generated(config, f"{COPIES}/{path}", abs_src_path=str(ROOT / path))
        files.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the Markdown of a page with its includes."""
    assert _site is not None  # MkDocs calls on_files first.
    return _site.expand(page.file.src_uri, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Replaces the network script of the search with a local script."""
    own = (ROOT / DOCS / "offline_search.js").read_text(encoding="utf-8")
    return output.replace(_FROM_NETWORK, f"<script>{own}</script>")
