"""Weights for a model that stands already: its own once more, or those of another checkpoint of the same specification.

Every tensor is filled where it is. What is filled, and with what, is checked first, before anything is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path

import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.stored_matrix import StoredReader
from cb_backend.layers.weight_format import PackedFormat
from cb_backend.models import weights
from cb_backend.models.checkpoint import has_tokenizer
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.placement_checks import check_tensors
from cb_backend.models.registry import new_maker, open_weights, read_model_config, set_kv_scales
from cb_backend.models.safetensors_files import FileStamp, change
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weight_files import find_weight_files
from cb_backend.models.weight_reader import Progress, Read, read_tensors

_NOT_COMPARED = ("formats", "other_names", "dtype")  # names and shapes of tensors tell; the file's type is cast
_REMEDY = "load it as a model of its own"


Stamps = dict[str, FileStamp]  # by path: what tells whether weight files are still those that they were


def weight_stamps(folder: Path) -> Stamps:
    """Of the files that a folder's weights are in. Raises `ConfigError` where some are missing."""
    try:
        return {str(path): FileStamp.of(path.stat()) for path in find_weight_files(folder)}
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What a loaded model is, and how it is filled."""

    model: DecoderForCausalLM
    folder: Path  # the model's own checkpoint, whatever it is filled from
    spec: ModelSpec  # as the folder's config.json has it
    quantization: str | None  # that the model has
    has_kv_scales: bool
    is_dummy: bool = False  # its own weights are random numbers
    seed: int = 0

    def check(self, folder: Path) -> None:
        """Raises `ConfigError` for a checkpoint that cannot take the place of this one's, naming what differs."""
        if self._has_no_files(folder):
            return
        check_checkpoint(self.spec, self.folder, folder)
        self._files(folder)

    def check_unchanged(self, folder: Path, since: Stamps) -> None:
        """Raises `ConfigError` where a folder's files are not those of the stamps any more."""
        if not self._has_no_files(folder):
            _compare(weight_stamps(folder), since)

    def fill(self, folder: Path, progress: Callable[[], None], since: Stamps | None = None) -> Stamps:
        """Put a folder's weights in their places; returns the stamps of the files that they were in. `progress` is
        called again and again while it goes on.

        `check` comes before it, or `check_unchanged`. Raises `ConfigError` for files that cannot be read to their end,
        and, before anything is touched, for others than those of `since`.
        """
        if self._has_no_files(folder):
            weights.fill_dummy(self.model.placements(), self.seed)
            return {}
        source = self._files(folder)
        stamps = {str(stored.path): stored.stamp for stored in source.tensors.values()}
        if since is not None:
            _compare(stamps, since)
        told: Progress = lambda _done, _total: progress()  # noqa: E731
        weights.fill_from_checkpoint(list(self.model.placements()), source, told)
        if self.has_kv_scales:
            set_kv_scales(self.model, source)
        return stamps

    def is_own(self, folder: Path) -> bool:
        """Whether it is the model's own checkpoint."""
        return folder.resolve() == self.folder.resolve()

    def _has_no_files(self, folder: Path) -> bool:
        return self.is_dummy and self.is_own(folder)

    def _files(self, folder: Path) -> weights.CheckpointFiles:
        model = self.model
        make = new_maker(self.spec, model.ops, model.dtype, torch.device("meta"), self.quantization)
        spec, _, source, outline = open_weights(folder, replace(model.spec, names=self.spec.names), make)
        if spec.names != model.spec.names:
            raise ConfigError(f"its tensors are named {spec.names}, the model's {model.spec.names}; {_REMEDY}")
        if outline.has_own_head != model.has_own_head and not _has_same_head(spec, source):
            raise ConfigError(f"only one of the two has a head that is not the embedding; {_REMEDY}")
        # Files may have modules in other formats than the model, whatever both configurations say.
        check_tensors(list(model.placements()), source, _refuse)
        _check_formats(model, outline, f"{spec.names.head_module}.")
        return source


def _check_formats(model: DecoderForCausalLM, new: DecoderForCausalLM, head: str) -> None:
    """Raises `ConfigError` where the new files have tensors that the model would not read, or modules that its own
    configuration would have read otherwise out of them.
    """
    own = {placement.name: placement.target for placement in model.placements()}
    for name, target in ((placement.name, placement.target) for placement in new.placements()):
        if name not in own:
            if name.startswith(head):
                continue  # the same as the embedding, as was looked at before
            _refuse(f"the model has no place for {name}")
        if getattr(target, "reader", None) != getattr(own[name], "reader", None):
            _refuse(f"{name} is of another format than the model's")


def _refuse(fault: str) -> None:
    raise ConfigError(f"{fault}; {_REMEDY}")


def weights_key(folder: Path, stamps: Stamps) -> bytes:
    """Stands for weights in keys of cached prefixes: a folder's files, as they were when they were read."""
    return blake2b(repr((str(folder), sorted(stamps.items()))).encode(), digest_size=16).digest()


def _compare(now: Stamps, since: Stamps) -> None:
    for path, stamp in now.items():
        if path not in since:
            raise ConfigError(f"{path} has come since")
        if stamp != since[path]:
            raise ConfigError(f"{path} has changed since ({change(since[path], stamp)})")


def _has_same_head(spec: ModelSpec, source: weights.CheckpointFiles) -> bool:
    """Whether the file's head is its embedding, so that a model without one of its own can serve it."""
    stored = [source.tensors.get(name) for name in (spec.names.head, f"{spec.names.prefix}embed_tokens.weight")]
    if any(each is None for each in stored):
        return False
    found: list[torch.Tensor] = []
    reads = [Read(each.name, each, take=found.append) for each in stored if each is not None]
    read_tensors(reads, torch.device("cpu"), num_lanes=1)
    return torch.equal(*found)


def check_checkpoint(own: ModelSpec, own_folder: Path, folder: Path) -> None:
    """Raises `ConfigError` for a config or tokenizer that is not the model's. own: as its config.json has it."""
    spec = read_model_config(folder)
    for field in fields(ModelSpec):
        mine, other = getattr(own, field.name), getattr(spec, field.name)
        if field.name not in _NOT_COMPARED and mine != other:
            raise ConfigError(
                f"the new weights are of another specification: {field.name} is {_shown(other)}, the model has "
                f"{_shown(mine)}; {_REMEDY}"
            )
    if _usual_reader(own) != _usual_reader(spec):  # GPTQ's two versions have the same tensors
        raise ConfigError(
            f"the new weights are stored as {_usual_reader(spec)}, the model's as {_usual_reader(own)}; {_REMEDY}"
        )
    _check_tokenizer(folder, own_folder)


def _usual_reader(spec: ModelSpec) -> StoredReader | None:
    """What reads most of a packed checkpoint's modules, by its configuration."""
    usual = None if spec.formats is None else spec.formats.default
    return usual.reader if isinstance(usual, PackedFormat) else None


def _check_tokenizer(folder: Path, mine: Path) -> None:
    """Front ends keep the tokenizer that they have."""
    if not (has_tokenizer(folder) and has_tokenizer(mine)):
        return
    paths = [each / "tokenizer.json" for each in (folder, mine)]
    if all(path.is_file() for path in paths) and paths[0].read_bytes() != paths[1].read_bytes():
        raise ConfigError(f"its tokenizer.json is not the one that is served; {_REMEDY}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
