"""The fp8 settings in the engine: tokens do not depend on company, chunks, preemption, swap or the runner."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.runner_factory import resolve_quantization
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.kv_cache.storage import resolve_kv_dtype
from cb_backend.models.registry import read_model_config
from tests.engine.drive import Run, config, run
from tests.models.tiny_checkpoints import write_checkpoint

GREEDY = TokenRules(max_tokens=16, temperature=0.0, seed=0, ignore_eos=True)
FORMATS = [
    {"kv_cache_dtype": "fp8"},
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8", "quantization": "fp8"},
]
PROMPTS = [np.random.default_rng(3).integers(3, 97, 82 + index).tolist() for index in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("tiny")))


def make_engine(folder: str, **settings: object) -> LLMEngine:
    common = {"block_size": 4, "num_gpu_blocks_override": 120, "max_model_len": 128, "max_num_seqs": 4}
    return create_engine(config(folder, **{**common, **settings}))


def fresh(engine: LLMEngine, num_blocks: int | None = None, **changes: object) -> LLMEngine:
    info = engine.info if num_blocks is None else msgspec.structs.replace(engine.info, num_blocks=num_blocks)
    return LLMEngine(dataclasses.replace(engine.config, **changes), engine.runner, info)  # type: ignore[arg-type]


def alone(engine: LLMEngine) -> dict[int, list[int]]:
    runs = [run(fresh(engine, enable_prefix_caching=False), [prompt], GREEDY) for prompt in PROMPTS]
    return {index: one.token_ids[0] for index, one in enumerate(runs)}


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_tokens_do_not_depend_on_the_batch(folder: str, formats: dict[str, object]) -> None:
    engine = make_engine(folder, **formats)
    expected = alone(engine)
    assert expected != alone(make_engine(folder)), "the format is not felt at all"

    def check(got: Run) -> None:
        assert got.token_ids == expected

    check(run(fresh(engine), PROMPTS, GREEDY))  # in company
    check(run(fresh(engine, max_num_batched_tokens=7), PROMPTS, GREEDY, arrivals=[0, 3, 9]))  # in chunks
    cached = fresh(engine)
    check(run(cached, PROMPTS, GREEDY))
    check(run(cached, PROMPTS, GREEDY))
    assert cached.stats().num_cached_prompt_tokens >= 240
    tight = fresh(engine, num_blocks=68, enable_prefix_caching=False)
    check(run(tight, PROMPTS, GREEDY))
    assert tight.stats().num_preemptions >= 1


@pytest.mark.parametrize("run_ahead", [0, 4])
@pytest.mark.parametrize("formats", FORMATS[2:], ids=str)
def test_tokens_after_a_swap_are_the_same(folder: str, formats: dict[str, object], run_ahead: int) -> None:
    engine = make_engine(folder, **formats)
    expected = alone(engine)
    settings = dataclasses.replace(
        engine.config, num_gpu_blocks_override=68, enable_prefix_caching=False, swap_space=0.01, run_ahead=run_ahead
    )
    swapping = create_engine(settings)
    assert run(swapping, PROMPTS, GREEDY).token_ids == expected
    assert swapping.stats().num_swapped_in >= 1


def test_an_fp8_cache_has_four_times_the_blocks_of_a_float32_one(folder: str) -> None:
    memory = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "swap_space": 0.01}
    full, narrow = make_engine(folder, **memory), make_engine(folder, **memory, kv_cache_dtype="fp8_e4m3")
    assert isinstance(narrow.runner, SlotRunner)
    assert narrow.runner.storage.data.dtype == torch.float8_e4m3fn
    assert (narrow.info.num_blocks + 1) // 4 == full.info.num_blocks + 1  # the null block included
    assert narrow.info.num_host_blocks // 4 == full.info.num_host_blocks
    assert narrow.info.kv_cache_dtype == "fp8"
    assert narrow.runner.storage.data.nbytes <= 1 << 20


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", "bfloat16", 8])
def test_other_cache_types_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        engine_config_from_dict({"model": "m", "kv_cache_dtype": value})


@pytest.mark.parametrize("value", ["bitsandbytes", "fp8_e5m2", "", "gptq_marlin_24"])
def test_other_quantisation_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization is '{value}'; use 'fp8', or remove it"):
        engine_config_from_dict({"model": "m", "quantization": value})


@pytest.mark.parametrize("value", ["awq", "gptq_marlin", "compressed-tensors", "modelopt"])
def test_a_method_that_the_checkpoint_does_not_have_is_refused(value: str, folder: str) -> None:
    settings = engine_config_from_dict({"model": folder, "quantization": value})
    with pytest.raises(ConfigError, match=f"quantization is '{value}', but the checkpoint is not quantised; remove it"):
        resolve_quantization(settings, read_model_config(Path(folder)), torch.float32, torch.device("cpu"))


def test_products_of_a_gpu_are_bfloat16(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_config = read_model_config(Path(folder))
    settings = engine_config_from_dict({"model": folder, "quantization": "fp8"})
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_quantization(settings, model_config, torch.bfloat16, cuda) == "fp8"
    with pytest.raises(ConfigError, match="bfloat16 on a GPU, but dtype is float16; set dtype 'bfloat16'"):
        resolve_quantization(settings, model_config, torch.float16, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"quantization is 'fp8', which needs .*NVIDIA A100 \(8\.0\)"):
        resolve_quantization(settings, model_config, torch.bfloat16, cuda)
    none = engine_config_from_dict({"model": folder})
    assert resolve_quantization(none, model_config, torch.float16, cuda) is None


def test_a_gpu_that_cannot_convert_fp8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(
        ConfigError, match=r"needs a GPU of compute capability 8\.9 .*NVIDIA A100 \(8\.0\)\. Use 'auto'"
    ):
        resolve_kv_dtype("fp8", torch.bfloat16, torch.device("cuda"))
    assert resolve_kv_dtype("auto", torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_kv_dtype("fp8", torch.bfloat16, torch.device("cuda")) == torch.float8_e4m3fn
