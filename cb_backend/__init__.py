"""cb_backend: in-flight batching for large language models inside NVIDIA Triton Inference Server.

The rooms, from the top down: `cli`, `serving` (the server's Python-backend interface), `gateway` (OpenAI's API in
front of a server), `llm` (the same answers in process, without a server), `study` (traffic measured and simulated),
`front_end` (text in, text out, no torch), `engine` (scheduler and model runner), `models`, `kv_cache`, `layers`,
`parallel` (devices that share a model), `kernels`, `traffic` (what is sent when), `support` (small tools that know no
room) and `contracts` (the plain data that passes between rooms). Imports only go down this list.

As a library: `from cb_backend import LLM, SamplingParams`. The public names are imported when they are first asked
for, so that `import cb_backend` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cb_backend.contracts.config import EngineConfig
    from cb_backend.llm.llm import LLM
    from cb_backend.llm.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "cb_backend.llm.llm",
    "SamplingParams": "cb_backend.llm.sampling",
    "EngineConfig": "cb_backend.contracts.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
