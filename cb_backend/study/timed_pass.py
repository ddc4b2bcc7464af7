"""One timed pass of a workload through the in-process engine. Requests in at their arrival times, token times out.

While the clock runs, the driver only keeps each step's output with its time; every figure is computed afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.messages import EngineStats
from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.adapter_wait import take_adapter
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.latencies import Latencies
from cb_backend.study.replay import drive, no_collections, token_latencies
from cb_backend.study.steps import StepLog, watch
from cb_backend.study.workloads import Workload


@dataclass(frozen=True, slots=True)
class PassResult:
    """Everything measured in one pass. Times in seconds."""

    seconds: float  # from the start to the last token
    idle_seconds: float  # of them, waiting for the next arrival with nothing to do
    num_output_tokens: int
    latencies: Latencies
    steps: StepLog
    stats: EngineStats
    padding_share: float | None  # of the tokens that steps ran with; None without graphs


def run_pass(
    engine: LLMEngine, workload: Workload, temperature: float, adapters: Sequence[AdapterKey] = ()
) -> PassResult:
    """Run the workload to its end on an engine made by `fresh_engine`.

    `adapters`: one a request, which the runner has at hand; empty: all go through the model as it is.

    Raises `ReplayError` when a request ends with another number of tokens than asked for.
    """
    log = watch(engine)
    params = [
        TokenRules(max_tokens=length, temperature=temperature, ignore_eos=True, seed=index)
        for index, length in enumerate(workload.output_lens)
    ]

    def make_request(index: int) -> Request:
        request = engine.make_request(index, workload.prompts[index], params[index])
        if adapters:
            take_adapter(request, adapters[index])
        return request

    with no_collections():
        start = time.perf_counter()
        outputs, idle, _ = drive(engine, make_request, workload.arrivals, start, time.perf_counter, time.sleep)
    seconds = outputs[-1][0] - start
    found = token_latencies(workload.arrivals, workload.output_lens, outputs, start)
    padding = log.padding_share(engine.runner)
    return PassResult(seconds, idle, sum(workload.output_lens), found, log, engine.stats(), padding)
