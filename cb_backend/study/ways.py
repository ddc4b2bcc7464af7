"""Studies of several ways to spread a model over the GPUs of a host, side by side, and which way to take.

Engines tell each other nothing: of `data_parallel_size` engines one was studied, with its share of the requests, and
what it did counts so many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_backend.study.gpu_plan import NEARLY
from cb_backend.study.sweep import Trial


@dataclass(frozen=True, slots=True)
class TriedWay:
    """One way, and what one of its engines did with its share of the requests."""

    tensor_parallel_size: int
    data_parallel_size: int
    trial: Trial  # of the setting that was chosen
    is_kept: bool  # it keeps the target
    rate: float  # requests/s, of the engine, at the load of interest
    is_reckoned: bool  # its step times are those of another number of GPUs, in the proportion that is reckoned

    @property
    def tokens_per_second(self) -> float:
        """Output tokens, of all engines, with all requests at once."""
        return self.data_parallel_size * self.trial.saturated.output_tokens_per_s

    def model_json(self) -> dict[str, int]:
        """What to paste into `1/model.json`."""
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            **self.trial.setting.model_json(),
        }


@dataclass(frozen=True, slots=True)
class Ways:
    """All that were tried, at least one."""

    tried: Sequence[TriedWay]
    failed: Sequence[int] = ()  # `tensor_parallel_size` of those that could not be studied

    @property
    def best(self) -> TriedWay:
        """Of those that keep the target, or else of all: the one with the most tokens a second, and of those that are
        nearly equal the one of the fewest GPUs that hold a model together."""
        good = [way for way in self.tried if way.is_kept] or self.tried
        most = max(way.tokens_per_second for way in good)
        enough = [way for way in good if way.tokens_per_second >= (1 - NEARLY) * most]
        return min(enough, key=lambda way: way.tensor_parallel_size)

    def table(self) -> list[list[str]]:
        """A row a way; the first row is the header."""
        header = ["tp", "dp", "seqs", "tokens a step", "tokens/s at once, all", "TTFT p99, ms", "inter-token p99, ms"]
        header += ["target", "step times"]
        rows = []
        for way in self.tried:
            trial = way.trial
            mark = "kept" if way.is_kept else "missed"
            times = "reckoned" if way.is_reckoned else "measured"
            rows.append(
                [
                    str(way.tensor_parallel_size),
                    str(way.data_parallel_size),
                    str(trial.setting.max_num_seqs),
                    str(trial.setting.max_num_batched_tokens),
                    f"{way.tokens_per_second:,.1f}",
                    f"{trial.loaded.ttft_ms['p99']:,.0f}",
                    f"{trial.loaded.itl_ms.get('p99', 0.0):,.1f}",
                    f"{mark}, chosen" if way is self.best else mark,
                    times,
                ]
            )
        return [header, *rows]

    def summary(self) -> str:
        """What the figures that follow are of."""
        best, failed = self.best, ""
        if self.failed:
            failed = f"tensor_parallel_size {', '.join(map(str, self.failed))} could not be studied (why: above). "
        if best.data_parallel_size == 1:
            return f"{failed}Below: tensor_parallel_size {best.tensor_parallel_size}, one engine."
        return (
            f"{failed}Below: one of {best.data_parallel_size} engines of tensor_parallel_size"
            f" {best.tensor_parallel_size}, with its share of the requests."
        )

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                **way.model_json(),
                "output_tokens_per_s": way.tokens_per_second,
                "rate": way.data_parallel_size * way.rate,
                "at_once": way.trial.saturated.to_json(),
                "at_load": way.trial.loaded.to_json(),
                "verdict": "recommended" if way.is_kept else "nearest",
                "step_times": "reckoned" if way.is_reckoned else "measured",
                "is_chosen": way is self.best,
            }
            for way in self.tried
        ]
