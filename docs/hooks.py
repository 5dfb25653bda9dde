"""Hooks of mkdocs: pages include parts of README.md and other files, and link to repository files.

A line `--8<-- "README.md:name"` stands for the part of README.md between the marks of that name
(pymdownx.snippets, relative to the repository). Links of included text are relative to the file
that it is from, those of a page to the page, so that both can be followed in the repository. Here
they become links of the site: to the page that includes the section or file, or to a copy of it.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = "docs"
COPIES = "repository"  # Where the site has copies of files that are no pages.
RESULTS = "benchmarks/results/"  # Copies of these are pages, which link to nothing.

_INCLUDE = re.compile(r'^--8<-- "([^":]+)(?::[^"]+)?"$', re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# What the theme loads from the network for search in files that no server gives.
_FROM_NETWORK = '<script src="https://unpkg.com/iframe-worker/shim"></script>'


def slug(heading: str) -> str:
    """Returns the anchor of a heading; the same on the site and in the repository."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _preprocessor() -> Any:
    import markdown

    settings = {"base_path": [str(ROOT)], "check_paths": True}
    converter = markdown.Markdown(
        extensions=["pymdownx.snippets"], extension_configs={"pymdownx.snippets": settings}
    )
    return converter.preprocessors["snippet"]


class Site:
    """Where sections and files of the repository are found in the site.

    Args:
        pages: text of every page by its path in `docs`, as written.
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
        """Returns a page's text with what it includes, and links of the site.

        Args:
            page: its path in `docs`.
            text: as written.

        Raises:
            FileNotFoundError: a link leads nowhere.
        """

        def include(match: re.Match[str]) -> str:
            source, included = match.group(1), self._included(match.group())
            return self._linked(page, source, included) if source.endswith(".md") else included

        return _INCLUDE.sub(include, self._linked(page, f"{DOCS}/{page}", text))

    def _included(self, line: str) -> str:
        return "\n".join(self._snippets.run([line]))

    def _linked(self, page: str, source: str, text: str) -> str:
        """Rewrites the links of a text that stands on `page` and is from the file `source`."""

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

        parts = _FENCED.split(text)  # Every other part is a block of code.
        parts[::2] = [_LINK.sub(rewrite, part) for part in parts[::2]]
        return "".join(parts)

    def _place(self, target: str, anchor: str) -> str | None:
        """Returns a repository file's path in the site; None for a folder, which has none."""
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
    """Puts in what a page includes."""
    assert _site is not None  # on_files comes first.
    return _site.expand(page.file.src_uri, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Lets pages search without a network."""
    own = (ROOT / DOCS / "offline_search.js").read_text(encoding="utf-8")
    return output.replace(_FROM_NETWORK, f"<script>{own}</script>")
