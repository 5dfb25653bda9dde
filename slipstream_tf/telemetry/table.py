"""Plain text tables, as the programs print them. In: cells as text. Out: aligned lines."""

from collections.abc import Sequence

from slipstream_tf._utils.errors import invalid

_GAP = "  "


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 1
) -> str:
    """Aligns a header and rows; a rule of dashes goes between them.

    Args:
        header: one cell per column.
        rows: lines of as many cells.
        left_columns: how many of the first columns are aligned to the left; the rest, numbers, to
            the right.

    Returns:
        The lines, without a newline at the end and without blanks at a line's end.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    for index, row in enumerate(rows):
        if len(row) != len(header):
            raise invalid("rows", list(row), f"row {index}", f"{len(header)} cells")
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return _GAP.join(padded).rstrip()

    return "\n".join([text(lines[0]), _GAP.join("-" * w for w in widths), *map(text, lines[1:])])


def number(value: float | None, digits: int) -> str:
    """Formats a number with a fixed count of decimals; None (not defined) becomes "n/a"."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def seconds(value: float) -> str:
    """Formats a duration in seconds: tenths below 100 s, whole seconds above."""
    return f"{value:.1f}" if value < 100.0 else f"{value:,.0f}"
