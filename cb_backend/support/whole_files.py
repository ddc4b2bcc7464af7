"""Small text files that processes leave for each other: whoever reads one finds it whole, or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Others may read or write the file meanwhile: they find what it was, or this."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_if_there(path: Path) -> str:
    """Empty where there is no such file, or not any more."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
