"""Tables of Markdown, and numbers as they stand in them."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; without a head its rows alone, to go on with another."""
    lines = [] if not head else [list(head), ["---"] * len(head)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [*lines, *map(list, rows)])


def number(value: str | float) -> str:
    """With thousands apart; below 100 with at most two digits behind the point."""
    x = float(value)
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.2f}".rstrip("0").rstrip(".")


def percent(share: str | float, digits: int = 0) -> str:
    """A share of 1 as `87 %`."""
    return f"{100 * float(share):.{digits}f} %"


def source(card: str, versions: str, commit: str) -> str:
    """Where figures are from."""
    return f"{card}, {versions}, commit {commit}"
