"""The `parameters` of a model's config.pbtxt: which there are, and what their text means.

The server takes any name and any text. A name that is nearly one of ours is a typing error and refused; any other is
another tool's business, and the log says that it has no effect here.
"""

from __future__ import annotations

import difflib
import logging
from typing import Any

from cb_backend.contracts.errors import ConfigError
from cb_backend.serving.responder import DEFAULT_SLOW_READER_TIMEOUT_S

DEFAULT_SENDER_THREADS = 4
OURS = ("sender_threads", "slow_reader_timeout_s", "REPORT_CUSTOM_METRICS", "exclude_input_in_output")
OF_THE_SERVER = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")  # its Python backend reads these
_BOOLS = {"": False, "true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

logger = logging.getLogger("cb_backend.serving")


def check_parameter_names(model_config: dict[str, Any]) -> None:
    """Raises `ConfigError` for a name that is one of `OURS` but for a typing error; logs other unknown ones."""
    names = {name.lower(): name for name in OURS}
    for name in model_config.get("parameters", {}):
        if name in (*OURS, *OF_THE_SERVER):
            continue
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
        if close:
            raise ConfigError(f"unknown parameter {name!r} in config.pbtxt; did you mean {names[close[0]]!r}?")
        logger.warning("parameter %r in config.pbtxt has no effect on this backend", name)


def sender_threads(model_config: dict[str, Any]) -> int:
    """`sender_threads`: threads that send responses, in each front end."""
    value = _text(model_config, "sender_threads")
    if not value:
        return DEFAULT_SENDER_THREADS
    if not value.isdecimal() or len(value) > 2 or not 1 <= int(value) <= 64:
        raise _refused("sender_threads", value, "a number from 1 to 64")
    return int(value)


def slow_reader_timeout_s(model_config: dict[str, Any]) -> float:
    """`slow_reader_timeout_s`: seconds for which a response may wait to be taken."""
    value = _text(model_config, "slow_reader_timeout_s")
    if not value:
        return DEFAULT_SLOW_READER_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise _refused("slow_reader_timeout_s", value, "a number of seconds above 0")
    return seconds


def reports_vllm_names(model_config: dict[str, Any]) -> bool:
    """`REPORT_CUSTOM_METRICS`, as with vLLM's backend: its metrics, under its names."""
    return _bool(model_config, "REPORT_CUSTOM_METRICS")


def excludes_input(model_config: dict[str, Any]) -> bool:
    """`exclude_input_in_output`, as TensorRT-LLM has it."""
    return _bool(model_config, "exclude_input_in_output")


def _bool(model_config: dict[str, Any], name: str) -> bool:
    value = _text(model_config, name)
    if value.lower() not in _BOOLS:
        raise _refused(name, value, "true or false")
    return _BOOLS[value.lower()]


def _text(model_config: dict[str, Any], name: str) -> str:
    return str(model_config.get("parameters", {}).get(name, {}).get("string_value", "")).strip()


def _refused(name: str, value: str, remedy: str) -> ConfigError:
    return ConfigError(f"parameter {name} in config.pbtxt is {value[:80]!r}; use {remedy}")
