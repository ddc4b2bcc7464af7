"""Checkpoints on this machine's disk: the hub's cache and this package's own folder of converted ones.

The hub's cache is looked at, filled and emptied by `huggingface_hub` alone. What is fetched is what a server would
fetch. Whether somebody uses a checkpoint is not known here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cb_backend.cli.demo_model import DEMO_MODEL, ensure_demo_model
from cb_backend.cli.paths import CliError
from cb_backend.models.checkpoint import cache_dir, fetch_checkpoint

HUB, OWN = "hub", "cb_backend"  # whose folder


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A checkpoint that is on the disk. `name` is what `serve` takes."""

    name: str
    origin: str  # HUB or OWN
    num_bytes: int
    used_at: float  # seconds since the epoch; of a converted one, when it was made
    folder: Path


def hub_folder() -> Path:
    """Of huggingface_hub's cache, by its own rules (HF_HUB_CACHE, HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_models() -> list[CachedModel]:
    """All of them, by name."""
    return sorted([*_of_hub(), *_own()], key=lambda model: (model.name.lower(), model.origin))


def find_cached(name: str) -> list[CachedModel]:
    """Those of this name: one, or one in either folder. Raises `CliError` with the names that there are."""
    models = cached_models()
    found = [model for model in models if model.name == name]
    if not found:
        known = ", ".join(model.name for model in models) or "nothing"
        raise CliError(f"{name!r} is not in the cache; there is: {known}")
    return found


def fetch(name: str, say: Callable[[str], None]) -> Path:
    """The folder of a hub checkpoint, after its files have come with a bar each. Raises `CliError`, `ConfigError`."""
    return ensure_demo_model(say) if name == DEMO_MODEL else fetch_checkpoint(name, shows_progress=True)


def remove(model: CachedModel) -> None:
    """Take it from the disk, every revision of it. Raises `OSError`."""
    if model.origin == OWN:
        shutil.rmtree(model.folder)
        return
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(hub_folder())
    # Of this repository alone: a copy of it on the hub has revisions of the same names.
    own = replace(cache, repos=frozenset(repo for repo in cache.repos if repo.repo_path == model.folder))
    revisions = [revision.commit_hash for repo in own.repos for revision in repo.revisions]
    own.delete_revisions(*revisions).execute()
    if model.folder.exists():  # without a revision: a download that was never finished
        shutil.rmtree(model.folder)


def _of_hub() -> list[CachedModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(hub_folder()).repos
    except CacheNotFound:
        return []
    return [
        CachedModel(repo.repo_id, HUB, repo.size_on_disk, repo.last_accessed, repo.repo_path)
        for repo in repos
        if repo.repo_type == "model"
    ]


def _own() -> list[CachedModel]:
    """Converted GGUF files and the demo's model; a conversion that is being written begins with a dot."""
    root = cache_dir() / "models"
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return [
        CachedModel(_own_name(path), OWN, _num_bytes(path), path.stat().st_mtime, path)
        for path in folders
        if not path.name.startswith(".")
    ]


def _own_name(path: Path) -> str:
    """A converted file is served by its folder, anything else by the name that it has on the hub."""
    return str(path) if path.name.startswith("gguf-") else path.name.replace("--", "/", 1)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
