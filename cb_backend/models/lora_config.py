"""An adapter's `adapter_config.json`, as PEFT writes it: ranks and factors, and what of it cannot be served.

Which modules an adapter has weights for is told by its tensors, not here: `target_modules` may be a list, a regular
expression or a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.config_reader import ConfigReader
from cb_backend.support.adapter_files import CONFIG_NAME
from cb_backend.support.json_files import read_json_object

# Options that change what an adapter computes, beside those that are read.
_MUST_BE_OFF = {
    "use_dora": "train the adapter without DoRA, or merge it into the model",
    "lora_bias": "train it without a bias of its own, or merge it into the model",
    "modules_to_save": "it holds whole modules; merge it into the model",
    "trainable_token_indices": "it changes the embedding; merge it into the model",
    "target_parameters": "it changes experts; merge it into the model",
    "layer_replication": "it changes the number of layers; merge it into the model",
    "use_qalora": "merge it into the model",
    "use_bdlora": "merge it into the model",
    "fan_in_fan_out": "it is made for weights that lie the other way round",
    "alora_invocation_tokens": "it is meant for some tokens of a prompt only",
    "arrow_config": "name one adapter and not a router among several",
    "kasa_config": "merge it into the model",
    "monteclora_config": "merge it into the model",
    "lora_ga_config": "it changes the model's own weights; convert it to a plain adapter when saving",
    "megatron_config": "save it as a plain adapter",
}
# Ways to begin that take something out of the model's own weights.
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
# What says where adapters were put, how they were trained, or nothing.
_OF_NO_MATTER = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "enable_lora", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio", "megatron_core", "merge_weights", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "velora_config",
}  # fmt: skip

_MOST_REPEATS = 3  # in a key of a pattern


class ByModule:
    """Values by regular expressions of the ends of modules' names, from a dot on; the first that fits counts."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Raises `ConfigError` for a key that is no regular expression, or may take for ever to match."""
        self._values = [(_compiled(key, where), value) for key, value in values.items()]
        self._found: dict[str, Any] = {}  # by module: there may be as many expressions as modules

    def of(self, module: str, default: Any) -> Any:
        if module not in self._found:
            self._found[module] = next((value for key, value in self._values if key.match(module)), None)
        found = self._found[module]
        return default if found is None else found


class LoraConfig(NamedTuple):
    """What is computed: y = W x + scale * B (A x), scale and rank a module's own."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: ByModule
    alphas: ByModule

    def rank_of(self, module: str) -> int:
        """module: its full name in the model that the adapter was trained on."""
        return int(self.ranks.of(module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = float(self.alphas.of(module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """Raises `ConfigError` that names the key and the value for a file that is missing, broken, or cannot be served."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"{CONFIG_NAME} is missing in the adapter's folder; name a folder that PEFT's save_pretrained made"
        )
    reader = ConfigReader(read_json_object(path), CONFIG_NAME)
    for fault in _faults(reader):
        raise ConfigError(fault)
    ranks, alphas = _section(reader, "rank_pattern"), _section(reader, "alpha_pattern")
    return LoraConfig(
        rank=reader.positive("r", 8),
        alpha=reader.get("lora_alpha", float, 8.0),
        is_rank_stabilised=reader.get("use_rslora", bool, False),
        ranks=ByModule({key: ranks.positive(key) for key in ranks.values}, f"{CONFIG_NAME}: rank_pattern"),
        alphas=ByModule({key: alphas.get(key, float) for key in alphas.values}, f"{CONFIG_NAME}: alpha_pattern"),
    )


def _faults(reader: ConfigReader) -> Iterator[str]:
    values = reader.values
    kind = values.get("peft_type")
    if kind != "LORA":
        yield f"{CONFIG_NAME}: peft_type is {kind!r}; supported is 'LORA'"
    if values.get("bias", "none") != "none":
        yield f"{CONFIG_NAME}: bias is {values['bias']!r}; supported is 'none': merge the adapter into the model"
    for key, remedy in _MUST_BE_OFF.items():
        if values.get(key):
            yield f"{CONFIG_NAME}: {key} is {_shown(values[key])}, which is not supported; {remedy}"
    start = str(values.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_THE_MODEL):
        yield (
            f"{CONFIG_NAME}: init_lora_weights is {start!r}, which changes the model's own weights; convert it to a "
            "plain adapter when saving (path_initial_model_for_weight_conversion)"
        )
    for key in values.keys() - _MUST_BE_OFF.keys() - _READ - _OF_NO_MATTER:
        if values[key]:
            yield f"{CONFIG_NAME}: {key} is {_shown(values[key])}, which is not known here; save it as a plain adapter"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _section(reader: ConfigReader, key: str) -> ConfigReader:
    """An object that may be missing."""
    return ConfigReader(reader.get(key, dict, {}), f"{CONFIG_NAME} ({key})")


def _compiled(key: str, where: str) -> re.Pattern[str]:
    try:
        re.compile(key)
        compiled = re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise ConfigError(f"{where} has the key {key!r}, no regular expression: {error}") from None
    # NOTE: matching cannot be interrupted and lets no other thread run, so what might take very long never begins: a
    # repeated group, or many repeats or choices, each of which multiplies the ways to match.
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", key).replace("(?", "(")
    num_repeats, num_choices = len(re.findall(r"[*+?{]", plain)), len(re.findall(r"\([^()]*\|", plain))
    if re.search(r"\)[*+{]", plain) or max(num_repeats, num_choices) > _MOST_REPEATS:
        raise ConfigError(
            f"{where} has the key {_shown(key)}, which may take very long to match; name the modules without repeated "
            f"groups, and with at most {_MOST_REPEATS} repeats and as many choices"
        )
    return compiled
