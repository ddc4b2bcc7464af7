"""What the tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, of this test alone."""
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
