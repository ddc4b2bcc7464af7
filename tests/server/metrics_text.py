"""/metrics as a strict parser of our own reads it, and requests measured by their client, to be compared with it.

Every sample must belong to a family that was announced, every histogram must be whole.
"""

from __future__ import annotations

import re
import time
import urllib.request
from dataclasses import dataclass, field

import pytest

from cb_backend.cli.paths import load_client
from tests.server.conftest import RunningServer
from tests.waiting import WAIT_S, eventually

LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({LABEL}(?:,{LABEL})*)?\}})? (\S+)")
Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    kind: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)  # (name, labels) -> value


def parse(text: str) -> dict[str, Family]:
    """Families by name. Raises `AssertionError` at anything that the text format does not allow."""
    families: dict[str, Family] = {}
    helped: set[str] = set()
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped, f"announced twice: {name}"
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert kind in ("counter", "gauge", "histogram", "summary"), line
            assert current in helped, line
            assert current not in families, f"two types: {current}"
            families[current] = Family(kind)
        else:
            match = SAMPLE.fullmatch(line)
            assert match, f"not a sample: {line!r}"
            name, labels, value = match.group(1), frozenset(re.findall(LABEL, match.group(2) or "")), match.group(7)
            suffixes = ("_bucket", "_sum", "_count") if families[current].kind == "histogram" else ("",)
            assert name in {current + suffix for suffix in suffixes}, f"{name} does not belong to {current}"
            assert (name, labels) not in families[current].samples, f"twice: {line}"
            families[current].samples[name, labels] = float(value)
    for name, family in families.items():
        if family.kind == "histogram":
            check_histogram(name, family)
        elif family.kind == "counter":
            assert all(value >= 0 for value in family.samples.values()), name
    return families


def check_histogram(name: str, family: Family) -> None:
    series = {labels for sample, labels in family.samples if sample == f"{name}_count"}
    assert series, f"{name} has no count"
    for labels in series:
        buckets = sorted(
            (float(dict(others)["le"]), value)
            for (sample, others), value in family.samples.items()
            if sample == f"{name}_bucket" and {pair for pair in others if pair[0] != "le"} == labels
        )
        counts = [count for _, count in buckets]
        assert counts == sorted(counts), f"{name}: buckets must grow"
        assert buckets[-1] == (float("inf"), family.samples[f"{name}_count", labels])
        assert (f"{name}_sum", labels) in family.samples


class Snapshot:
    """One reading of /metrics."""

    def __init__(self, server: RunningServer) -> None:
        with urllib.request.urlopen(f"http://{server.process.metrics_address}/metrics", timeout=WAIT_S) as response:
            self.families = parse(response.read().decode())

    def value(self, name: str, family: str = "", model: str = "llm", **labels: str) -> float:
        """A sample's value; 0 where the metric does not exist yet."""
        key = frozenset({"model": model, "version": "1", **labels}.items())
        found = self.families.get(family or name)
        return found.samples.get((name, key), 0.0) if found is not None else 0.0

    def histogram(self, name: str, model: str = "llm") -> tuple[float, float]:
        """(count, sum)"""
        return self.value(f"{name}_count", name, model), self.value(f"{name}_sum", name, model)

    def counters(self) -> dict[tuple[str, Labels], float]:
        """All of ours that only grows."""
        return {
            key: value
            for family in self.families.values()
            if family.kind in ("counter", "histogram")
            for key, value in family.samples.items()
            if key[0].startswith(("cb_", "vllm:"))
        }


@dataclass
class Measured:
    """One request as its client saw it; seconds from the sending."""

    times: list[float]  # of the responses with tokens
    num_prompt_tokens: int
    num_output_tokens: int


def measure(server: RunningServer, prompt: str, max_tokens: int, model: str = "llm") -> Measured:
    client = load_client().Client(server.url, model, timeout=600.0)
    begin = time.perf_counter()
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    responses = [r for r in client.responses(prompt, is_streaming=True, **sampling) if r.num_output_tokens]
    num_prompt_tokens = max(response.num_input_tokens for response in responses)
    num_output_tokens = sum(response.num_output_tokens for response in responses)
    return Measured([response.received_at - begin for response in responses], num_prompt_tokens, num_output_tokens)


def settled(server: RunningServer, num_requests: float, model: str = "llm") -> Snapshot:
    """A reading in which this many requests have ended and all gauges are back to idle."""

    def is_settled() -> bool:
        now = Snapshot(server)
        active = now.value("nv_trt_llm_request_metrics", model=model, request_type="active")
        return ended(now, model) >= num_requests and active == 0

    eventually(is_settled, f"{num_requests} requests have ended and none is active")
    readings = [Snapshot(server)]

    def is_quiet() -> bool:
        time.sleep(1.2)  # front ends publish by themselves, twice a second
        readings.append(Snapshot(server))
        return readings[-1].counters() == readings[-2].counters() and is_told_whole(readings[-1], model)

    eventually(is_quiet, "everything is told")
    return readings[-1]


def is_told_whole(snapshot: Snapshot, model: str) -> bool:
    """Not taken while somebody publishes: what ends with a request is told for each, and of each step all."""

    def num_told(name: str) -> float:
        return snapshot.histogram(name, model)[0] + snapshot.value(
            "cb_unobserved_values_total", model=model, histogram=name
        )

    num_good = sum(snapshot.value("cb_requests_total", model=model, outcome=outcome) for outcome in ("stop", "length"))
    of_requests = [f"cb_request_{name}" for name in ("prompt_tokens", "output_tokens", "decode_time_seconds")]
    num_steps = snapshot.value("cb_steps_total", model=model)
    of_steps = [num_told(f"cb_step_{name}") for name in ("seconds", "requests", "tokens")]
    return {num_told(name) for name in of_requests} == {num_good} and of_steps == [num_steps] * 3


def about(total: float) -> object:
    """A histogram's sum: the server adds floats up, thirds and all."""
    return pytest.approx(total, rel=1e-9)


def ended(snapshot: Snapshot, model: str = "llm") -> float:
    outcomes = ("stop", "length", "cancelled", "invalid_arg", "unavailable", "internal")
    return sum(snapshot.value("cb_requests_total", model=model, outcome=outcome) for outcome in outcomes)
