"""How the terminal's commands show sizes, ages and tables. Plain text: it goes through pipes and into tickets."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB")
_AGES = (("days", 86_400), ("hours", 3_600), ("minutes", 60))


def bytes_text(num_bytes: float) -> str:
    """In powers of 1000, as disks and the hub have them: "269.1 MB"."""
    value = float(num_bytes)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def age_text(seconds: float) -> str:
    """ "3 days ago", in the largest unit that there are two of."""
    for unit, length in _AGES:
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now" if seconds < 60 else "1 minute ago"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> str:
    """Columns two spaces apart. `sides`: "<" or ">" for each."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    lines = []
    for row in (titles, *rows):
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
