"""Adapters that cannot be served are refused by what is wrong, by the check alone where the header tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.models.lora_checkpoint import check_adapter
from cb_backend.models.registry import read_model_config
from tests.models.spoiled_adapters import (
    PREFIX,
    adapter,
    made,
    model,
    read,
    refused,
    table_of,
    with_config,
    with_tensors,
)

__all__ = ["adapter", "made", "model"]  # fixtures


@pytest.mark.parametrize(("changes", "match"), [
    ({"use_dora": True}, "use_dora is True"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices is \[1, 2\]"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is"),
    ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication is"),
    ({"use_qalora": True}, "use_qalora is True"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
    ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens is"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported is 'LORA'"),
    ({"peft_type": None}, "peft_type is None"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the model's own"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
    ({"use_something_new": True}, "use_something_new is True, which is not known here"),
    ({"r": 0}, "'r' is 0"),
    ({"r": "8"}, "'r' must be of type int"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"rank_pattern": {"q_proj": -1}}, "'q_proj' is -1"),
    ({"rank_pattern": {"(q_proj": 4}}, "no regular expression"),
    ({"alpha_pattern": {"q_proj": "high"}}, "'q_proj' must be of type float"),
    ({"r": 5}, r"has shape \[4, 40\], the model and adapter_config.json ask for \[5, 40\]"),
], ids=str)  # fmt: skip
def test_options_that_are_refused(changes: dict[str, Any], match: str, model: Path, adapter: Path) -> None:
    with_config(adapter, **changes)
    refused(model, adapter, match)
    with pytest.raises(ConfigError, match=match):
        check_adapter(adapter, read_model_config(model), table_of(model))


def _rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


_Q_A = f"{PREFIX}.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(("change", "match"), [
    (lambda t: t.pop(_Q_A), r"layers\.0\.self_attn\.q_proj has lora_B but no lora_A"),
    (lambda t: t.pop(_Q_A.replace("lora_A", "lora_B")), "has lora_A but no lora_B"),
    (lambda t: t.update({_Q_A: torch.zeros(4, 47)}), r"has shape \[4, 47\]"),
    (lambda t: t.update({_Q_A: torch.zeros(3, 48)}), r"has shape \[3, 48\]"),
    (lambda t: t.update({_Q_A: torch.zeros(4, 48, dtype=torch.int8)}), "is I8"),
    (lambda t: t[_Q_A].fill_(float("nan")), "q_proj.lora_A.weight holds numbers that are not finite"),
    (lambda t: t[_Q_A][0].fill_(float("inf")), "not finite"),
    (lambda t: _rename(t, _Q_A, _Q_A.replace("layers.0", "layers.7")), "layers.7.self_attn.q_proj, which is no proj"),
    (lambda t: _rename(t, _Q_A, _Q_A.replace("model.layers", "vision.layers")), "which is no projection"),
    (lambda t: _rename(t, _Q_A, f"{PREFIX}.mlp.experts.3.gate_proj.lora_A.weight"), "is of experts, whose matrices"),
    (lambda t: _rename(t, _Q_A, "base_model.model.lm_head.lora_A.weight"), "is of the embedding or the head"),
    (lambda t: _rename(t, _Q_A, "base_model.model.model.embed_tokens.lora_embedding_A"), "is of the embedding or the"),
    (lambda t: _rename(t, _Q_A, "base_model.model.model.embed_tokens.base_layer.weight"), "is of the embedding or the"),
    (lambda t: _rename(t, _Q_A, "base_model.model.lm_head.base_layer.weight"), "is of the embedding or the head"),
    (lambda t: _rename(t, _Q_A, f"{PREFIX}.mlp.gate.lora_A.weight"), "mlp.gate.lora_A.weight is of the router"),
    (lambda t: _rename(t, _Q_A, f"{PREFIX}.block_sparse_moe.router.layer.lora_A.weight"), "is of the router of exp"),
    (lambda t: _rename(t, _Q_A, f"{PREFIX}.block_sparse_moe.gate.lora_A.weight"), "is of the router of experts"),
    (lambda t: _rename(t, _Q_A, f"{PREFIX}.mlp.router.lora_B.weight"), "is of the router of experts"),
    (lambda t: _rename(t, _Q_A, f"{PREFIX}.mlp.shared_expert_gate.lora_A.weight"), "shared_expert_gate, which is no"),
    (lambda t: t.update({f"{PREFIX}.self_attn.q_proj.lora_magnitude_vector": torch.ones(48)}), "vector is not one of"),
    (lambda t: t.update({f"{PREFIX}.self_attn.q_proj.lora_B.bias": torch.ones(48)}), "lora_B.bias is not one of"),
    (lambda t: t.clear(), "holds no weights of an adapter"),
], ids=range(22))  # fmt: skip
def test_tensors_that_are_refused(
    change: Callable[[dict[str, Tensor]], object], match: str, model: Path, adapter: Path
) -> None:
    with_tensors(adapter, change)
    refused(model, adapter, match)


def test_what_trainers_add_and_nothing_depends_on_is_taken(model: Path, adapter: Path) -> None:
    """As ms-swift writes it."""
    with_config(adapter, lora_dtype="bfloat16", lorap_lr_ratio=16.0, lorap_emb_lr=1e-6)
    read(model, adapter)


def test_a_rank_above_the_limit_names_both(model: Path, adapter: Path) -> None:
    refused(model, adapter, "has rank 4, above max_lora_rank 3; raise max_lora_rank", max_rank=3)
    assert read(model, adapter, max_rank=4).rank == 4


def test_numbers_that_a_narrow_type_cannot_hold(model: Path, adapter: Path) -> None:
    with_tensors(adapter, lambda tensors: tensors[_Q_A].fill_(1e6))
    refused(model, adapter, r"not finite \(in float16\)", dtype=torch.float16)
    assert read(model, adapter, dtype=torch.bfloat16).rank == 4


@pytest.mark.parametrize("spoil", [
    lambda folder: (folder / "adapter_config.json").unlink(),
    lambda folder: (folder / "adapter_config.json").write_text("{"),
    lambda folder: (folder / "adapter_model.safetensors").unlink(),
    lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"),
    lambda folder: (folder / "adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()[:-5]
    ),
], ids=["no config", "half a config", "no weights", "rubbish", "cut off"])  # fmt: skip
def test_files_that_are_broken_are_named(spoil: Callable[[Path], object], model: Path, adapter: Path) -> None:
    spoil(adapter)
    refused(model, adapter, "adapter_(config.json|model.safetensors)")


def test_pickled_weights_are_refused_by_name(model: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused(model, adapter, "adapter_model.bin is pickled and may run code")


def test_a_check_tells_everything_at_once(model: Path, adapter: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors.pop(_Q_A)
        tensors[f"{PREFIX}.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 3)
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 48)

    with_tensors(adapter, spoil)
    faults: list[str] = []
    check_adapter(adapter, read_model_config(model), table_of(model), faults.append)
    assert len(faults) == 3
    for part in ("lora_B but no lora_A", "has shape [4, 3]", "the embedding or the head"):
        assert sum(part in fault for fault in faults) == 1


def test_a_factor_beyond_float32_is_refused(model: Path, adapter: Path) -> None:
    with_config(adapter, lora_alpha=1e40)
    refused(model, adapter, "lora_alpha")
    with_config(adapter, lora_alpha=8, alpha_pattern={"q_proj": -1e300})
    refused(model, adapter, "q_proj")
    with_config(adapter, alpha_pattern={"q_proj": 10**400})
    refused(model, adapter, "q_proj")
    with_config(adapter, alpha_pattern={"q_proj": -1.5, "v_proj": 0})
    read(model, adapter)


def test_two_tensors_for_one_place_are_refused(model: Path, adapter: Path) -> None:
    """Under two names of one module: one of them would be lost."""

    def twice(tensors: dict[str, Tensor]) -> None:
        for half in "AB":
            tensors[f"layers.0.self_attn.q_proj.lora_{half}.weight"] = torch.ones_like(
                tensors[f"{PREFIX}.self_attn.q_proj.lora_{half}.weight"]
            )

    with_tensors(adapter, twice)
    refused(model, adapter, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight")


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("key", ["([a-z0-9_.]+)+!", "(.|.)" * 40 + "!", ".*" * 12 + "!", r"(\w{1,9}){9}!"])
def test_a_pattern_that_would_never_end_is_refused(model: Path, adapter: Path, pattern: str, key: str) -> None:
    with_config(adapter, **{pattern: {key: 4}})
    refused(model, adapter, pattern)
