"""Reports broken links and stale generated files in the documentation.

    python build_support/lint_documents.py

The program checks that relative links lead to existing files and headings, that each page in
benchmarks/results matches its JSON file and is shown on the site, and that the SVG pictures in
docs/pictures match the output of their programs. It needs only the standard library. `make lint`
runs it.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[pathlib.Path]:
    """Returns the Markdown files that are not generated."""
    return [
        *ROOT.glob("*.md"),
        ROOT / "cc_ops" / "README.md",
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors that GitHub creates for the headings of a page."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken_links() -> Iterator[str]:
    """Yields a message for each relative link without a target."""
    for page in pages():
        for link in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
            if link.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                yield f"{page.relative_to(ROOT)}: broken link to {link}"


def stale_results() -> Iterator[str]:
    """Yields a message for each result page that is stale or unused."""
    from pages import draw

    texts = "".join(page.read_text(encoding="utf-8") for page in pages())
    for file in sorted(RESULTS.iterdir()):
        shown = {".md": f'--8<-- "benchmarks/results/{file.name}"', ".png": f"results/{file.name}"}
        if shown.get(file.suffix, "") not in texts:
            yield f"{file.relative_to(ROOT)}: not shown. Add it to docs/results.md"
        if file.suffix == ".json":
            page = file.with_suffix(".md")
            drawn = draw(json.loads(file.read_text(encoding="utf-8")))
            if not page.exists() or page.read_text(encoding="utf-8") != drawn:
                yield f"{page.relative_to(ROOT)}: differs from {file.name}"


def stale_pictures() -> Iterator[str]:
    """Yields a message for each SVG picture that is stale."""
    import draw
    import graphs

    drawn = {one.__name__: ("draw.py", one().svg()) for one in draw.PICTURES}
    for kind in ("includes", "imports"):
        drawn[kind] = "graphs.py", graphs.picture_of(kind).svg()
    for name, (program, svg) in drawn.items():
        if (PICTURES / f"{name}.svg").read_text(encoding="utf-8") != svg:
            yield f"docs/pictures/{name}.svg: stale. Run python docs/pictures/{program}"


def main() -> int:
    """Prints all findings and returns the exit code."""
    sys.path[:0] = [str(ROOT / "benchmarks"), str(PICTURES)]
    found = [*broken_links(), *stale_results(), *stale_pictures()]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
