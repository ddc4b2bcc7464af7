"""Tries settings and chooses one: the most tokens/s among those that keep the limits.

A setting is tried twice: with all requests there at once (how much it can do), and at the load of interest (how long
requests wait). It does not know whether a bench is real.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.bench import Bench, Setting
from cb_backend.study.figures import Figures, figures
from cb_backend.study.replay import Say
from cb_backend.study.static_admission import StaticAdmission
from cb_backend.study.traffic import Traffic

MAX_PREEMPTION_RATE = 0.02
AS_GOOD = 0.97  # of the best tokens/s: the smallest setting that reaches it is chosen
_BISECTIONS = 7


@dataclass(frozen=True, slots=True)
class Target:
    """Limits of the 99th percentiles, in milliseconds; None = none."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def is_met(self, found: Figures) -> bool:
        return (self.ttft_ms is None or found.ttft_ms["p99"] <= self.ttft_ms) and (
            self.itl_ms is None or found.itl_ms.get("p99", 0.0) <= self.itl_ms
        )

    def excess(self, found: Figures) -> float:
        """By how much the worse of the two is missed: 1 = just met."""
        return max(
            0.0 if self.ttft_ms is None else found.ttft_ms["p99"] / self.ttft_ms,
            0.0 if self.itl_ms is None else found.itl_ms.get("p99", 0.0) / self.itl_ms,
        )

    def __str__(self) -> str:
        parts = [("TTFT", self.ttft_ms), ("inter-token time", self.itl_ms)]
        named = [f"{name} p99 at most {limit:g} ms" for name, limit in parts if limit is not None]
        return " and ".join(named) or "no latency target"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting did."""

    setting: Setting
    saturated: Figures  # all requests there at once
    loaded: Figures  # at the load of interest

    @property
    def preemption_rate(self) -> float:
        return max(self.saturated.preemption_rate, self.loaded.preemption_rate)


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended trial, and what it does not keep (empty: it keeps everything; else it is only the nearest)."""

    trial: Trial
    broken: list[str]


def run_trial(bench: Bench, traffic: Traffic, rate: float, setting: Setting, say: Say) -> Trial:
    saturated = figures(bench.run(traffic.at_once(), setting, progress=say(f"{setting}, all at once")))
    loaded = figures(bench.run(traffic.at_rate(rate), setting, progress=say(f"{setting}, {rate:.3g} requests/s")))
    return Trial(setting, saturated, loaded)


def sweep(
    bench: Bench,
    traffic: Traffic,
    rate: float,
    seqs: Sequence[int],
    budgets: Sequence[int],
    base_budget: int,
    target: Target,
    say: Say,
    trials: list[Trial],
) -> None:
    """Fill `trials`, one by one as they are run, at the end in the order of their settings. A simulation tries the
    whole grid; a real engine all of `seqs` at `base_budget`, then all of `budgets` at the best of them."""

    def run(settings: Iterable[Setting]) -> None:
        for setting in settings:
            if all(trial.setting != setting for trial in trials):
                trials.append(run_trial(bench, traffic, rate, setting, say))

    if bench.is_simulated:
        run(Setting(num_seqs, budget) for num_seqs in seqs for budget in budgets if budget >= num_seqs)
    else:
        run(Setting(num_seqs, max(base_budget, num_seqs)) for num_seqs in seqs)
        best = choose(trials, target).trial.setting
        run(Setting(best.max_num_seqs, budget) for budget in budgets if budget >= best.max_num_seqs)
    trials.sort(key=lambda trial: trial.setting)


def calm_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Those that preempt little."""
    return [trial for trial in trials if trial.preemption_rate < MAX_PREEMPTION_RATE]


def choose(trials: Sequence[Trial], target: Target) -> Choice:
    """Of those that meet the target with few preemptions, the smallest setting that is about as fast as the fastest.

    Where none does, few preemptions go before the target, and the least excess wins.
    """
    calm = calm_trials(trials)
    good = [trial for trial in calm if target.is_met(trial.loaded)]
    if good:
        fastest = max(trial.saturated.output_tokens_per_s for trial in good)
        enough = [trial for trial in good if trial.saturated.output_tokens_per_s >= AS_GOOD * fastest]
        return Choice(min(enough, key=lambda trial: (trial.setting.max_num_seqs, trial.loaded.ttft_ms["p99"])), [])
    broken = []
    if not calm:
        broken.append(f"every setting preempts {MAX_PREEMPTION_RATE:.0%} of the requests or more")
        least = min(trial.preemption_rate for trial in trials)
        calm = [trial for trial in trials if trial.preemption_rate == least]
    trial = min(calm, key=lambda one: (target.excess(one.loaded), -one.saturated.output_tokens_per_s))
    if not target.is_met(trial.loaded):
        broken.append(f"no setting reaches {target} at this load")
    return Choice(trial, broken)


def highest_rate(bench: Bench, traffic: Traffic, trial: Trial, target: Target, say: Say) -> float:
    """Requests/s up to which the trial's setting meets the target, found by halving; 0 if it never does.

    Never more than it does with all requests at once: a short sample would not show the queue that grows beyond.
    """
    if target == Target():
        return trial.saturated.requests_per_s
    low, high = 0.0, trial.saturated.requests_per_s
    if target.is_met(trial.loaded):
        low = min(trial.loaded.requests_per_s, high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        progress = say(f"{trial.setting}, {middle:.3g} requests/s")
        found = figures(bench.run(traffic.at_rate(middle), trial.setting, progress=progress))
        if target.is_met(found) and found.preemption_rate < MAX_PREEMPTION_RATE:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests, cache and setting in three ways, all of them there at once and at the load of interest."""

    rate: float
    continuous: tuple[Figures, Figures]  # (all at once, at the load)
    static: tuple[Figures, Figures]  # batches that reserve what clients allow
    static_known: tuple[Figures, Figures]  # batches that know every length beforehand, which no server does

    @property
    def gain(self) -> float:
        """Tokens/s over those of static batches that reserve, all requests at once."""
        return self.continuous[0].output_tokens_per_s / self.static[0].output_tokens_per_s

    @property
    def gain_over_known(self) -> float:
        return self.continuous[0].output_tokens_per_s / self.static_known[0].output_tokens_per_s


def compare(bench: Bench, traffic: Traffic, rate: float, setting: Setting, say: Say) -> Comparison:
    """Static batching gets the same memory and setting; what limits its batch is the length it must reserve."""

    def run(load: Traffic, policy: PolicyKind, name: str) -> tuple[Figures, Figures]:
        return (
            figures(bench.run(load.at_once(), setting, policy, say(f"{name}, all at once"))),
            figures(bench.run(load.at_rate(rate), setting, policy, say(f"{name}, {rate:.3g} requests/s"))),
        )

    return Comparison(
        rate,
        run(traffic, ContinuousAdmission, "in flight"),
        run(traffic, StaticAdmission, "static batches"),
        run(replace(traffic.with_known_lengths()), StaticAdmission, "static, lengths known"),
    )
