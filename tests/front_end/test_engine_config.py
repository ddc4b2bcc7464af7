"""What `1/model.json` may say, and what each wrong value is told: pytest tests/front_end/test_engine_config.py"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from cb_backend.contracts.config import MAX_COUNT, MAX_RUN_AHEAD, EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.support.version_folder import load_engine_config

INFINITE = float("inf")


def test_a_model_alone_gets_every_default() -> None:
    assert engine_config_from_dict({"model": "folder"}) == EngineConfig(model="folder")


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("enforce_eager", "true", True),
        ("enforce_eager", "0", False),
        ("max_num_seqs", "8", 8),
        ("max_num_seqs", 8.0, 8),
        ("max_num_seqs", MAX_COUNT, MAX_COUNT),
        ("max_num_seqs", str(MAX_COUNT - 1), MAX_COUNT - 1),
        ("seed", -MAX_COUNT, -MAX_COUNT),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("dtype", "half", "float16"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("max_model_len", None, None),
        ("run_ahead", MAX_RUN_AHEAD, MAX_RUN_AHEAD),
        ("run_ahead", 0, 0),
        ("reserved_priority", 99, 99),
        ("reserved_priority", -100, -100),
        ("admission_reserve", -10, -10.0),
        ("data_parallel_size", 64, 64),
        ("gpu_memory_utilization", 1, 1.0),
        ("watchdog_timeout_s", 0, 0.0),
    ],
)
def test_values_as_people_write_them_and_at_their_borders(name: str, given: object, meant: object) -> None:
    assert getattr(engine_config_from_dict({"model": "m", name: given}), name) == meant


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "does not set 'model'"),
        ({"model": ""}, "model is empty"),
        ({"max_num_seq": 8}, "unknown engine argument 'max_num_seq' in model.json; did you mean 'max_num_seqs'?"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        *[
            ({name: value}, f"{name} is {int(value)}; it must be at most {MAX_COUNT}")
            for name in ("max_num_seqs", "max_model_len", "timeout_ms", "max_queue_tokens", "max_loras")
            for value in (MAX_COUNT + 1, 10**30, str(10**30), 1e30)
        ],
        ({"seed": 10**30}, f"seed is {10**30}; it must be between {-MAX_COUNT} and {MAX_COUNT}"),
        ({"data_parallel_size": 10**30}, f"data_parallel_size is {10**30}; it must be between 1 and 64"),
        ({"swap_space": 99999999999}, "swap_space is 1e.11; it must be GiB of memory, 0 or more and below 1048576"),
        ({"max_num_seqs": None}, "'max_num_seqs' is null; remove it to get the default"),
        ({"max_num_seqs": 2.5}, "'max_num_seqs' must be of type int, got 2.5"),
        ({"max_num_seqs": True}, "must be of type int, got True"),
        ({"enforce_eager": "perhaps"}, "must be of type bool, got 'perhaps'"),
        ({"timeout_ms": 0}, "timeout_ms is 0; it must be at least 1"),
        ({"run_ahead": MAX_RUN_AHEAD + 1}, f"run_ahead is 5; it must be between 0 and {MAX_RUN_AHEAD}"),
        ({"reserved_priority": 100}, "reserved_priority is 100; it must be between -100 and 99"),
        ({"data_parallel_size": 0}, "it must be between 1 and 64"),
        ({"admission_reserve": float("nan")}, "it must be between -10 and 10"),
        ({"dtype": "int8"}, "dtype is 'int8'; use one of auto, float32"),
        ({"quantization": "bitsandbytes"}, "quantization is 'bitsandbytes'; use 'fp8', or remove it"),
        ({"device": "tpu"}, "device is 'tpu'; use one of auto, cpu, cuda"),
        (
            {"scheduling_policy": "static"},
            "'scheduling_policy' is 'static', but requests always run in flight .`cb-backend study` compares that with"
            " static batches.; remove it or use 'fcfs' or 'priority'",
        ),
        ({"scheduling_policy": "best"}, "'scheduling_policy' is 'best', but requests always run in flight"),
        ({"scheduling_policy": None}, "'scheduling_policy' is None, but requests always run in flight"),
        ({"prefill_policy": "hybrid"}, "changes nothing without max_itl_ms"),
        ({"max_itl_ms": 0}, "it must be above 0"),
        ({"max_itl_ms": 20, "enable_chunked_prefill": False}, "it needs enable_chunked_prefill"),
        ({"swap_space": -1}, "it must be GiB of memory, 0 or more"),
        ({"reserved_share": 1}, "it must be at least 0 and below 1"),
        ({"priority_aging_s": INFINITE}, "it must be a number of seconds, 0 or more"),
        ({"gpu_memory_utilization": 0}, "it must be above 0 and at most 1"),
        ({"watchdog_timeout_s": 1}, "it must be 0 .off. or at least 2 seconds"),
        ({"idle_sleep_s": -1}, "idle_sleep_s is -1.0; it must be between 0 and"),
        ({"idle_sleep_s": "nan"}, "idle_sleep_s is nan; it must be between 0 and"),
        ({"sleep_weights": "disk", "idle_sleep_s": 1}, "sleep_weights is 'disk'; use one of auto, host, files"),
        ({"sleep_weights": "host"}, "which changes nothing without idle_sleep_s"),
        ({"idle_sleep_s": 0, "tensor_parallel_size": 2}, "idle_sleep_s is set, but sleep is supported on one device"),
        (
            {"pipeline_parallel_size": 2},
            "'pipeline_parallel_size' is 2, which is not supported yet; remove it or use 1",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_a_remedy(arguments: dict[str, object], message: str) -> None:
    given = arguments if arguments == {} or "model" in arguments else {"model": "m", **arguments}
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        engine_config_from_dict(given)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(ConfigError, match=r"model\.json is missing"):
        load_engine_config(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_engine_config(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, found list"):
        load_engine_config(path)
    path.write_text(json.dumps({"model": "m", "trust_remote_code": "false"}))
    assert load_engine_config(path) == EngineConfig(model="m")


def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    """A server that polls reads it at any moment. One that stays broken is told."""
    path = tmp_path / "model.json"
    path.write_text("")
    writer = threading.Timer(0.3, lambda: path.write_text('{"model": "m"}'))
    writer.start()
    assert load_engine_config(path) == EngineConfig(model="m")
    writer.join()
    path.write_text('{"model": ')
    with pytest.raises(ConfigError, match=r"model\.json is not valid JSON"):
        load_engine_config(path)
