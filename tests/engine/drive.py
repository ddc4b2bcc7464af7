"""Drives an `LLMEngine` over a list of requests with scripted arrivals and cancels, for the tests of this floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cb_backend.config import EngineConfig, engine_config_from_dict
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.outputs import NO_TOKEN
from cb_backend.request import FinishReason
from cb_backend.sampling_params import SamplingParams

MAX_STEPS = 20_000


@dataclass
class Run:
    """What came out, by index of the prompt."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    num_steps: int = 0


def config(model: str, **changes: object) -> EngineConfig:
    return engine_config_from_dict({"model": model, "dtype": "float32", "device": "cpu", **changes})


def run(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    arrivals: Sequence[int] | None = None,
    cancels: Mapping[int, int] | None = None,
) -> Run:
    """Run to the end. `arrivals[i]`: the step before which prompt i is added; `cancels`: prompt -> step."""
    all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    arrivals = arrivals or [0] * len(prompts)
    cancels = dict(cancels or {})
    out = Run(token_ids={index: [] for index in range(len(prompts))})
    to_come = sorted(range(len(prompts)), key=lambda index: arrivals[index])
    while to_come or engine.has_unfinished():
        while to_come and (arrivals[to_come[0]] <= out.num_steps or not engine.has_unfinished()):
            index = to_come.pop(0)
            engine.add_request(engine.make_request(index, np.asarray(prompts[index], np.int32), all_params[index]))
        for index in [index for index, step in cancels.items() if step <= out.num_steps]:
            del cancels[index]
            if engine.cancel(index):
                out.reasons[index] = FinishReason.ABORT
        output = engine.step()
        out.num_steps += 1
        assert out.num_steps < MAX_STEPS, "the engine makes no progress"
        if output is None:
            continue
        entries = zip(
            output.request_ids.tolist(), output.token_ids.tolist(), output.finish_reasons.tolist(), strict=True
        )
        for index, token_id, reason in entries:
            assert index not in out.reasons, "an output after the end"
            if token_id != NO_TOKEN:
                out.token_ids[index].append(token_id)
            if reason:
                out.reasons[index] = FinishReason(reason)
    return out
