"""Where the commands find things on disk: the repository checkout, its client. Knows no server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class CliError(Exception):
    """A command cannot go on. The message is one line that names the remedy."""


def checkout_path(name: str) -> Path:
    """A file or folder of the repository beside the package (`model_repository`, `client/...`). Raises `CliError`."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / name).exists():
            return root / name
    raise CliError(f"{name} was not found beside the package or here; run from a checkout of the repository")


def load_client() -> ModuleType:
    """`client/cb_client.py` as a module: the client is a file to copy, so it is no part of the package."""
    path = checkout_path("client/cb_client.py")
    if "cb_client" not in sys.modules:
        spec = importlib.util.spec_from_file_location("cb_client", path)
        if spec is None or spec.loader is None:
            raise CliError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["cb_client"] = module
        spec.loader.exec_module(module)
    return sys.modules["cb_client"]
