"""The runner against the oracle: state by slot, padded shapes, stand-ins of graphs, no result read before a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.runner import host_memory, step_buffers, step_runner
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.step_shapes import StepShape, step_shapes
from tests.engine.drive import config, run, with_reference_runner
from tests.engine.test_equal_to_transformers import prompts_for
from tests.models.tiny_checkpoints import write_checkpoint
from tests.oracles.reference_runner import ReferenceRunner

GREEDY = TokenRules(max_tokens=20, temperature=0.0, ignore_eos=True, seed=0)
PARAMS = [
    TokenRules(max_tokens=20, temperature=0.0, seed=0, stop_token_ids=(7, 11), min_tokens=6),
    TokenRules(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True),
    TokenRules(max_tokens=12, temperature=0.7, top_k=9, top_p=0.9, seed=2**64 - 1, ignore_eos=True),
    GREEDY,
    TokenRules(max_tokens=20, temperature=1.3, min_p=0.05, seed=7, stop_token_ids=tuple(range(40, 60))),
    GREEDY,
    TokenRules(max_tokens=3, temperature=0.0, seed=0),
]
SHAPES = [*(StepShape(size) for size in (1, 2, 4)), *(StepShape(d, p, 3) for d in (0, 2, 4) for p in (6, 12))]


class EagerReplay:
    """Stands in for a captured graph: the same step on the same buffers, run kernel by kernel."""

    def __init__(self, runner: SlotRunner, buffers: StepBuffers) -> None:
        self.runner, self.buffers = runner, buffers
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.runner.run_step(self.buffers)


def slot_engine(
    engine: LLMEngine, has_graphs: bool, shapes: Sequence[StepShape] = SHAPES
) -> tuple[LLMEngine, list[EagerReplay]]:
    """An engine over the same weights whose steps are run by a `SlotRunner`."""
    old = engine.runner
    assert isinstance(old, SlotRunner | ReferenceRunner)
    runner = SlotRunner(old.model, old.ops, old.storage, engine.config.max_num_seqs, engine.info.max_model_len)
    replays = []
    for shape in shapes if has_graphs else ():
        replays.append(EagerReplay(runner, runner.new_buffers(shape)))
        runner.graphs.add(shape, replays[-1], replays[-1].buffers)
    runner.memory.prepare(runner.graphs.shapes)
    return LLMEngine(engine.config, runner, engine.info), replays


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
@pytest.mark.parametrize(
    ("name", "has_graphs"),
    [
        ("llama-tied", True),
        ("llama-tied", False),
        ("qwen3", True),
        ("llama-longrope", True),
        ("llama-dynamic", False),  # its angles change with every step, so it has no graphs
        ("mistral-window", True),
    ],
)
def test_same_tokens_as_the_reference_runner(name: str, has_graphs: bool, run_ahead: int, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    settings = config(
        str(folder),
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_gpu_blocks_override=40,
        run_ahead=run_ahead,
    )
    reference = with_reference_runner(settings)
    prompts = prompts_for(reference.info.vocab_size)
    expected = run(reference, prompts, PARAMS)
    engine, replays = slot_engine(reference, has_graphs)
    got = run(engine, prompts, PARAMS, arrivals=[0, 1, 1, 4, 4, 6, 12])
    assert got.token_ids == expected.token_ids
    assert got.reasons == expected.reasons
    assert engine.stats().num_free_blocks == engine.info.num_blocks
    if has_graphs:
        used = {replay.buffers.shape.num_prefill for replay in replays if replay.num_replays}
        assert used == {0, 6, 12}, "decode and mixed steps must both have been replayed"


def test_full_steps_run_in_graphs_of_the_budgets_size_and_give_the_same_tokens(tmp_path: Path) -> None:
    """With the shapes that an engine has: what the scheduler leaves out for them is computed in the next step."""
    budget, max_num_seqs, num_requests = 512, 20, 40
    settings = {"block_size": 16, "max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs, "run_ahead": 1}
    reference = with_reference_runner(
        config(str(write_checkpoint("qwen3", tmp_path)), **settings, num_gpu_blocks_override=200)
    )
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, reference.info.vocab_size, (num_requests, 115)).tolist()
    params = [msgspec.structs.replace(GREEDY, max_tokens=5 + index % 6) for index in range(num_requests)]
    expected = run(reference, prompts, params)
    engine, replays = slot_engine(reference, has_graphs=True, shapes=step_shapes(max_num_seqs, budget))
    got = run(engine, prompts, params)
    assert got.token_ids == expected.token_ids
    used = [replay for replay in replays if replay.num_replays]
    full = {replay.buffers.shape.num_decode for replay in used if replay.buffers.shape.num_tokens == budget}
    assert full == {0, 8, 20}
    assert sum(replay.num_replays for replay in used) == got.num_steps, "no step but in a graph"


def test_no_host_memory_is_made_while_graphs_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint("llama-tied", tmp_path)
    settings = {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    reference = with_reference_runner(config(str(folder), **settings, run_ahead=4))
    engine, replays = slot_engine(reference, has_graphs=True)
    made: list[StepShape] = []

    def padding(shape: StepShape, padding_slot: int) -> NDArray[np.int32]:
        made.append(shape)
        return step_buffers.padding(shape, padding_slot)

    for module in (step_runner, host_memory):
        monkeypatch.setattr(module, "padding", padding)
    run(engine, prompts_for(reference.info.vocab_size), PARAMS, arrivals=[0, 1, 1, 4, 4, 6, 12])
    used = {replay.buffers.shape for replay in replays if replay.num_replays}
    assert len(used) > 3
    assert not made


APART = [
    TokenRules(max_tokens=14, temperature=0.0, seed=0, logprobs=3, min_tokens=6, stop_token_ids=(7, 11)),
    TokenRules(max_tokens=14, temperature=0.0, seed=0, ignore_eos=True, presence_penalty=1.5, logprobs=0),
    GREEDY,
    TokenRules(max_tokens=14, temperature=0.9, seed=5, ignore_eos=True, logit_bias={7: 3.0}, frequency_penalty=2.0),
    TokenRules(max_tokens=14, temperature=0.8, seed=6, ignore_eos=True, repetition_penalty=1.4, min_tokens=9),
    TokenRules(max_tokens=14, temperature=0.0, seed=0, bad_words_token_ids=((5,), (3, 4)), allowed_token_ids=(3, 4)),
    TokenRules(max_tokens=9, temperature=0.7, top_k=9, seed=8, logprobs=5, ignore_eos=True),
]


@pytest.mark.parametrize("run_ahead", [0, 4])
def test_j3_rows_that_ask_for_more_leave_the_step_a_graph(run_ahead: int, tmp_path: Path) -> None:
    """Case J3 on captured steps: every step is a replay, tokens and figures are those of the reference runner."""
    folder = write_checkpoint("llama-tied", tmp_path)
    settings = {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    reference = with_reference_runner(config(str(folder), **settings, run_ahead=run_ahead))
    prompts = prompts_for(reference.info.vocab_size)
    expected = run(reference, prompts, APART)
    engine, replays = slot_engine(reference, has_graphs=True)
    got = run(engine, prompts, APART, arrivals=[0, 1, 1, 4, 4, 6, 12])
    assert sum(replay.num_replays for replay in replays) == engine.stats().step_id
    assert got.token_ids == expected.token_ids
    assert got.reasons == expected.reasons
    assert set(got.logprobs) == {0, 1, 6}
    for index, figures in expected.logprobs.items():
        num_top = APART[index].logprobs
        for mine, theirs in zip(got.logprobs[index], figures, strict=True):
            assert (mine.rank, mine.top_ids[:num_top]) == (theirs.rank, theirs.top_ids[:num_top])
            assert mine.sampled == pytest.approx(theirs.sampled, abs=1e-4)
