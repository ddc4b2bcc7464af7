"""How an engine process is started: interpreter, environment, device, command line. It keeps no state."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import cb_backend
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.support.native_paths import native_path

ENGINE_MODULE = "cb_backend.engine.engine_process"


def launch_engine(
    python: str, config: EngineConfig, config_json: str, index: int, socket_path: str, server_pid: int
) -> subprocess.Popen[bytes]:
    """Start engine `index` of `config.data_parallel_size`. Raises `ConfigError` if that cannot be."""
    command = [str(native_path(python)), "-m", ENGINE_MODULE, "--socket", socket_path, "--server-pid", str(server_pid)]
    environment = {**engine_environment(), **share_environment(config, index)}
    try:
        return subprocess.Popen(
            [*command, "--config-json", config_json],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the server's log
            stderr=2,
            close_fds=True,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C: the server decides when to end
            env=environment,
        )
    except OSError as error:
        raise ConfigError(
            f"the engine's interpreter {python} cannot be started ({error.strerror}); set engine_python in"
            " model.json to one that can"
        ) from None


def engine_environment() -> dict[str, str]:
    """The environment of an engine process: ours, waiting threads that sleep, and this package importable.

    From an installed package nothing is added: another `engine_python` must not see this interpreter's site-packages.
    """
    environment = dict(os.environ)
    # On a CPU, threads that wait for each other must sleep: where spinning ones share cores with others (2 cores, load
    # 9), a decode step of the demo model took 7 s instead of 0.9 s.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    root = Path(cb_backend.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    return environment


def share_environment(config: EngineConfig, index: int) -> dict[str, str]:
    """What makes several engines of one model share a machine: a GPU each, or a part of the cores each.

    Raises `ConfigError` if there are fewer GPUs than engines.
    """
    num_engines = config.data_parallel_size
    if num_engines == 1:
        return {}
    devices = [] if config.device == "cpu" else visible_gpus()
    if devices and len(devices) < num_engines:
        raise ConfigError(
            f"data_parallel_size is {num_engines}, and each engine takes a GPU of its own, but {len(devices)} can be"
            " seen; lower it, or name more in CUDA_VISIBLE_DEVICES"
        )
    if devices:
        return {"CUDA_VISIBLE_DEVICES": devices[index]}
    num_threads = max(len(os.sched_getaffinity(0)) // num_engines, 1)
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(num_threads)}


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i in range(sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir()))]
    names = [name.strip() for name in named.split(",")]
    end = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return names[:end]  # what follows a name that is none is not seen, as CUDA has it
