"""float16, bfloat16 and the fp8 formats in a running engine, on a GPU and by the twins on the CPU.

Steps of one shape compute the same bits, whether graphs or the host launch them and however far ahead. Otherwise
products and attention's tiles follow the batch, and every number has another rounding. Then the reference is the model
in the same formats, but float32, along each prompt and its answer. How far a right engine may be from it is measured
as well: as far as the twins in the engine's dtype are, times `ROOM`. Engines with mistakes are much farther away.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.step import MaskSource, StepPlan
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.pending_step import PendingStep
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.step_shapes import StepShape, step_shapes
from cb_backend.kernels.fp8 import FP8, is_fp8_capable
from cb_backend.layers.attention import Attention
from tests.engine.drive import Run, config, run
from tests.engine.test_slot_runner import slot_engine
from tests.models.paged_model import PagedModel
from tests.models.test_fp8_cache import with_scales
from tests.server.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

GREEDY = TokenRules(max_tokens=40, temperature=0.0, seed=0, ignore_eos=True, logprobs=1)
BLOCK_SIZE, MAX_LEN, BUDGET = 16, 144, 128
ROOM = 3  # a right engine has 1 on the CPU; one with a mistake below has 7 or more
MISTAKES = ("no value scale", "no key scale", "values for keys", "other heads", "other blocks", "other channels")
CACHE, WEIGHTS = {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}
FORMATS: list[tuple[str, dict[str, str]]] = [
    ("float16", {}),
    ("bfloat16", {}),
    ("float16", CACHE),
    ("bfloat16", CACHE),
    ("bfloat16", WEIGHTS),  # on a GPU their products are bfloat16
    ("bfloat16", {**CACHE, **WEIGHTS}),
]

ON_GPU = [pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in FORMATS]
ON_CPU = [("cpu", *FORMATS[2]), ("cpu", *FORMATS[-1])]
in_formats = pytest.mark.parametrize(("device", "dtype", "formats"), [*ON_CPU, *ON_GPU], ids=str)


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


PROMPTS = prompts_of((1, 15, 16, 17, 40, 70, 96))  # around the borders of blocks, and far more than a step's tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that the library's fp8 products take; weight rows of several sizes, and a scale of keys and one of values,
    so that one in the other's place is felt."""
    folder = with_scales(write_tiny_checkpoint(tmp_path_factory.mktemp("narrow")), 0.03, 0.2)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensor *= 2.0 ** torch.randint(-2, 1, (len(tensor), 1))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def _fp8_capable(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not (
        torch.cuda.is_available() and is_fp8_capable(torch.device("cuda"))
    ):
        pytest.skip("needs a CUDA device that converts fp8")


class Steps:
    """The shapes of an engine's plans, and how many of them graphs ran."""

    def __init__(self, runner: SlotRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.planned: list[StepShape] = []
        self.num_replayed = 0
        execute, find = runner.execute, runner.graphs.find

        def execute_and_note(plan: StepPlan, masks: MaskSource) -> PendingStep:
            num_prefill = plan.total_tokens - plan.num_decode_rows
            self.planned.append(StepShape(plan.num_decode_rows, num_prefill, plan.num_rows - plan.num_decode_rows))
            return execute(plan, masks)

        def find_and_note(*step: int) -> Any:
            found = find(*step)
            self.num_replayed += found is not None
            return found

        monkeypatch.setattr(runner, "execute", execute_and_note)
        monkeypatch.setattr(runner.graphs, "find", find_and_note)


def make_engine(folder: Path, device: str, dtype: str, *, has_graphs: bool, **settings: Any) -> LLMEngine:
    """An engine with a `SlotRunner`; on the CPU its graphs are stand-ins."""
    common = {
        "device": device, "dtype": dtype, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN,
        "max_num_batched_tokens": BUDGET, "num_gpu_blocks_override": 80, "enforce_eager": not has_graphs,
    }  # fmt: skip
    engine = create_engine(config(str(folder), **{**common, **settings}))
    if device == "cpu":
        engine, _ = slot_engine(engine, has_graphs, step_shapes(engine.config.max_num_seqs, BUDGET))
    return engine


def runner_of(engine: LLMEngine) -> SlotRunner:
    assert isinstance(engine.runner, SlotRunner)
    return engine.runner


@in_formats
def test_steps_of_one_shape_compute_the_same_bits(
    device: str, dtype: str, formats: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts of 32 tokens at once, then four rows: graphs have just these shapes, so nothing is padding."""
    shapes = [StepShape(0, 128, 4), StepShape(4)]
    prompts, results = prompts_of((32, 32, 32, 32)), []
    for has_graphs, run_ahead in ((False, 0), (True, 0), (True, 4)):
        engine = make_engine(
            folder, device, dtype, has_graphs=has_graphs, run_ahead=run_ahead, max_num_seqs=4, **formats
        )
        runner = runner_of(engine)
        steps = Steps(runner, monkeypatch)
        got = run(engine, prompts, GREEDY)
        assert steps.planned == [shapes[0], *[shapes[1]] * (GREEDY.max_tokens - 1)]
        assert steps.num_replayed == (len(steps.planned) if has_graphs else 0)
        assert not has_graphs or set(shapes) <= set(runner.graphs.shapes)
        cache = runner.storage.data[:, 1:].view(torch.uint8).cpu()  # without the null block
        results.append((got.token_ids, got.logprobs, cache))
        engine.close()
    tokens, figures, cache = results[0]
    assert cache.count_nonzero() > 0
    for its_tokens, its_figures, its_cache in results[1:]:
        assert its_tokens == tokens
        assert its_figures == figures
        assert torch.equal(its_cache, cache)


def twins_logits(folder: Path, got: Run, dtype: str, formats: dict[str, str]) -> Tensor:
    """For each token of the answers, by the twins on the CPU. [num_tokens, vocab_size] float32"""
    model = PagedModel(
        folder,
        num_slots=len(PROMPTS),
        max_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        dtype=getattr(torch, dtype),
        kv_dtype=FP8 if "kv_cache_dtype" in formats else None,
        quantization=formats.get("quantization"),
    )
    logits = []
    for slot, prompt in enumerate(PROMPTS):
        model.start(slot, len(prompt))
        logits.append(model.prefill(slot, prompt + got.token_ids[slot][:-1])[len(prompt) - 1 :].float())
    return torch.cat(logits)


def check(got: Run, folder: Path, dtype: str, formats: dict[str, str]) -> None:
    """Log-probabilities are as far from those of float32 as the twins' in `dtype` are, and so are choices."""
    exact, rounded = (twins_logits(folder, got, each, formats) for each in ("float32", dtype))
    tokens = torch.tensor([token for index in range(len(PROMPTS)) for token in got.token_ids[index]])
    figures = torch.tensor([figure.sampled for index in range(len(PROMPTS)) for figure in got.logprobs[index]])
    of_tokens = (torch.arange(len(tokens)), tokens)
    wanted, twins = exact.log_softmax(dim=1)[of_tokens], rounded.log_softmax(dim=1)[of_tokens]
    errors, usual = (figures - wanted).abs(), (twins - wanted).abs()
    for part in (0.5, 0.9):
        assert errors.quantile(part) <= ROOM * usual.quantile(part), f"errors at {part:.0%}"
    lacking = exact.amax(dim=1) - exact[of_tokens]  # of a likeliest token nothing
    assert lacking.amax() <= 2 * (exact - rounded).abs().amax()
    num_usual = int((exact.argmax(dim=1) != rounded.argmax(dim=1)).sum())
    assert int((lacking > 0).sum()) <= 2 * num_usual + len(tokens) // 20


def run_traffic(engine: LLMEngine) -> Run:
    """Prompts arrive beside rows that decode, are computed in chunks, and steps of many sizes are padded."""
    return run(engine, PROMPTS, GREEDY, arrivals=[0, 1, 1, 4, 4, 6, 12])


@in_formats
@pytest.mark.parametrize(("has_graphs", "run_ahead"), [(True, 4), (False, 0)], ids=["graphs", "eager"])
def test_answers_are_those_of_float32_but_for_rounding(
    has_graphs: bool,
    run_ahead: int,
    device: str,
    dtype: str,
    formats: dict[str, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(folder, device, dtype, has_graphs=has_graphs, run_ahead=run_ahead, max_num_seqs=8, **formats)
    runner = runner_of(engine)
    layer = runner.model.layers[1]
    assert runner.storage.data.dtype == (FP8 if "kv_cache_dtype" in formats else getattr(torch, dtype))
    assert layer.mlp.down_proj.weight.dtype == (FP8 if "quantization" in formats else getattr(torch, dtype))
    steps = Steps(runner, monkeypatch)
    got = run_traffic(engine)
    check(got, folder, dtype, formats)
    assert (steps.num_replayed > 0) == has_graphs
    assert any(shape.num_decode and shape.num_prefill for shape in steps.planned)
    assert engine.stats().num_free_blocks == engine.info.num_blocks
    engine.close()


def make_mistake(attention: Attention, mistake: str) -> None:
    """Have the layer read its cache with a mistake."""

    def mistaken(attend: Any) -> Any:
        def attend_mistaken(
            q: Tensor, kv_cache: Tensor, tables: Tensor, *rest: Any, value_scale: float, **options: Any
        ) -> Any:
            # [num_blocks, 2, num_kv_heads, block_size, head_dim]
            if mistake == "no value scale":
                value_scale = 1.0
            elif mistake == "no key scale":
                q = q / attention.key_scale
            elif mistake == "other blocks":
                kv_cache = kv_cache.roll(1, dims=0)
            else:
                kv_cache = kv_cache.flip({"values for keys": 1, "other heads": 2}[mistake])
            return attend(q, kv_cache, tables, *rest, value_scale=value_scale, **options)

        return attend_mistaken

    ops = attention.ops
    attention.ops = dataclasses.replace(
        ops,
        decode_attention=mistaken(ops.decode_attention),
        prefill_attention=mistaken(ops.prefill_attention),
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_not_taken_for_rounding(mistake: str, folder: Path) -> None:
    """In the formats that rounding changes most."""
    dtype, formats = FORMATS[-1]
    engine = make_engine(folder, "cpu", dtype, has_graphs=True, run_ahead=4, max_num_seqs=8, **formats)
    for layer in runner_of(engine).model.layers:
        if mistake == "other channels":
            scales = layer.mlp.down_proj.weight_scales  # type: ignore[attr-defined]
            scales.copy_(scales.roll(1))
        else:
            make_mistake(layer.self_attn, mistake)
    got = run_traffic(engine)
    with pytest.raises(AssertionError, match="errors at 50%"):
        check(got, folder, dtype, formats)
