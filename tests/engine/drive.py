"""Drives an `LLMEngine` over a list of requests with scripted arrivals and cancels, for the tests of this floor."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.step import NO_TOKEN, EngineOutput, Failure, Pooled, PromptLogprobs, TokenLogprobs
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.kv_cache.layout import ALL_TOKENS, layout_of
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.kv_cache.swap import BlockSwapper
from tests.oracles.reference_runner import ReferenceRunner

MAX_STEPS = 20_000


class Logprob(NamedTuple):
    """One token's figures as the engine gave them."""

    sampled: float
    rank: int
    top_ids: list[int]
    top: list[float]


@dataclass
class Run:
    """What came out, by index of the prompt."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)  # of the requests that ask, one a token
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)  # from the prompt's second token on
    pooled: dict[int, list[float]] = field(default_factory=dict)  # of pooling requests
    failures: dict[int, str] = field(default_factory=dict)  # what clients are told where it is said
    num_steps: int = 0


def config(model: str, **changes: object) -> EngineConfig:
    """Nothing is kept free for expected growth: a tight cache means preemption."""
    usual = {"model": model, "dtype": "float32", "device": "cpu", "admission_reserve": -10.0}
    return engine_config_from_dict({**usual, **changes})


def run(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    params: TokenRules | Sequence[TokenRules],
    arrivals: Sequence[int] | None = None,
    cancels: Mapping[int, int] | None = None,
    adapters: Mapping[int, AdapterSource] | None = None,
) -> Run:
    """Run to the end. `arrivals[i]`: the step before which prompt i is added; `cancels`: prompt -> step; `adapters`: of
    the prompts that want one."""
    all_params = [params] * len(prompts) if isinstance(params, TokenRules) else list(params)
    arrivals = arrivals or [0] * len(prompts)
    cancels = dict(cancels or {})
    out = Run(token_ids={index: [] for index in range(len(prompts))})
    to_come = sorted(range(len(prompts)), key=lambda index: arrivals[index])
    while to_come or engine.has_unfinished():
        while to_come and (arrivals[to_come[0]] <= out.num_steps or not engine.has_unfinished()):
            index = to_come.pop(0)
            tokens, adapter = np.asarray(prompts[index], np.int32), (adapters or {}).get(index)
            request = engine.make_request(index, tokens, all_params[index], adapter=adapter)
            try:
                engine.add_request(request)
            except InvalidRequestError as error:
                assert adapter is not None, "nothing else is found out so late"
                out.reasons[index], out.failures[index] = FinishReason.ERROR, str(error)
        for index in [index for index, step in cancels.items() if step <= out.num_steps]:
            del cancels[index]
            if engine.cancel(index):
                out.reasons[index] = FinishReason.ABORT
        for index, error in engine.release_held():
            out.reasons[index], out.failures[index] = FinishReason.ERROR, str(error)
        output = engine.step()
        if output is None and engine.is_holding:
            time.sleep(0.001)
            continue
        out.num_steps += 1
        assert out.num_steps < MAX_STEPS, "the engine makes no progress"
        if output is None:
            continue
        entries = zip(
            output.request_ids.tolist(), output.token_ids.tolist(), output.finish_reasons.tolist(), strict=True
        )
        take_prompt_logprobs(output, out.prompt_logprobs)
        take_pooled(output, out.pooled)
        figures = token_logprobs(output)
        for failure in output.attached:
            if isinstance(failure, Failure):  # the first reason is the one that is told
                out.failures = dict.fromkeys(failure.owners.tolist(), failure.text) | out.failures
        for index, token_id, reason in entries:
            assert index not in out.reasons, "an output after the end"
            if token_id != NO_TOKEN:
                out.token_ids[index].append(token_id)
            if index in figures:
                out.logprobs.setdefault(index, []).append(figures[index])
            if reason:
                out.reasons[index] = FinishReason(reason)
    return out


def take_pooled(output: EngineOutput, taken: dict[int, list[float]]) -> None:
    """What was read off prompts, which must have ended in this step."""
    ended = output.request_ids[output.finish_reasons == FinishReason.STOP].tolist()
    for part in output.attached:
        if isinstance(part, Pooled):
            for owner, values in zip(part.owners.tolist(), part.values.tolist(), strict=True):
                assert owner in ended, "a result without an end"
                assert owner not in taken, "a second result"
                taken[owner] = values


def token_logprobs(output: EngineOutput) -> dict[int, Logprob]:
    """By request."""
    figures = {}
    for part in output.attached:
        if isinstance(part, TokenLogprobs):
            columns = (part.owners, part.sampled, part.figures["rank"], part.top_ids, part.top_logprobs)
            for owner, *values in zip(*(column.tolist() for column in columns), strict=True):
                figures[owner] = Logprob(*values)
    return figures


def take_prompt_logprobs(output: EngineOutput, taken: dict[int, list[Logprob]]) -> None:
    """Add a step's figures to those of the prompts they belong to, which they must continue or begin anew."""
    for part in output.attached:
        if not isinstance(part, PromptLogprobs):
            continue
        known = taken.setdefault(int(part.owners[0]), [])
        if part.first == 1:
            known.clear()
        assert part.first == len(known) + 1, "figures of a prompt have a gap"
        columns = (part.given, part.figures["rank"], part.top_ids, part.top_logprobs)
        known += [Logprob(*figures) for figures in zip(*(column.tolist() for column in columns), strict=True)]


def check_figures(figures: list[Logprob], tokens: list[int], expected: torch.Tensor, num_top: int) -> None:
    """Each token's log-probability, rank and likeliest tokens are those of `expected` [num_tokens, vocab_size]."""
    assert len(figures) == len(tokens)
    for token, figure, row in zip(tokens, figures, expected, strict=True):
        assert figure.sampled == pytest.approx(float(row[token]), abs=2e-4)
        assert figure.rank == int((row > row[token]).sum()) + 1
        values, ids = row.topk(num_top)
        assert figure.top_ids[:num_top] == ids.tolist()
        assert figure.top[:num_top] == pytest.approx(values.tolist(), abs=2e-4)


def with_reference_runner(settings: EngineConfig) -> LLMEngine:
    """An engine whose steps are run in the plainest way: what the package's runner is compared with.

    Every layer keeps all tokens, in blocks of all layers, whatever its window.
    """
    engine = create_engine(settings)
    runner: Any = engine.runner
    storage, swapper, info = runner.storage, runner.swapper, engine.info
    if info.kv_windows != (ALL_TOKENS,):
        layout = layout_of(runner.model.spec, info.block_size, storage.layout.element_bytes)
        storage = KVCacheStorage(layout, storage.num_blocks, storage.data.dtype, storage.data.device)
        swapper = BlockSwapper(storage, info.num_host_blocks) if swapper else None
        info = msgspec.structs.replace(info, kv_windows=(ALL_TOKENS,))
    reference = ReferenceRunner(runner.model, runner.ops, storage, settings.max_num_seqs, info.max_model_len)
    reference.swapper = swapper
    return LLMEngine(settings, reference, info)


def engine_for(folder: Path, kind: str, **changes: object) -> LLMEngine:
    """A small engine. `kind`: slots, the package's runner, or reference, the oracle's."""
    settings = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "num_gpu_blocks_override": 60}
    built = config(str(folder), **{**settings, **changes})
    return with_reference_runner(built) if kind == "reference" else create_engine(built)
