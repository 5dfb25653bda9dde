"""SVG shapes in one style, 480 units wide, so that text is readable on a phone."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

WIDTH = 480
INK, MUTED, LINE, PAPER = "#22313a", "#64757e", "#b6c2c8", "#ffffff"
COLD, WARMING, VARYING, SATURATED, PROBING = "#c3ced3", "#5b8def", "#e58a3a", "#0f9181", "#9a63b5"
FONT = "Roboto, Helvetica, Arial, sans-serif"

Point = tuple[float, float]


class Picture:
    """SVG picture. Later shapes cover earlier shapes."""

    def __init__(self, height: int, title: str) -> None:
        """Sets the height and the title for screen readers."""
        self._height, self._title = height, title
        self._shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 15,
        color: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """Adds a line of text with base line y."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{html.escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PAPER,
        stroke: str = LINE,
        radius: float = 8,
        dashed: bool = False,
        opacity: float = 1,
    ) -> None:
        """Adds a rectangle."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        faint = f' fill-opacity="{opacity:g}"' if opacity != 1 else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"{dashes}{faint}/>'
        )

    def label(
        self, x: float, y: float, words: str, fill: str, width: float = 110, height: float = 38
    ) -> None:
        """Draws a filled box around (x, y) with white words in it."""
        self.box(x - width / 2, y - height / 2, width, height, fill, fill, height / 2)
        self.text(x, y + 5, words, color=PAPER, bold=True)

    def line(
        self,
        points: Sequence[Point],
        color: str = INK,
        width: float = 1.5,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        """Draws a line through points; with an arrow head at the last."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}" '
            f'stroke-linejoin="round"{dashes}/>'
        )
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            angle = math.atan2(y1 - y0, x1 - x0)
            corners = [(x1 + math.cos(angle) * 2, y1 + math.sin(angle) * 2)]
            for side in (-1, 1):
                turned = angle + math.pi + side * 0.45
                corners.append((x1 + 9 * math.cos(turned), y1 + 9 * math.sin(turned)))
            head = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            self._shapes.append(f'<polygon points="{head}" fill="{color}"/>')

    def dot(self, x: float, y: float, color: str = INK, radius: float = 4) -> None:
        """Draws a filled circle with a thin white rim."""
        self._shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{color}" '
            f'stroke="{PAPER}" stroke-width="1"/>'
        )

    def svg(self) -> str:
        """Returns the file's text."""
        title = html.escape(self._title)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
                f'font-family="{FONT}" role="img" aria-label="{title}">',
                f"<title>{title}</title>",
                f'<rect width="{WIDTH}" height="{self._height}" rx="10" fill="{PAPER}"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )
