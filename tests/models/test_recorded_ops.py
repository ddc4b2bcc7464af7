"""Models ask the same of their ops as when it was recorded: whoever does not use an option pays nothing for it.

Equal launches of equal shapes; that the results are right is tested elsewhere.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.layers.op_signatures import ModelOps, StepOps
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.layer_kinds import distinct_layers
from tests.models.paged_model import PagedModel
from tests.models.recorded_ops import CASES, RECORDS, calls_of, record
from tests.models.tiny_checkpoints import write_checkpoint


@pytest.mark.parametrize("case", CASES)
def test_x1_a_step_is_made_of_the_recorded_calls(case: str, tmp_path: Path) -> None:
    assert record(case, tmp_path) == json.loads(RECORDS.read_text())[case]


def test_x1_every_recorded_case_is_checked_and_asks_for_something() -> None:
    records = json.loads(RECORDS.read_text())
    assert records.keys() == CASES.keys()
    assert all(len(calls) > 30 for calls in records.values())


def parameters(function: object) -> list[tuple[str, object]]:
    """Names and defaults, in order."""
    given = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(parameter.name, parameter.default) for parameter in given if parameter.name != "self"]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("protocol", [ModelOps, StepOps])
def test_ops_are_called_as_their_protocols_say(protocol: type, backend: str) -> None:
    ops = resolve_ops(backend)
    names = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]
    assert len(names) >= 9
    for name in names:
        assert parameters(getattr(ops, name)) == parameters(getattr(protocol, name)), name


@pytest.mark.parametrize(
    ("checkpoint", "num_layers", "more"),
    [
        ("llama-biases", 2, {}),
        ("granite", 2, {}),
        ("gemma2", 4, {"cap_logits": 1}),
        ("gemma3", 6, {}),
        ("glm4", 2, {}),
        ("exaone4", 2, {"rms_norm": -1}),  # the first block gets the embeddings as they are
        ("olmo2", 2, {"rms_norm": 2 * 2 - 1}),  # q and k, each over all heads
        ("smollm3", 5, {}),
        ("phi3", 2, {}),
        ("ministral3", 2, {}),
    ],
)
def test_norms_factors_and_ropes_of_other_families_cost_no_launch(
    checkpoint: str, num_layers: int, more: dict[str, int], tmp_path: Path
) -> None:
    """A prompt's step: norms around blocks are part of the additions, factors of the norms, and so on."""
    calls = calls_of(checkpoint, {}, tmp_path)
    names = [call.split()[0] for call in calls[: calls.index("next")]]
    norms = {"rms_norm": 1, "add_rms_norm": 2 * num_layers}  # two blocks a layer, and the head
    norms["add_rms_norm"] -= names.count("add_norm_linear")  # which holds one
    for name, count in ({**norms, "qkv_post": num_layers, "prefill_attention": num_layers} | {"cap_logits": 0}).items():
        assert names.count(name) == count + more.get(name, 0), name
    products = sum(names.count(name) for name in ("linear", "linear_silu_mul", "add_norm_linear"))
    assert products == 4 * num_layers + 1
    assert len(names) == products + sum(
        names.count(name) for name in (*norms, "qkv_post", "prefill_attention", "cap_logits", "silu_mul", "gelu_mul")
    )


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        ("llama-biases", {}),
        ("llama-tied", {"quantization": "fp8"}),
        ("qwen2-mixed", {}),
        ("qwen3-mixed", {"kv_dtype": torch.float8_e4m3fn}),
        ("gemma2", {}),
        ("gemma3", {}),
        ("exaone4", {}),
        ("olmo3", {}),
        ("smollm3", {}),
    ],
)
def test_one_layer_of_each_kind_asks_for_all_that_a_model_asks_for(
    checkpoint: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = calls_of(checkpoint, options, tmp_path)
    run = DecoderForCausalLM.__call__
    num_layers = []

    def run_abridged(model: DecoderForCausalLM, *args: Any) -> torch.Tensor:
        with model.abridged():
            num_layers.append((len(model.layers), len(distinct_layers(model.layers))))
            return run(model, *args)

    monkeypatch.setattr(DecoderForCausalLM, "__call__", run_abridged)
    abridged = calls_of(checkpoint, options, tmp_path)
    assert {*abridged} == {*whole}
    for layers, kinds in num_layers:
        assert len(abridged) < len(whole) or kinds == layers


def test_layers_of_another_make_are_kinds_of_their_own(tmp_path: Path) -> None:
    """What is not known to launch alike is not left out."""
    model = PagedModel(write_checkpoint("gemma3", tmp_path)).model
    assert len(distinct_layers(model.layers)) == 3  # the first; of the others those with a window, and one without

    class OtherBlock(type(model.layers[0].mlp)):  # type: ignore[misc]
        pass

    for layer in model.layers:
        layer.mlp = OtherBlock(layer.mlp.gate_up_proj, layer.mlp.down_proj)
    assert distinct_layers(model.layers) == tuple(range(len(model.layers)))
    assert [*model._order] == [*range(len(model.layers))]
