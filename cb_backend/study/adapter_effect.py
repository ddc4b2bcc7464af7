"""What adapters cost in a simulation: the same requests and setting, with them and through the model as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cb_backend.study.adapter_mix import AdapterMix
from cb_backend.study.figures import Figures
from cb_backend.study.sweep import Trial

MANY_LOADS = 0.5  # a request: the slots do not hold what is asked for


@dataclass(frozen=True, slots=True)
class AdapterEffect:
    """Of the recommended setting."""

    mix: AdapterMix
    adapted: Trial
    plain: Trial

    def table(self) -> list[list[str]]:
        """A row a figure, both loads beside each other; the first row is the header."""
        columns = [self.adapted.saturated, self.plain.saturated, self.adapted.loaded, self.plain.loaded]
        header = ["", "all at once", "without adapters", "at the load", "without adapters"]

        def ttft(found: Figures, which: str) -> str:
            return f"{found.ttft_ms[which]:,.0f}"

        return [
            header,
            ["adapters loaded", *(f"{found.num_adapter_loads:,}" for found in columns)],
            ["requests waiting, mean", *(f"{found.mean_waiting:,.1f}" for found in columns)],
            ["TTFT p50, ms", *(ttft(found, "p50") for found in columns)],
            ["TTFT p99, ms", *(ttft(found, "p99") for found in columns)],
            ["requests in a step", *(f"{found.mean_rows:.1f}" for found in columns)],
            ["output tokens/s", *(f"{found.output_tokens_per_s:,.1f}" for found in columns)],
        ]

    def to_json(self) -> dict[str, Any]:
        mix = self.mix
        sides = {"with": self.adapted, "without": self.plain}
        return {
            "names": mix.num_names,
            "skew": mix.skew,
            "max_loras": mix.num_slots,
            "load_ms": round(mix.load_seconds * 1e3, 5),
            **{
                name: {"at_once": trial.saturated.to_json(), "at_load": trial.loaded.to_json()}
                for name, trial in sides.items()
            },
        }

    def advice(self, num_requests: int) -> list[str]:
        """What the reader should know of it."""
        found = ["the adapters' own arithmetic is not in the step times: real steps take longer"]
        loads = self.adapted.loaded.num_adapter_loads
        if loads > MANY_LOADS * num_requests and self.mix.num_slots < self.mix.num_names:
            found.append(
                f"{loads:,} loads for {num_requests:,} requests: {self.mix.num_slots} slots do not hold the adapters"
                " that are asked for; raise max_loras"
            )
        return found
