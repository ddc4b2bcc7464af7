"""One shape in which people publish checkpoints, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class PublishedShape:
    """`outcome`: "equal", or a fragment of the text with which it is refused. `reference(folder)` writes the checkpoint
    folder that transformers loads for comparison; None: the built folder itself.
    """

    name: str
    build: Callable[[Path], Path]  # writes files into the folder; returns the path to load
    outcome: str
    reference: Callable[[Path], Path] | None
