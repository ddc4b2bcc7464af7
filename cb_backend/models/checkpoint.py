"""Where a checkpoint is: a folder, a GGUF file to convert once, or a name on the Hugging Face hub.

The result is always a folder with `config.json` and safetensors, and one with `tokenizer.json`. Conversions go into a
cache folder keyed by content and appear there whole or not at all. transformers and huggingface_hub are imported only
when there is something to convert or to fetch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.gguf.cache_key import conversion_key
from cb_backend.models.gguf.source import find_models, is_gguf, is_gguf_name, listed
from cb_backend.support.native_paths import native_path, shown_path
from cb_backend.support.tokenizer_files import why_no_tokenizer

logger = logging.getLogger("cb_backend.models")

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_TOKENIZER_PATTERNS = ["*.json", "*.model", "*.txt", "*.jinja"]
_OTHER_FORMATS = ["original/*", "consolidated*", "onnx/*", "openvino/*"]
_TOKENIZER_FILES = (
    "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "config.json",
)  # fmt: skip


def cache_dir() -> Path:
    """$CB_BACKEND_CACHE, or ~/.cache/cb_backend."""
    return Path(os.environ.get("CB_BACKEND_CACHE") or Path.home() / ".cache" / "cb_backend").expanduser()


def writable_cache(*parts: str) -> Path:
    """A folder of the cache, made if it is not there. Raises `ConfigError` if nothing can be written there."""
    folder = cache_dir().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not tell of a read-only file system
            pass
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} cannot be written ({error.strerror}); set CB_BACKEND_CACHE to a folder that can"
        ) from None
    return folder


def check_checkpoint_name(model: str) -> None:
    """Raise `ConfigError` for what can be nothing at all: a path where nothing is. Reads and fetches nothing."""
    if not native_path(model).expanduser().exists() and (is_gguf_name(model) or not _HUB_ID.fullmatch(model)):
        where = _where_looked(model)
        raise ConfigError(f"{model!r} is neither a folder, a .gguf file nor a hub id like org/name{where}")


def _where_looked(model: str) -> str:
    """Of a relative path: it is the server's folder that counts, not the one of the model.json that names it."""
    path = native_path(model).expanduser()
    return "" if path.is_absolute() else f"; as a relative path it was looked for at {shown_path(path.absolute())}"


def resolve_checkpoint(model: str) -> Path:
    """The folder with `config.json` and safetensors that `model` means. Raises `ConfigError` with the remedy."""
    found = find_checkpoint(model)
    return convert_gguf(found) if found.is_file() else found


def find_checkpoint(model: str) -> Path:
    """The folder with `config.json`, or the GGUF file, that `model` means. Raises `ConfigError` with the remedy."""
    path = native_path(model).expanduser()
    if path.is_file():
        if not is_gguf_name(path.name) and not is_gguf(path):
            raise ConfigError(f"model {model!r} is a file, but not a .gguf; name the checkpoint's folder")
        return path
    folder = path if path.is_dir() else _from_hub(model, _WEIGHT_PATTERNS)
    if not any(folder.glob("*.safetensors")) and (files := find_models(folder)):
        if len(files) > 1:
            names = listed(file.name for file in files)
            raise ConfigError(f"model {model!r} holds {len(files)} GGUF models; name one of its files: {names}")
        return files[0]
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {model!r} holds no config.json, so it is not a Hugging Face checkpoint"
            + ("" if path.is_dir() else "; of a repository of GGUF files, download one and name the file")
        )
    return folder


def resolve_tokenizer(tokenizer: str | None, checkpoint: Path) -> Path:
    """The folder with `tokenizer.json`: of `tokenizer` (folder or hub id) if given, else of the checkpoint.

    A tokenizer in an older format is converted once. Raises `ConfigError` when there is none or it cannot be read.
    """
    folder = checkpoint
    if tokenizer is not None:
        path = native_path(tokenizer).expanduser()
        if path.is_file():
            raise ConfigError(f"tokenizer {tokenizer!r} is a file; name the folder that holds tokenizer.json")
        folder = path if path.is_dir() else _from_hub(tokenizer, _TOKENIZER_PATTERNS)
    if (folder / "tokenizer.json").is_file():
        return folder
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    files += sorted(folder.glob("additional_chat_templates/*.jinja"))
    if not has_tokenizer(folder):
        reason = "there is no tokenizer in the checkpoint's folder; set the engine argument tokenizer"
        raise ConfigError(why_no_tokenizer(folder) or reason)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return _build_once(cache_dir() / "tokenizers" / digest.hexdigest()[:32], lambda to: _convert_tokenizer(folder, to))


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer in `folder`, in whatever format; it may still turn out to be damaged."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return any((folder / name).is_file() for name in names)


