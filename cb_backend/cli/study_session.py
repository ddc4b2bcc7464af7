"""The order of a study: load, calibrate, try, choose, compare, confirm. The parts are `cb_backend.study`'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.study.adapter_effect import AdapterEffect
from cb_backend.study.adapter_mix import AdapterMix
from cb_backend.study.advice import Study, advise, checks, far_off
from cb_backend.study.bench import Bench, RealBench, Setting, SimulatedBench, calibrate, first, fitted
from cb_backend.study.figures import figures, prompt_time_share
from cb_backend.study.load_watch import LoadWatch
from cb_backend.study.replay import Replay, Say
from cb_backend.study.sample import Sample
from cb_backend.study.simulator import VirtualClock, simulated_engine
from cb_backend.study.step_times import StepTimes
from cb_backend.study.sweep import Target, choose, compare, highest_rate, run_trial, sweep
from cb_backend.study.traffic import Traffic

SHARE_OF_CAPACITY = 0.8  # the load of interest where neither the user nor the trace gives one
MIN_REQUESTS = 8
CONFIRMATIONS = 3  # real runs of the recommended setting, where so many fit into `max_run_s`
_MARGIN = 1.1  # steps may be so much larger than the measured ones before it is said


@dataclass(slots=True)
class Session:
    """What was asked for. `run` does it; `times` are then those that were used."""

    config: EngineConfig
    sample: Sample
    seqs: Sequence[int]
    budgets: Sequence[int]
    target: Target
    rate: float | None
    max_tokens: int | None
    seed: int
    max_run_s: float
    is_simulated: bool
    is_confirmed: bool
    is_cpu_time: bool
    times: StepTimes | None
    say: Say
    note: Callable[[str], None]
    conditions: Callable[[str], dict[str, Any]]  # of a device: card, versions, commit
    adapters: AdapterMix | None = None  # that simulated requests go through
    study: Study | None = field(default=None, init=False)  # what is known so far
    _engine: LLMEngine | None = field(default=None, init=False)

    def run(self) -> Study:
        """The whole study, or after Ctrl-C what is known of it (`was_interrupted`), if a setting was tried.

        Raises `ConfigError` and the engine's own errors, `KeyboardInterrupt` where nothing is known.
        """
        watch = LoadWatch()
        try:
            study = self._run()
        except KeyboardInterrupt:
            if self.study is None or not self.study.trials:
                raise
            study = self.study
            study.was_interrupted = True
            study.choice = study.choice or choose(study.trials, self.target)
        study.warnings += watch.warnings()
        return study

    def _run(self) -> Study:
        if self.times is None or self.is_confirmed or not self.is_simulated:
            self.note(f"loading {self.config.model}")
            self._engine = create_engine(self.config)
            if self.is_cpu_time and self._engine.info.device != "cpu":
                raise ConfigError("--cpu-time is for engines on the CPU: this one computes elsewhere")
        try:
            return self._study()
        finally:
            if self._engine is not None:
                self._engine.close()

    def _study(self) -> Study:
        traffic, warnings = self._traffic()
        times = self.times = self._step_times(traffic)
        simulator = SimulatedBench(self._simulator_config(times), times, self.adapters)
        base = Setting(max(self.seqs), max(*self.budgets, max(self.seqs)))
        rate, origin = self._rate(simulator, traffic, base)
        bench: Bench = simulator
        if not self.is_simulated:
            assert self._engine is not None
            bench = RealBench(self._engine, self.is_cpu_time)
            traffic, shortened = self._short_enough(simulator, traffic, base, rate)
            warnings += shortened
        study = Study(
            traffic_name=self.sample.name,
            traffic=traffic,
            conditions=_shown(times),
            cache=f"{simulator.config.num_gpu_blocks_override:,} KV blocks of {times.block_size} tokens",
            target=self.target,
            rate=rate,
            is_simulated=self.is_simulated,
            rate_origin=origin,
            fit_error=times.relative_error,
            warnings=warnings,
        )
        base_budget = sorted(self.budgets)[len(self.budgets) // 2]
        self.study = study
        sweep(bench, traffic, rate, self.seqs, self.budgets, base_budget, self.target, self.say, study.trials)
        study.choice = choose(study.trials, self.target)
        setting = study.recommended.setting
        study.comparison = compare(bench, traffic, rate, setting, self.say)
        study.highest_rate = highest_rate(simulator, traffic, study.recommended, self.target, self.say)
        saturated = simulator.run(traffic.at_once(), setting, progress=self.say(f"{setting}, share of prompts"))
        study.prompt_share = prompt_time_share(saturated, times)
        if self.adapters is not None:
            plain = run_trial(SimulatedBench(simulator.config, times), traffic, rate, setting, self.say)
            study.adapters = AdapterEffect(self.adapters, study.recommended, plain)
            study.warnings += study.adapters.advice(len(traffic))
        if self._engine is not None and self.is_confirmed:
            self._confirm(study, simulator)
        study.warnings += advise(study) + _beyond(saturated, times)
        return study

    def _traffic(self) -> tuple[Traffic, list[str]]:
        times, engine = self.times, self._engine
        if engine is not None:
            vocab_size, longest = engine.info.vocab_size, engine.info.max_model_len
            longest = min(longest, engine.scheduler.longest_request)
        else:
            assert times is not None
            vocab_size = times.vocab_size
            engine = simulated_engine(self._simulator_config(times), times, VirtualClock())
            longest = min(engine.info.max_model_len, engine.scheduler.longest_request)
        traffic, num_dropped = self.sample.traffic(vocab_size, longest, self.max_tokens, self.seed)
        if not num_dropped:
            return traffic, []
        return traffic, [f"{num_dropped} requests were left out: they are longer than the {longest} tokens that fit"]

    def _step_times(self, traffic: Traffic) -> StepTimes:
        """Those that were given, or measured now."""
        if self.times is not None:
            if self._engine is not None and self.times.device != self._engine.info.device:
                raise ConfigError(
                    f"the step times are of a {self.times.device} device, the engine runs on"
                    f" {self._engine.info.device}; leave --times out to measure it"
                )
            return self.times
        assert self._engine is not None
        settings = [Setting(max(self.seqs), max(budget, max(self.seqs))) for budget in self.budgets]
        replays = calibrate(RealBench(self._engine, self.is_cpu_time), traffic, settings, self.max_run_s, self.say)
        times = self._fit(replays)
        self.note(f"{times.num_steps} steps measured, median error of the fit {times.relative_error:.1%}")
        return times

    def _fit(self, replays: list[Replay]) -> StepTimes:
        assert self._engine is not None
        found = self.conditions(self._engine.info.device)
        conditions = {name: str(value) for name, value in found.items()}
        return fitted(self._engine, replays, {**conditions, "clock": "CPU time" if self.is_cpu_time else ""})

    def _simulator_config(self, times: StepTimes) -> EngineConfig:
        num_blocks = self.config.num_gpu_blocks_override or times.num_blocks
        return replace(
            self.config,
            num_gpu_blocks_override=num_blocks if self._engine is None else self._engine.info.num_blocks,
            max_model_len=self.config.max_model_len or times.max_model_len,
            block_size=times.block_size,
            run_ahead=times.run_ahead if self.config.run_ahead is None else self.config.run_ahead,
        )

    def _rate(self, simulator: SimulatedBench, traffic: Traffic, base: Setting) -> tuple[float, str]:
        """Requests/s, and whose choice they are."""
        if self.rate is not None:
            return self.rate, "as asked for"
        if self.sample.rate is not None:
            return self.sample.rate, "the trace's own"
        most = figures(simulator.run(traffic.at_once(), base, progress=self.say("how much is possible")))
        return SHARE_OF_CAPACITY * most.requests_per_s, f"{SHARE_OF_CAPACITY:.0%} of what {base} does at best"

    def _short_enough(
        self, simulator: SimulatedBench, traffic: Traffic, setting: Setting, rate: float
    ) -> tuple[Traffic, list[str]]:
        """The first requests of the traffic, so few that a real run takes `max_run_s` by the simulator's word."""
        count = min(len(traffic), max(int(self.max_run_s * rate), MIN_REQUESTS))
        while count > MIN_REQUESTS:
            load = first(traffic, count)
            longest = max(simulator.run(part, setting).seconds for part in (load.at_once(), load.at_rate(rate)))
            if longest <= self.max_run_s:
                break
            count = max(int(count * 0.95 * self.max_run_s / longest), MIN_REQUESTS)
        if count == len(traffic):
            return traffic, []
        text = f"real runs took the first {count} of {len(traffic)} requests, to end in {self.max_run_s:g} s"
        return first(traffic, count), [f"{text} (--max-run-s)"]

    def _confirm(self, study: Study, simulator: SimulatedBench) -> None:
        """Run the recommended setting for real and hold it against what was said of it."""
        assert self._engine is not None
        trial, traffic = study.recommended, study.traffic
        predicted = (trial.saturated, trial.loaded)
        if self.is_simulated:
            traffic, shortened = self._short_enough(simulator, traffic, trial.setting, study.rate)
            study.warnings += shortened
            if shortened:
                short = run_trial(simulator, traffic, study.rate, trial.setting, self.say)
                predicted = (short.saturated, short.loaded)
        # A pause of the host decides a 99th percentile of a few hundred requests: the middle of several runs does not
        # feel it.
        count = int(min(max(self.max_run_s / max(predicted[0].seconds, predicted[1].seconds), 1), CONFIRMATIONS))
        self.note(f"confirming the recommended setting on the engine, {count} time{'s' if count > 1 else ''}")
        bench = RealBench(self._engine, self.is_cpu_time)
        measured = [run_trial(bench, traffic, study.rate, trial.setting, self.say) for _ in range(count)]
        study.checks = checks(predicted, [(one.saturated, one.loaded) for one in measured])
        study.warnings += far_off(study.checks)


def _shown(times: StepTimes) -> dict[str, str]:
    names = ("card", "driver", "torch", "commit", "clock")
    return {
        "model": f"{times.model} ({times.dtype})",
        **{name: times.conditions.get(name, "") for name in names},
        "fit": f"{times.num_steps} steps, median error {times.relative_error:.1%}",
    }


def _beyond(saturated: Replay, times: StepTimes) -> list[str]:
    """Whether steps of the recommended setting are larger than those that were measured."""
    shapes = saturated.steps.shapes
    num_rows, num_tokens = int(saturated.steps.num_rows.max()), int((shapes[:, 0] + shapes[:, 2]).max())
    if num_rows <= _MARGIN * times.max_num_seqs and num_tokens <= _MARGIN * times.max_num_batched_tokens:
        return []
    return [
        f"step times were measured up to {times.max_num_seqs} requests and {times.max_num_batched_tokens} tokens in a"
        f" step; the recommended setting runs steps of {num_rows} requests and {num_tokens} tokens, which is a guess"
    ]
