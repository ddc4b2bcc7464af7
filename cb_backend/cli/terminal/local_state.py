"""What runs on this machine: servers with engines of this backend, their ports, gateways, and each engine's last steps.

Found by the runtime folders of this user's engines and by command lines; an engine is asked for its step log.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cb_backend.cli.server.addresses import with_port
from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.step_dump import StepDump
from cb_backend.front_end.engines.engine_observer import ask_for_steps, model_of, running_engines
from cb_backend.front_end.engines.runtime_dir import EngineLife, read_model, server_pid_of
from cb_backend.serving.server_arguments import access_headers, client_host, is_on, of_process, reachable_host

WINDOW_S = 5.0  # of an engine's figures
MAX_STEPS = 4000
ANSWER_S = 2.0
IDLE_S = 1.0  # without a step
_DEFAULT_PORTS = {"http": "8000", "grpc": "8001", "metrics": "8002"}
_MODULE, _SCRIPT, _COMMAND = ["-m", "cb_backend.cli.main"], "cb-backend", "openai"


@dataclass(frozen=True, slots=True)
class EngineState:
    """`problem`: why there are no figures; else empty. Tokens and steps are a second's, of the last `WINDOW_S`."""

    pid: int
    model: str  # what it serves
    name: str  # of the server's model
    problem: str = ""
    running: int = 0
    num_slots: int = 0
    kv_usage: float = 0.0
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    rest: str = ""  # awake, asleep and so on, of an engine that can sleep
    weights: str = ""  # folder of those that an update has brought
    lost_update: str = ""  # why those of an update are not served any more
    update: str = ""  # folder of those that are to be served next


@dataclass(frozen=True, slots=True)
class LocalServer:
    """Addresses are host:port; None: switched off."""

    pid: int
    http: str | None
    grpc: str | None
    metrics: str | None
    index_headers: dict[str, str]
    engines: tuple[EngineLife, ...]


def local_servers(base: Path | None = None) -> list[LocalServer]:
    """Servers of this user's engines, by pid. `base`: the folder of runtime folders, where it is not the usual one."""
    engines: dict[int, list[EngineLife]] = {}
    for life in running_engines(base):
        engines.setdefault(server_pid_of(life.folder), []).append(life)
    return [_server(pid, tuple(lives)) for pid, lives in sorted(engines.items())]


def _server(pid: int, engines: tuple[EngineLife, ...]) -> LocalServer:
    arguments = of_process(pid)
    is_known = "model-repository" in arguments or "model-store" in arguments  # else it is embedded in some program
    found = {
        protocol: with_port(client_host(arguments, protocol), arguments.get(f"{protocol}-port", port))
        if is_known and is_on(arguments, f"allow-{protocol}")
        else None
        for protocol, port in _DEFAULT_PORTS.items()
    }
    headers = access_headers(arguments, "http", "model-repository")
    return LocalServer(pid, found["http"], found["grpc"], found["metrics"], headers, engines)


def gateways(grpc: str | None) -> list[str]:
    """Addresses of this machine's OpenAI gateways for the server at `grpc`."""
    found = []
    for folder in Path("/proc").iterdir():
        words = _gateway_options(_command_line(folder)) if folder.name.isdigit() else None
        if words is None or _same(_value(words, "--url", "localhost:8001")) != _same(grpc or ""):
            continue
        host = reachable_host(_value(words, "--host", "127.0.0.1"))
        found.append(with_port(host, _value(words, "--port", "9000")))
    return sorted(set(found))


def _gateway_options(words: list[str]) -> list[str] | None:
    """Of a process's command line, where it is a gateway's: as `serve` starts one, or as people do."""
    if words[1:3] == _MODULE:
        words = words[1:]
    elif Path("".join(words[1:2])).name != _SCRIPT:
        return None
    return words[3:] if words[2:3] == [_COMMAND] else None


def _command_line(folder: Path) -> list[str]:
    try:
        return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _value(words: list[str], option: str, default: str) -> str:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return default


def _same(address: str) -> str:
    return address.replace("localhost", "127.0.0.1")


def engine_state(life: EngineLife) -> EngineState:
    """Asks the engine; one that does not answer has a `problem`."""
    model, name = model_of(life), read_model(life.folder)
    try:
        dump = ask_for_steps(life.socket_path, MAX_STEPS, ANSWER_S)
    except UnavailableError:
        return EngineState(life.pid, model, name, f"has not answered for {ANSWER_S:g} s: it starts, or a step is long")
    return state_of(dump, time.monotonic(), life.pid, model, name)


def state_of(dump: StepDump, now: float, pid: int = 0, model: str = "", name: str = "") -> EngineState:
    """`now`: of the clock that the dump's times are of, `time.monotonic`."""
    begins, ends = np.frombuffer(dump.begins, "<f8"), np.frombuffer(dump.ends, "<f8")
    idle = EngineState(pid, model, name, num_slots=dump.num_slots)
    if dump.rest is not None:
        rest = dump.rest
        idle = replace(idle, rest=rest.state, weights=rest.weights, lost_update=rest.lost_update, update=rest.update)
    if not len(begins):
        return idle
    rows, decodes = np.frombuffer(dump.num_rows, "<i4"), np.frombuffer(dump.num_decode_rows, "<i4")
    first_rows = np.concatenate([[0], np.cumsum(rows)])
    tokens = np.concatenate([[0], np.cumsum(np.frombuffer(dump.num_scheduled_tokens, "<i4"))])
    scheduled = tokens[first_rows[1:]] - tokens[first_rows[:-1]]
    window = min(WINDOW_S, max(now - begins[0], 1e-3))
    recent = begins >= now - window
    is_running = ends[-1] == 0 or now - ends[-1] < IDLE_S
    used = dump.num_blocks - int(np.frombuffer(dump.num_free_blocks, "<i4")[-1])
    return replace(
        idle,
        running=int(rows[-1]) if is_running else 0,
        kv_usage=used / max(dump.num_blocks, 1) if is_running else 0.0,
        output_tokens_per_s=float(decodes[recent].sum() / window),
        prompt_tokens_per_s=float((scheduled - decodes)[recent].sum() / window),
        steps_per_s=float(recent.sum() / window),
    )
