"""How an engine process is started: interpreter, environment, device, command line. It keeps no state."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.support.child_environment import child_environment
from cb_backend.support.native_paths import native_path

ENGINE_MODULE = "cb_backend.engine.engine_process"


def launch_engine(
    python: str, config: EngineConfig, config_json: str, index: int, socket_path: str, server_pid: int
) -> subprocess.Popen[bytes]:
    """Start engine `index` of `config.data_parallel_size`. Raises `ConfigError` if that cannot be."""
    command = [str(native_path(python)), "-m", ENGINE_MODULE, "--socket", socket_path, "--server-pid", str(server_pid)]
    environment = {**child_environment(), **share_environment(config, index)}
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


def share_environment(config: EngineConfig, index: int) -> dict[str, str]:
    """What makes several engines of one model share a machine: GPUs of their own each, or a part of the cores each.

    Raises `ConfigError` if there are fewer GPUs than the engines take.
    """
    num_engines, num_ranks = config.data_parallel_size, config.tensor_parallel_size
    if num_engines == num_ranks == 1:
        return {}
    devices = [] if config.device == "cpu" else visible_gpus()
    if devices and len(devices) < num_engines * num_ranks:
        each = "a GPU of its own" if num_ranks == 1 else f"{num_ranks} GPUs (tensor_parallel_size)"
        raise ConfigError(
            f"data_parallel_size is {num_engines}, and each engine takes {each}, but {len(devices)} can be"
            " seen; lower it, or name more in CUDA_VISIBLE_DEVICES"
        )
    if devices:  # all of an engine's ranks see all of its GPUs: each finds its peers' memory by their numbers
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[index * num_ranks : (index + 1) * num_ranks])}
    num_threads = max(len(os.sched_getaffinity(0)) // (num_engines * num_ranks), 1)
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(num_threads)}


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i in range(sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir()))]
    names = [name.strip() for name in named.split(",")]
    end = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return names[:end]  # what follows a name that is none is not seen, as CUDA has it
