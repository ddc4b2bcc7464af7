"""What a server says of itself over HTTP: its models, and their figures out of its metrics. It changes nothing."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cb_backend.cli.paths import CliError

TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([\w:]+)="((?:[^"\\]|\\.)*)"')
COUNTER = "cb_output_tokens_total"
_PORTS = "name a server's HTTP port (8000 unless it was told otherwise)"
ASKED_OF = "model"  # the label that names whose figure it is


@dataclass(frozen=True, slots=True)
class Sample:
    """A line of /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class ModelState:
    """Figures are None of a model that has none: it is not this backend's, or there are no metrics."""

    name: str
    state: str
    running: int | None = None
    waiting: int | None = None
    num_slots: int | None = None
    kv_usage: float | None = None  # 0 to 1
    num_tokens: float | None = None  # generated since the start
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServerState:
    """`models` by name. `version` is empty where the server does not tell it. `problem`: why nothing is known.
    `has_metrics`: they have answered."""

    version: str
    is_ready: bool
    models: dict[str, ModelState] = field(default_factory=dict)
    problem: str = ""
    has_metrics: bool = False


def read_samples(text: str) -> list[Sample]:
    """Of Prometheus' text form; what is no sample is left out."""
    samples = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is not None:
            try:
                samples.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
            except ValueError:
                continue
    return samples


def ask_server(
    http: str, metrics: str | None, headers: Mapping[str, str] | None = None, timeout: float = TIMEOUT_S
) -> ServerState:
    """The state of the server at `http` (host:port). `headers`: for an index that is kept to those who know a key.

    Raises `CliError` where nobody answers there.
    """
    about = _json(http, "/v2", _get(http, "/v2", timeout), dict)
    index_path = "/v2/repository/index"
    index = _json(http, index_path, _get(http, index_path, timeout, headers, data=b"{}"), list)
    samples, has_metrics = [], metrics is not None
    if metrics is not None:
        try:
            samples = read_samples(_get(metrics, "/metrics", timeout))
        except CliError:  # off, or somewhere else
            has_metrics = False
    is_ready = _is_ready(http, timeout)
    return ServerState(str(about.get("version", "")), is_ready, _models(index, samples), has_metrics=has_metrics)


def with_rates(before: ServerState, after: ServerState, seconds: float) -> ServerState:
    """`after`, with tokens a second since `before`."""
    models = {}
    for name, model in after.models.items():
        first = before.models.get(name)
        rate = None
        if first is not None and first.num_tokens is not None and model.num_tokens is not None:
            rate = max(model.num_tokens - first.num_tokens, 0.0) / seconds
        models[name] = replace(model, tokens_per_s=rate)
    return replace(after, models=models)


def _models(index: Iterable[dict[str, Any]], samples: list[Sample]) -> dict[str, ModelState]:
    states: dict[str, str] = {}
    for entry in index:  # an entry a version; one that serves says more than the others
        state = entry.get("state", "")
        text = f"{state.lower()}: {entry['reason']}" if entry.get("reason") else state.lower()
        if state == "READY" or entry["name"] not in states:
            states[entry["name"]] = text or "not loaded"
    return {name: _figures(name, states[name], samples) for name in sorted(states)}


def _figures(name: str, state: str, samples: list[Sample]) -> ModelState:
    own = [sample for sample in samples if sample.labels.get(ASKED_OF) == name]

    def of(metric: str, **labels: str) -> float | None:
        """The sum over versions."""
        found = [s.value for s in own if s.name == metric and labels.items() <= s.labels.items()]
        return sum(found) if found else None

    if state == "ready" and of("cb_engines_asleep"):
        state = "ready, asleep"
    running, waiting = of("cb_requests_running"), of("cb_requests_waiting")
    slots = of("nv_trt_llm_request_metrics", request_type="max")
    return ModelState(
        name,
        state,
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        None if slots is None else int(slots),
        of("cb_kv_cache_usage"),
        of(COUNTER),
    )


def _is_ready(http: str, timeout: float) -> bool:
    try:
        _get(http, "/v2/health/ready", timeout)
    except CliError:
        return False
    return True


def _get(
    address: str, path: str, timeout: float, headers: Mapping[str, str] | None = None, data: bytes | None = None
) -> str:
    request = urllib.request.Request(f"http://{address}{path}", data=data, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        raise CliError(f"http://{address}{path} answers {error.code} {error.reason}") from None
    except http.client.HTTPException:  # gRPC's port, say
        raise CliError(f"what answers at {address} does not speak HTTP; {_PORTS}") from None
    except (OSError, ValueError) as error:
        raise CliError(f"no server answers at {address} ({error}); start one: cb-backend serve") from None


def _json(address: str, path: str, text: str, kind: type[Any]) -> Any:
    """The value of an answer. Raises `CliError` for one that no Triton server gives."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise CliError(f"http://{address}{path} does not answer as a Triton server does; {_PORTS}")
    return value