def convert_gguf(path: Path, *, is_packed: bool = True) -> Path:
    """Write a GGUF file as a safetensors folder in the cache, once for each content and version of the conversion;
    return the folder.

    is_packed: matrices keep the file's bits where these can be served. What is written out takes four bytes of disk a
    parameter. Raises `ConfigError` when the file is damaged, incomplete, or asks for what is not supported.
    """
    folder = cache_dir() / "models" / f"gguf-{conversion_key(path, is_packed)}"
    return _build_once(folder, lambda to: _convert_gguf(path, to, is_packed))


def _convert_gguf(path: Path, target: Path, is_packed: bool) -> None:
    from cb_backend.models.gguf.conversion import convert

    with _saving(target):
        convert(path, target, is_packed=is_packed)


def _convert_tokenizer(folder: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever transformers raises on a damaged file
        raise ConfigError(f"the checkpoint's tokenizer cannot be read: {_first_line(error)}") from None
    with _saving(target):
        tokenizer.save_pretrained(target)
    if not (target / "tokenizer.json").is_file():
        raise ConfigError(
            "the checkpoint's tokenizer has no fast form; set the engine argument tokenizer to one that has"
        )


def fetch_checkpoint(name: str, *, shows_progress: bool = False) -> Path:
    """The folder of a checkpoint's files, fetched from the hub if they are not there. Raises `ConfigError`."""
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{name!r} is no hub id like org/name, so it cannot be fetched")
    return _from_hub(name, _WEIGHT_PATTERNS, shows_progress=shows_progress)


def _from_hub(name: str, patterns: list[str], *, shows_progress: bool = False) -> Path:
    """The cache folder's copy of a hub checkpoint, or the hub's own snapshot."""
    check_checkpoint_name(name)
    cached = cache_dir() / "models" / name.replace("/", "--")
    if cached.is_dir():
        return cached
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not shows_progress:
        disable_progress_bars()  # a log is no place for them
    logger.info("fetching %s from the hub (kept in HF_HOME, by default ~/.cache/huggingface)", name)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_OTHER_FORMATS))
    except Exception as error:  # no network, no such name, no access: the hub's many classes
        raise ConfigError(
            f"{name!r} is not a local folder and could not be fetched from the hub ({type(error).__name__}: "
            f"{_first_line(error)}); {_hub_remedy(error)}{_where_looked(name)}"
        ) from None


def _hub_remedy(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status in (401, 403):
        return (
            "it may be gated or private: accept its terms on its page, and start the server with HF_TOKEN set to a "
            "token that may read it"
        )
    if isinstance(error, OSError) and not isinstance(error, HfHubHTTPError) and error.errno is not None:
        return "set HF_HOME to a folder with room that can be written, or give the folder of a local copy"
    return "check the name and the network (HF_TOKEN for what is private), or give the folder of a local copy"


def _build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Fill `folder` by `build`, whole or not at all; two processes that race both succeed."""
    if folder.is_dir():
        return folder
    writable_cache(folder.parent.name)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(partial)
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)  # some writers keep their files to themselves
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _saving(target: Path) -> Iterator[None]:
    """Around writers of other packages: their errors for a full disk share the system's words, but no class."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise ConfigError(
                f"the checkpoint cannot be converted ({type(error).__name__}: {_first_line(error)})"
            ) from error
        free = shutil.disk_usage(target).free >> 20
        raise ConfigError(
            f"the converted files cannot be written to {target.parent} ({_first_line(error)}; {free} MiB are free); "
            "make room there, or set CB_BACKEND_CACHE to another folder"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
