"""What a study found, as data, and what is to be said about it in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cb_backend.study.adapter_effect import AdapterEffect
from cb_backend.study.figures import Figures
from cb_backend.study.sweep import Choice, Comparison, Target, Trial
from cb_backend.study.traffic import Traffic
from cb_backend.study.ways import Ways

PROMPT_DOMINATED = 0.5  # share of the steps' time that goes to prompts
UNIFORM_CV = 0.25  # standard deviation of the answers' lengths over their mean
SMALL_GAIN = 1.5
SMALL_LOAD = 0.2  # of what the engine does at best: below it hardly anything waits, whatever the setting
POOR_FIT = 0.2  # median error of the step times
FEW_BATCHES = 2
NOISE = 0.05  # a larger difference between two runs of one setting is told
CACHE_FULL = 0.95
FAR_OFF = 0.25  # a prediction that misses by more is explained
# (name, path into the figures, unit): what a prediction is held against.
CHECKED = (
    ("output tokens/s, all at once", 0, "output_tokens_per_s", ""),
    ("output tokens/s, at the load", 1, "output_tokens_per_s", ""),
    ("TTFT p50, ms", 1, "ttft_ms", "p50"),
    ("TTFT p99, ms", 1, "ttft_ms", "p99"),
    ("inter-token p50, ms", 1, "itl_ms", "p50"),
    ("inter-token p99, ms", 1, "itl_ms", "p99"),
    ("E2E p99, ms", 1, "e2e_ms", "p99"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One figure, predicted and measured: the middle of as many runs as there were, and what they lie between."""

    name: str
    predicted: float
    measured: float
    lowest: float
    highest: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else 0.0


@dataclass(slots=True)
class Study:
    """Everything a report shows. Filled step by step."""

    traffic_name: str
    traffic: Traffic
    conditions: dict[str, str]
    cache: str
    target: Target
    rate: float
    is_simulated: bool
    rate_origin: str = ""  # in words
    fit_error: float = 0.0  # median error of the step times that the simulator has
    made_at: str = ""  # date and time, for the reader
    command: str = ""
    warnings: list[str] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    choice: Choice | None = None
    comparison: Comparison | None = None
    highest_rate: float = 0.0
    prompt_share: float = 0.0
    adapters: AdapterEffect | None = None  # None: none were simulated
    checks: list[Check] = field(default_factory=list)
    ways: Ways | None = None  # in which several GPUs can share the work, this being the best; None: one engine's study
    was_interrupted: bool = False  # before all settings were tried, compared and confirmed

    @property
    def is_kept(self) -> bool:
        """Whether the chosen setting keeps the target; else it is only the nearest of those that were tried."""
        return self.choice is not None and not self.choice.broken

    @property
    def recommended(self) -> Trial:
        assert self.choice is not None
        return self.choice.trial

    def model_json(self) -> dict[str, int]:
        """What to paste into `1/model.json`."""
        return self.recommended.setting.model_json() if self.ways is None else self.ways.best.model_json()

    def to_json(self) -> dict[str, Any]:
        assert self.choice is not None
        names = ("continuous", "static", "static_known")
        both = {} if self.comparison is None else {name: getattr(self.comparison, name) for name in names}
        return {
            "traffic": self.traffic_name,
            "requests": len(self.traffic),
            "conditions": self.conditions,
            "cache": self.cache,
            "command": self.command,
            "made_at": self.made_at,
            "is_simulated": self.is_simulated,
            "target": {"ttft_ms": self.target.ttft_ms, "itl_ms": self.target.itl_ms},
            "rate": self.rate,
            "rate_origin": self.rate_origin,
            "verdict": "recommended" if self.is_kept else "nearest",
            "recommended": self.model_json(),
            "broken": self.choice.broken,
            "highest_rate": self.highest_rate,
            **({} if self.ways is None else {"ways": self.ways.to_json()}),
            "was_interrupted": self.was_interrupted,
            "gain": None if self.comparison is None else round(self.comparison.gain, 3),
            "gain_over_known": None if self.comparison is None else round(self.comparison.gain_over_known, 3),
            "prompt_share": round(self.prompt_share, 3),
            "adapters": None if self.adapters is None else self.adapters.to_json(),
            "comparison": {
                name: {"at_once": pair[0].to_json(), "at_load": pair[1].to_json()} for name, pair in both.items()
            },
            "trials": [
                {
                    "max_num_seqs": trial.setting.max_num_seqs,
                    "max_num_batched_tokens": trial.setting.max_num_batched_tokens,
                    "at_once": trial.saturated.to_json(),
                    "at_load": trial.loaded.to_json(),
                }
                for trial in self.trials
            ],
            "checks": [
                {
                    "name": c.name,
                    "predicted": c.predicted,
                    "measured": c.measured,
                    "lowest": c.lowest,
                    "highest": c.highest,
                    "error": round(c.error, 4),
                }
                for c in self.checks
            ],
            "warnings": self.warnings,
        }


