"""Paths in a process whose Python believes that file names are ASCII.

The server's stub is one, whatever the locale says: its Python takes nothing from the environment. There the text
"größe", as a JSON file or the server says it, is no name that the file system can be asked for; what can be asked for
is a text in which each byte above 127 has a stand-in (PEP 383). Everywhere else these functions change nothing.
"""

from __future__ import annotations

import os
from pathlib import Path


def native_path(path: str | Path) -> Path:
    """`path` so that this process can open it, whether it came as text from elsewhere or from the system."""
    text = os.fspath(path)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))
    return Path(text)


def shown_path(path: str | Path) -> str:
    """`path` as text that can be printed, sent and written down: without stand-ins for bytes."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
