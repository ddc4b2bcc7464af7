"""What is told when the hub does not give a checkpoint: pytest tests/models/test_hub_errors.py"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.checkpoint import resolve_checkpoint

httpx = pytest.importorskip("httpx")


def refusal(status: int) -> object:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/api/models/org/name"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (GatedRepoError("restricted", response=refusal(403)), "accept its terms on its page, and start .* HF_TOKEN"),
        (HfHubHTTPError("unauthorised", response=refusal(401)), "may be gated or private: .* HF_TOKEN"),
        (HfHubHTTPError("broken", response=refusal(500)), "check the name and the network"),
        (LocalEntryNotFoundError("offline"), "check the name and the network"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "set HF_HOME to a folder with room"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "set HF_HOME to a folder with room"),
    ],
)
def test_h14_the_hubs_refusal_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=rf"'org/name' is not a local folder and could not be fetched.*{told}"):
        resolve_checkpoint("org/name")
