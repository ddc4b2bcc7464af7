"""A note beside Triton's cache on disk: that a set of variants has been compiled into it.

With it a start need not fork processes only to find everything compiled. It goes with the cache when that is removed;
if single entries are, their kernels are compiled when they are launched.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path


class CompiledNote:
    """Of one set of variants, under one version of everything that they are compiled with."""

    def __init__(self, cache_dir: Path, descriptions: Iterable[str]) -> None:
        """descriptions: one a variant: its kernel's source and all it is compiled for and with; in any order."""
        digest = hashlib.sha256("\0".join(sorted(descriptions)).encode()).hexdigest()
        self._path = cache_dir / f"cb_backend-{digest[:32]}"

    def is_there(self) -> bool:
        return self._path.is_file()

    def write(self) -> None:
        """A cache that cannot be written is no reason to fail."""
        with contextlib.suppress(OSError):
            self._path.touch()
