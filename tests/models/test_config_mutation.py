"""What `config.json` says is heeded: a change of it alone, over the same weights, moves the logits.

Catches what is read and then ignored. Every field of the specification must have a change here that reaches it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.registry import read_model_config
from cb_backend.models.spec import ModelSpec
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import CONFIGS, random_tokens, write_checkpoint

PROMPT = random_tokens(60, seed=11)
MOVED = 1e-2
FULL, SLIDING = "full_attention", "sliding_attention"

# (checkpoint, the change of its config.json; "a.b" is a key in an object)
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama-gqa", {"rms_norm_eps": 0.3}),
    ("llama-gqa", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}),
    ("llama-mha", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24}),
    ("llama-gqa", {"rope_parameters.rope_theta": 50.0}),
    ("llama-linear", {"rope_parameters.factor": 3.0}),
    ("llama-dynamic", {"rope_parameters.factor": 9.0}),
    ("llama-dynamic", {"max_position_embeddings": 40}),
    ("llama-llama3", {"rope_parameters.factor": 2.0}),
    ("llama-llama3", {"rope_parameters.low_freq_factor": 1.5}),
    ("llama-llama3", {"rope_parameters.high_freq_factor": 8.0}),
    ("llama-llama3", {"rope_parameters.original_max_position_embeddings": 40}),
    ("llama-yarn", {"rope_parameters.factor": 2.0}),
    ("llama-yarn", {"rope_parameters.attention_factor": 2.0}),
    ("llama-yarn", {"rope_parameters.beta_fast": 0.5}),
    ("llama-yarn", {"rope_parameters.beta_slow": 0.1}),
    ("llama-yarn", {"rope_parameters.mscale": 1.0, "rope_parameters.mscale_all_dim": 0.2}),
    ("llama-yarn-options", {"rope_parameters.truncate": True}),
    ("llama-longrope", {"rope_parameters.short_factor": [3.0] * 6, "rope_parameters.long_factor": [3.0] * 6}),
    ("llama-longrope", {"rope_parameters.original_max_position_embeddings": 90}),
    ("llama-yarn", {"rope_parameters.rope_type": "linear"}),
    ("llama-tied", {"rms_norm_eps": 0.3}),
    ("mistral-window", {"sliding_window": 30}),
    ("mistral-window", {"layer_types": [SLIDING, FULL]}),
    ("ministral", {"layer_types": [SLIDING] * 4}),
    ("ministral", {"sliding_window": 20}),
    ("qwen2-mixed", {"use_sliding_window": False, "layer_types": None}),
    ("qwen2-mixed", {"layer_types": [SLIDING] * 4}),
    ("qwen3-mixed", {"sliding_window": 30}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("granite", {"logits_scaling": 1.0}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"attention_multiplier": 0.1}),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 0]}),
    ("smollm3-sliding", {"sliding_window": 30}),
    ("smollm3-sliding", {"use_sliding_window": False}),
    ("phi3-window", {"sliding_window": None}),
    ("phi3-partial", {"rope_parameters.rope_theta": 50.0}),
    ("phi3-partial", {"original_max_position_embeddings": 90}),
    ("phi3", {"rope_parameters.partial_rotary_factor": 0.5}),
    ("olmo2", {"rms_norm_eps": 0.3}),
    ("exaone4-hybrid", {"sliding_window": 30}),
    ("exaone4-hybrid", {"layer_types": [SLIDING] * 6}),
    ("gemma2", {"query_pre_attn_scalar": 90}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"attn_logit_softcapping": 0.7}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"sliding_window": 30}),
    ("gemma2", {"layer_types": [FULL] * 4}),
    ("gemma2", {"hidden_activation": "silu"}),
    ("gemma3", {"rope_parameters.full_attention.factor": 2.0}),
    ("gemma3", {"rope_parameters.full_attention.rope_theta": 50.0}),
    ("gemma3", {"rope_parameters.sliding_attention.rope_theta": 50.0}),
    ("gemma3", {"query_pre_attn_scalar": 120}),
    ("gemma3", {"final_logit_softcapping": 1.0}),
    ("gemma3", {"layer_types": [FULL, SLIDING, SLIDING] * 2}),
    ("glm4", {"rope_parameters.partial_rotary_factor": 0.25}),
    ("glm4", {"rms_norm_eps": 0.3}),
    ("olmo3", {"rope_parameters.full_attention.factor": 2.0}),
    ("olmo3", {"rope_parameters.sliding_attention.rope_theta": 50.0}),
    ("qwen3-moe", {"norm_topk_prob": False}),
    ("qwen3-moe", {"num_experts_per_tok": 2}),
    ("qwen3-moe-window", {"sliding_window": 30}),
    ("qwen3-moe-window", {"use_sliding_window": False}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("qwen2-moe", {"layer_types": [SLIDING] * 4}),
    ("qwen2-moe", {"norm_topk_prob": True}),
    ("olmoe", {"norm_topk_prob": True}),
    ("granitemoe", {"residual_multiplier": 1.0}),
    ("granitemoe", {"num_experts_per_tok": 1}),
    ("glm4-moe", {"routed_scaling_factor": 1.0}),
    ("glm4-moe", {"norm_topk_prob": False}),
    ("glm4-moe", {"n_group": 1, "topk_group": 1}),
    ("glm4-moe", {"topk_group": 3}),
    ("gpt-oss", {"layer_types": [FULL, SLIDING] * 2}),
    ("gpt-oss", {"sliding_window": 30}),
    ("gpt-oss", {"num_experts_per_tok": 1}),
    ("gpt-oss", {"num_experts_per_tok": None, "experts_per_token": 1}),
    ("mixtral-window", {"sliding_window": None}),
    ("ministral3", {"rope_parameters.llama_4_scaling_beta": 0.0}),
    ("ministral3", {"rope_parameters.original_max_position_embeddings": 40}),
]

# Changes that would move them and that nothing here follows.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt-oss", {"swiglu_limit": 0.01}, r"swiglu_limit is 0.01; supported is 7.0"),
    ("gpt-oss", {"swiglu_alpha": 3}, r"swiglu_alpha is 3.0; supported is 1.702"),
    ("gpt-oss", {"swiglu_limit": "7"}, r"'swiglu_limit' must be of type float, found '7'"),
    ("gpt-oss", {"experts_per_token": 3}, r"num_experts_per_tok is 2, experts_per_token is 3; they mean the same"),
    ("mixtral", {"num_experts_per_token": 1}, r"num_experts_per_tok is 2, num_experts_per_token is 1; they mean the"),
    ("gpt-oss", {"num_experts_per_tok": None, "experts_per_token": 9}, r"experts_per_token is 9, but there are \d"),
]

# Fields that another type of model sets, or that change which weights there are: loading fails, or the tests of
# equality with transformers fail, where one of them is ignored.
OF_FAMILY = {
    "ModelSpec.model_type", "ModelSpec.norms", "ModelSpec.names", "ModelSpec.other_names", "ModelSpec.ignored",
    "ModelSpec.is_embed_scale_rounded",  # of narrow types: test_layer_maker
    "NormSpec.rounds_first", "NormSpec.plus_one", "NormSpec.divisor",
    "AttentionSpec.is_interleaved", "AttentionSpec.is_qkv_fused", "AttentionSpec.qk_norm",
    "AttentionSpec.is_qk_norm_whole", "MLPSpec.is_gate_up_fused",
    "AttentionSpec.has_sinks", "MoESpec.scoring", "MoESpec.activation", "MoESpec.is_routed_in_float32",
    "MoESpec.has_router_bias", "MoESpec.has_score_bias", "MoESpec.has_bias", "MoESpec.shared",
    "MoESpec.has_shared_gate", "MoESpec.storage",
}  # fmt: skip
OF_WEIGHTS = {
    "ModelSpec.vocab_size", "ModelSpec.hidden_size", "ModelSpec.tie_word_embeddings", "AttentionSpec.has_qkv_bias",
    "AttentionSpec.has_o_bias", "MLPSpec.has_bias", "MLPSpec.intermediate_size",
    "MoESpec.num_experts", "MoESpec.intermediate_size",
}  # fmt: skip
# Of what is around the logits: lengths, ends, types, and what the model is asked for (tests/models/test_tasks.py).
OF_SERVING = {
    "ModelSpec.max_position_embeddings", "ModelSpec.is_length_stretched", "ModelSpec.dtype", "ModelSpec.quantization",
    "ModelSpec.formats",
    "ModelSpec.eos_token_ids", "ModelSpec.has_head", "ModelSpec.generates", "ModelSpec.num_labels",
}  # fmt: skip


def logits_of(folder: Path) -> Tensor:
    paged = PagedModel(folder)
    paged.start(0, len(PROMPT) - 5)
    prefill = paged.prefill(0, PROMPT[:-5], 32)
    return torch.cat((prefill, *(paged.step([(0, token)], []) for token in PROMPT[-5:])))


def changed(name: str, change: dict[str, Any], root: Path) -> tuple[Path, Path]:
    """The checkpoint, and its copy with the change."""
    before = write_checkpoint(name, root / "before")
    after = Path(shutil.copytree(before, root / "after"))
    values = json.loads((after / "config.json").read_text())
    for key, value in change.items():
        *path, last = key.split(".")
        inner = values
        for part in path:
            inner = inner[part]
        inner[last] = value
    (after / "config.json").write_text(json.dumps(values))
    return before, after


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=str)
def test_a_change_of_the_configuration_moves_the_logits(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    before, after = changed(name, change, tmp_path)
    assert (logits_of(before) - logits_of(after)).abs().max() > MOVED


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=str)
def test_a_change_that_is_not_followed_is_refused_by_key_and_value(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, after = changed(name, change, tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_model_config(after)


def values_of(spec: Any, found: dict[str, set[Any]]) -> None:
    """What each field of the specification, and of what it is made of, is set to."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        inner = [each for each in (value if isinstance(value, tuple) else (value,)) if is_dataclass(each)]
        for each in inner:
            values_of(each, found)
        if not inner or field.name in ("norms", "qk_norm", "shared"):
            found.setdefault(f"{type(spec).__name__}.{field.name}", set()).add(value)


def test_every_field_of_the_specification_is_changed_by_some_change(tmp_path: Path) -> None:
    moved: set[str] = set()
    for index, (name, change) in enumerate(CHANGES):
        specs: list[ModelSpec] = [read_model_config(each) for each in changed(name, change, tmp_path / str(index))]
        before, after = ({}, {})  # type: ignore[var-annotated]
        values_of(specs[0], before)
        values_of(specs[1], after)
        moved |= {field for field in before.keys() | after.keys() if before.get(field) != after.get(field)}
    everything: dict[str, set[Any]] = {}
    for name in CONFIGS:
        values_of(read_model_config(write_checkpoint(name, tmp_path / name)), everything)
    others = {field for field in everything if field.startswith(("BlockNorms.", "ExpertNames."))}
    assert everything.keys() - moved == (OF_FAMILY | OF_WEIGHTS | OF_SERVING | others) - moved
    # And where a family alone sets a field, there is a family for each of its values.
    for field in OF_FAMILY - {"ModelSpec.names", "ModelSpec.other_names", "ModelSpec.ignored", "NormSpec.divisor"}:
        assert len(everything[field]) > 1, field