def advise(study: Study) -> list[str]:
    """What the user should know before believing in the gain or the setting."""
    comparison, trial = study.comparison, study.recommended
    assert comparison is not None
    found = []
    if study.prompt_share > PROMPT_DOMINATED:
        found.append(
            f"prompts take {study.prompt_share:.0%} of the time: traffic like this is prefill-dominated, and batching"
            " answers better saves little of it; shared prefixes (enable_prefix_caching) and shorter prompts do more"
        )
    lengths = np.array(study.traffic.output_lens, np.float64)
    variation = float(lengths.std() / lengths.mean())
    if variation < UNIFORM_CV:
        found.append(
            f"answers are of nearly the same length (standard deviation {variation:.0%} of the mean): static batches"
            " lose little by waiting for their longest"
        )
    largest = trial.setting.max_num_seqs
    if len(study.traffic) < FEW_BATCHES * largest:
        found.append(
            f"{len(study.traffic)} requests are less than {FEW_BATCHES} batches of {largest}: with all of them at once"
            f" hardly anybody has to wait for a slot, so the gain cannot show; --num-requests {4 * largest} shows it"
        )
    if comparison.gain < 1:
        found.append(
            f"static batches do more tokens/s here: in flight does {comparison.gain:.2f} times theirs with all requests"
            " at once; compare the latencies"
        )
    elif comparison.gain < SMALL_GAIN:
        found.append(f"the gain over static batches is small: {comparison.gain:.2f} times the tokens/s")
    if study.rate > trial.saturated.requests_per_s:
        found.append(
            f"the load of {study.rate:.3g} requests/s is more than the engine does at best"
            f" ({trial.saturated.requests_per_s:.3g}): the queue grows for as long as it lasts"
        )
    elif study.rate < SMALL_LOAD * trial.saturated.requests_per_s:
        found.append(
            f"the load of {study.rate:.3g} requests/s is {study.rate / trial.saturated.requests_per_s:.0%} of what the"
            f" engine does at best ({trial.saturated.requests_per_s:.3g}): hardly anything waits, and the latencies say"
            " little of the settings; --rate tries a heavier load"
        )
    if trial.saturated.kv_peak > CACHE_FULL:
        found.append(
            f"the KV cache fills up ({trial.saturated.kv_peak:.0%}) and limits the batch; more cache, not more"
            " max_num_seqs, would raise the tokens/s"
        )
    return found + _doubts(study, comparison, trial)


def _doubts(study: Study, comparison: Comparison, trial: Trial) -> list[str]:
    """What makes the figures themselves uncertain."""
    found = []
    if study.fit_error > POOR_FIT:
        found.append(
            f"the step times fit with a median error of {study.fit_error:.0%}: what is simulated with them is as"
            " uncertain. Was the machine busy with other work? --cpu-time counts this process alone (on a CPU)"
        )
    swept, compared = trial.saturated.output_tokens_per_s, comparison.continuous[0].output_tokens_per_s
    if not study.is_simulated and abs(compared / swept - 1) > NOISE:
        found.append(
            f"every figure is of one run: {trial.setting} did {swept:,.0f} output tokens/s with all requests at once in"
            f" the sweep and {compared:,.0f} beside the static batches; smaller differences than that say nothing"
        )
    return found


def far_off(found: Sequence[Check]) -> list[str]:
    """Why predictions may have missed by much, one sentence for all of them."""
    missed = [check for check in found if abs(check.error) > FAR_OFF]
    if not missed:
        return []
    worst = max(missed, key=lambda check: abs(check.error))
    text = f"{worst.name}: predicted {worst.predicted:,.0f}, measured {worst.measured:,.0f}"
    spread = worst.highest / worst.lowest if worst.lowest else 1.0
    if spread > 1 + FAR_OFF:
        return [f"{text}, but the runs themselves lie between {worst.lowest:,.0f} and {worst.highest:,.0f}: they are"
                " too short, or the machine too busy, for this figure"]  # fmt: skip
    if worst.error > 0:
        return [f"{text}: the engine was faster than when its step times were measured (was the machine busy then?);"
                " the settings' order holds better than their figures"]  # fmt: skip
    return [f"{text}: the engine was slower than when its step times were measured (other work on the machine, or steps"
            " larger than the measured ones); take the measured figures"]  # fmt: skip


def checks(predicted: tuple[Figures, Figures], measured: Sequence[tuple[Figures, Figures]]) -> list[Check]:
    """Predictions held against measurements; each pair is (all at once, at the load), of one run or of several."""
    found = []
    for name, which, attribute, key in CHECKED:
        values = [_value(pair[which], attribute, key) for pair in measured]
        middle = float(np.median(values))
        if middle:
            found.append(Check(name, _value(predicted[which], attribute, key), middle, min(values), max(values)))
    return found


def _value(found: Figures, attribute: str, key: str) -> float:
    value = getattr(found, attribute)
    return float(value.get(key, 0.0)) if key else float(value)


def percentiles(values: Sequence[int]) -> str:
    """`p50 120, p90 400, p99 900` of some lengths."""
    return ", ".join(f"p{p} {np.percentile(values, p):,.0f}" for p in (50, 90, 99))
