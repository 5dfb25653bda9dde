"""Formats plain text tables for command-line output."""

from collections.abc import Sequence

from slipstream_tf._utils.errors import invalid

_GAP = "  "


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 1
) -> str:
    """Formats a header and rows as aligned columns.

    A line of dashes separates the header from the rows.

    Args:
        header: One cell per column.
        rows: Rows with the same number of cells.
        left_columns: Number of leading columns that are aligned to the left. The others are aligned
            to the right.

    Returns:
        The lines, without trailing spaces and without a final newline.

    Raises:
        ValueError: A row has another number of cells than the header.
    """
    for index, row in enumerate(rows):
        if len(row) != len(header):
            allowed = f"{len(header)} cells, as in the header"
            raise invalid("rows", list(row), f"row {index} of format_table", allowed)
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
    """Formats a number with `digits` decimals; None (undefined) becomes "n/a"."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def seconds(value: float) -> str:
    """Formats seconds: one decimal below 100 s, none above."""
    return f"{value:.1f}" if value < 100.0 else f"{value:,.0f}"
