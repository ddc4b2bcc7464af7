"""Mixtures of experts: what the equality with transformers rests on, what is refused, and rows of padding."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.route import Routing
from cb_backend.layers.layer_spec import MLPSpec, MoESpec
from cb_backend.layers.moe import MoE
from cb_backend.models.registry import read_model_config
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import CONFIGS, random_tokens, write_checkpoint

WITH_EXPERTS = sorted(name for name in CONFIGS if any(kind in name for kind in ("moe", "mixtral", "gpt-oss")))
CLEAR = 1e-3  # apart: far beyond what sums in another order move a score by, of one device or of several


def gap_behind(scores: Tensor, number: int) -> float:
    """Between the last of so many that are chosen, and the first left out; the least of all rows."""
    ordered = scores.sort(dim=-1, descending=True)[0]
    return float((ordered[:, number - 1] - ordered[:, number]).min())


def written(name: str, folder: Path, **changes: Any) -> Path:
    folder = write_checkpoint(name, folder)
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_no_choice_of_the_reference_is_a_near_tie(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last expert chosen and the first left out are as good as equal, equality would be luck."""
    model = PagedModel(write_checkpoint(name, tmp_path))
    gaps: list[float] = []
    blocks = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, MoE)]
    assert blocks

    def watching(ops: Any) -> Any:
        class Watching:
            def __getattr__(self, op: str) -> Any:
                return getattr(ops, op)

            def route_experts(
                self, logits: Tensor, slots: Tensor, parts: Tensor, routing: Routing, *rest: Any
            ) -> tuple[Tensor, Any]:
                scores = logits.float() if routing.scoring != "sigmoid" else torch.sigmoid(logits.float())
                if rest and rest[0] is not None:
                    scores = scores + rest[0]
                if routing.num_groups > 1:
                    groups = scores.unflatten(1, (routing.num_groups, -1))
                    best = groups.topk(2, -1)[0].sum(-1)  # what a group is chosen by
                    gaps.append(gap_behind(best, routing.top_groups))
                    is_out = torch.ones_like(best).scatter_(1, best.topk(routing.top_groups, -1)[1], 0.0).bool()
                    scores = groups.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)
                if routing.top_k < scores.shape[1]:
                    gaps.append(gap_behind(scores, routing.top_k))
                result: tuple[Tensor, Any] = ops.route_experts(logits, slots, parts, routing, *rest)
                return result

        return Watching()

    for block in blocks:
        block.ops = watching(block.ops)
    for slot, length in enumerate((15, 20, 126)):  # those of the tests of equality
        model.start(0, length)
        model.num_blocks[0] = 0
        model.prefill(0, random_tokens(length, seed=slot))
        model.free_blocks += [int(block) for block in model.block_tables[0] if int(block)]
    assert not gaps or min(gaps) > CLEAR


def test_layers_without_experts_are_where_the_configuration_says(tmp_path: Path) -> None:
    kinds = {
        "qwen3-moe": [MLPSpec, MoESpec, MLPSpec, MLPSpec],  # every second, but for the last
        "qwen2-moe": [MoESpec, MLPSpec, MoESpec, MoESpec],
        "glm4-moe": [MLPSpec, MoESpec, MoESpec],
        "gpt-oss": [MoESpec] * 4,
    }
    for name, wanted in kinds.items():
        spec = read_model_config(write_checkpoint(name, tmp_path / name))
        assert [type(layer.mlp) for layer in spec.layers] == wanted


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        ("qwen3-moe", {"mlp_only_layers": [4]}, "mlp_only_layers names 4; layers are 0 to 3"),
        ("qwen3-moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers names '1'"),
        ("qwen3-moe", {"num_experts": 7}, "num_experts is 7, num_local_experts is 8; they mean the same"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_tanh'; experts are supported with silu"),
        ("mixtral", {"num_local_experts": 4096}, "'num_local_experts' is 4096; it must be at least 1 and at most 1024"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; supported is null"),
        ("glm4-moe", {"n_group": 3}, "cannot be chosen from 2 of 3 groups"),
        ("glm4-moe", {"topk_group": 1}, "3 of 8 experts cannot be chosen from 1 of 4 groups"),
    ],
)
def test_what_cannot_be_served_is_refused_by_key_and_value(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(written(name, tmp_path, **changes))


@pytest.mark.parametrize("name", ["experts_per_token", "num_experts_per_token", "num_experts_per_tok"])
def test_experts_a_token_have_several_names(name: str, tmp_path: Path) -> None:
    spec = read_model_config(written("gpt-oss", tmp_path, **{"num_experts_per_tok": None, name: 3}))
    assert {layer.mlp.top_k for layer in spec.layers if isinstance(layer.mlp, MoESpec)} == {3}


def test_missing_tensors_of_an_expert_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-moe-window", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.5.gate_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts\.5\.gate_proj\.weight is missing"):
        PagedModel(folder)


def test_further_layers_of_glm_are_known_and_left_out(tmp_path: Path) -> None:
    """Those that predict tokens ahead stand behind the last layer."""
    spec = read_model_config(written("glm4-moe", tmp_path, num_nextn_predict_layers=2))
    assert spec.ignored is not None
    found = [re.fullmatch(spec.ignored, f"model.layers.{index}.eh_proj.weight") for index in (2, 3, 4, 5)]
    assert [bool(each) for each in found] == [False, True, True, False]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "qwen2-moe"])
def test_an_answer_does_not_depend_on_padding_or_neighbours(name: str, tmp_path: Path) -> None:
    """Rows of padding, as graphs of larger steps have them, go to no expert and change nothing."""
    folder = write_checkpoint(name, tmp_path)
    alone, among = PagedModel(folder), PagedModel(folder)
    prompt = random_tokens(12, seed=1)
    for model in (alone, among):
        model.start(0, len(prompt))
        model.prefill(0, prompt)
    among.start(1, 9)
    among.prefill(1, random_tokens(9, seed=2))
    blocks = [layer.mlp for layer in among.model.layers if isinstance(layer.mlp, MoE)]
    x = torch.randn(5, among.config.hidden_size)
    ids = [3, 1, 4]
    for token in ids:
        wanted = alone.step([(0, token)], [])
        found = among.step([(0, token), (1, token + 1)], [])
        torch.testing.assert_close(found[:1], wanted, atol=1e-4, rtol=1e-4)
    slots = torch.tensor([9, 0, 0, 17, 0], dtype=torch.int32)
    parts = torch.full((5, blocks[0].num_parts, x.shape[1]), float("nan"))
    _, plan = blocks[0].ops.route_experts(
        blocks[0].router(x, None)[:, : blocks[0].spec.num_experts],
        slots,
        parts,
        blocks[0].routing,  # type: ignore[arg-type]
    )
    routed = sorted(int(pair) // blocks[0].spec.top_k for _, pairs in plan.by_expert() for pair in pairs)
    assert sorted(set(routed)) == [0, 3]
    assert len(routed) == 2 * blocks[0].spec.top_k
    assert not parts[slots == 0].any()
