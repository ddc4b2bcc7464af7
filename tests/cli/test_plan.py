"""`cb-backend plan`: the sizes are those of the shards, the reasons those of the engine, the advice can be pasted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.cli.check_cards import CARDS
from cb_backend.cli.check_findings import adapter_shard_bytes, examine, shard_bytes
from cb_backend.cli.gpu_ways import plan_ways
from cb_backend.cli.main import main
from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.parallel.torch_group import TorchGroup
from cb_backend.study.gpu_plan import Traffic
from tests.models.tiny_checkpoints import write_checkpoint
from tests.parallel.ranks import on_ranks

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint of which no more than the config is there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "num_ranks", "spreads"),
    [(None, 1, False), (None, 2, False), ("qwen3-moe", 2, True), ("gpt-oss-full", 2, True)],
)
def test_weights_of_a_gpu_are_those_that_a_rank_loads(
    name: str | None, num_ranks: int, spreads: bool, plain: Path, tmp_path: Path
) -> None:
    folder = plain if name is None else write_checkpoint(name, tmp_path)

    def loaded(group: TorchGroup) -> tuple[int, int]:
        spec, ops, cpu = read_model_config(folder), resolve_ops("torch"), torch.device("cpu")
        table = AdapterTable(max_adapters=3, max_rank=8, dtype=torch.bfloat16, device=cpu)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": cpu, "group": group, "adapters": table}
        model = load_model(folder, spec, ops=ops, spreads_experts=spreads, **options)
        return sum(placement.target.nbytes for placement in model.placements()), table.nbytes

    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    options |= {"tensor_parallel_size": num_ranks, "enable_expert_parallel": spreads}
    config = EngineConfig(model=str(folder), dtype="bfloat16", **options)
    found = examine(config)
    weight_bytes, adapter_bytes = zip(*on_ranks(num_ranks, loaded), strict=True)
    # Rank 0 has most, where the vocabulary does not come out.
    assert max(weight_bytes) == shard_bytes(found, config)
    assert {*adapter_bytes} == {adapter_shard_bytes(found, config)}
    assert (adapter_bytes[0] < (found.adapter_bytes or 0)) == (num_ranks > 1)


def test_every_way_is_there_with_its_room_or_its_reason(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, planned = plan(capsys, "--model", str(large), "--gpus", "4")
    assert code == 0
    ways = {(way["tensor_parallel_size"], way["data_parallel_size"]): way for way in planned["ways"]}
    assert list(ways) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]
    assert "no room for a KV cache" in ways[1, 1]["room"]["fault"]
    assert "64 query heads and 8 KV heads cannot be shared out among 3 devices" in ways[3, 1]["room"]["fault"]
    tokens = {size: ways[size, 1]["room"]["cache_tokens"] for size in (2, 4)}
    assert tokens[2] > 300_000
    assert tokens[4] > 2 * tokens[2], "the weights are halved once more"
    assert planned["recommended"] == ways[2, 2]


def test_what_is_lacking_is_not_said_of_gpus_that_cannot_share_the_model(large: Path) -> None:
    """Three cannot: that they lack memory, as two do, is what is to be mended."""
    config, traffic = EngineConfig(model=str(large)), Traffic(64, 64)
    two, three = (plan_ways(config, CARDS["l4"], num_gpus, traffic) for num_gpus in (2, 3))
    assert two.best is three.best is None
    assert three.lack == two.lack
    assert "GiB" in two.lack


def test_experts_that_cannot_be_spread_are_no_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint("gpt-oss", tmp_path)
    lengths = ["--input-len", "8", "--output-len", "8"]
    _, planned = plan(capsys, "--model", str(folder), "--gpus", "4", *lengths, "--enable-expert-parallel")
    faults = {way["tensor_parallel_size"]: way["room"]["fault"] for way in planned["ways"]}
    assert (faults[1], faults[2]) == (None, None)
    assert "6 experts cannot be spread over 4 devices whole" in faults[4]


def test_what_is_recommended_can_be_pasted(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(large), "--gpus", "2", "--target-itl-ms", "25"]) == 0
    text = capsys.readouterr().out
    (line,) = re.findall(r'^ +("tensor_parallel_size".*)$', text, re.MULTILINE)
    config = engine_config_from_dict({"model": str(large), **json.loads(f"{{{line}}}")})
    assert (config.tensor_parallel_size, config.data_parallel_size) == (2, 1)
    assert "because the model needs 2 GPUs" in text
    assert "As it is now, it would be refused: the checkpoint's folder holds no .safetensors" in text


def test_what_is_recommended_holds_with_what_was_asked_for(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without these arguments another plan would be made, or none: they belong to the line."""
    words = ["--kv-cache-dtype", "fp8", "--quantization", "fp8", "--max-num-seqs", "32", "--no-enable-prefix-caching"]
    assert main(["plan", "--model", str(large), "--gpus", "64", *words]) == 0
    (line,) = re.findall(r'^ +("tensor_parallel_size".*)$', capsys.readouterr().out, re.MULTILINE)
    config = engine_config_from_dict({"model": str(large), **json.loads(f"{{{line}}}")})
    assert (config.kv_cache_dtype, config.quantization, config.max_num_seqs) == ("fp8", "fp8", 32)
    assert not config.enable_prefix_caching


def test_what_runs_on_one_gpu_only_is_planned_on_one(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "2", "--input-len", "8", "--output-len", "8", "--idle-sleep-s", "60"]
    code, planned = plan(capsys, "--model", str(plain), *words)
    assert code == 0
    faults = {way["tensor_parallel_size"]: way["room"]["fault"] for way in planned["ways"]}
    assert faults[1] is None
    assert "idle_sleep_s is set, but sleep is supported on one device only" in faults[2]


def test_a_target_that_nothing_keeps_is_said(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(large), "--gpus", "2", "--target-itl-ms", "1"]) == 0
    assert "None keeps 1 ms from token to token; the nearest:" in capsys.readouterr().out


def test_a_model_that_fits_nowhere_is_an_error(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(large), "--gpus", "1"]) == 1
    assert "None of them has room for the model" in capsys.readouterr().out


def test_an_argument_that_leaves_no_room_is_named(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(large), "--gpus", "2", "--max-num-seqs", "99999999999"]) == 1
    text = capsys.readouterr().out
    assert "max_num_seqs is 99999999999" in text
    assert "Change what is named above, or take larger or more" in text


def test_engine_arguments_change_the_plan(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, plain = plan(capsys, "--model", str(large), "--gpus", "2")
    _, narrow = plan(capsys, "--model", str(large), "--gpus", "2", "--kv-cache-dtype", "fp8", "--max-num-seqs", "8")
    at_two = [next(way for way in each["ways"] if way["tensor_parallel_size"] == 2) for each in (plain, narrow)]
    assert at_two[1]["room"]["cache_tokens"] > 1.9 * at_two[0]["room"]["cache_tokens"]
    assert at_two[1]["num_streams"] == 8


def test_layers_with_a_window_leave_room_for_more(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = {"layer_types": ["sliding_attention"] * 60 + ["full_attention"] * 20, "sliding_window": 1024}
    (large / "config.json").write_text(json.dumps({**LLAMA_70B, "model_type": "ministral", **windows}))
    arguments = ["--model", str(large), "--gpus", "2", "--input-len", "16000"]
    tokens = []
    for flag in ("--disable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager"):
        _, planned = plan(capsys, *arguments, flag)
        tokens.append(planned["recommended"]["room"]["cache_tokens"])
    assert tokens[1] > 2 * tokens[0]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--gpus", "2", "--tensor-parallel-size", "2"], 2, "--tensor-parallel-size is what is planned; leave it out"),
        (["--gpus", "2", "--data-parallel-size", "2"], 2, "--data-parallel-size is what is planned; leave it out"),
        (["--gpus", "0"], 2, "argument --gpus"),
        (["--gpus", "2", "--card", "h9000"], 2, "argument --card"),
        (["--gpus", "2", "--input-len", "131072"], 1, "are 131328 tokens together, and max_model_len is 131072"),
    ],
)
def test_wrong_usage_is_said(
    arguments: list[str], code: int, reason: str, large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["plan", "--model", str(large), *arguments])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == code
    assert reason in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plan", "--model", str(tmp_path / "none"), "--gpus", "2"])
    assert error.value.code == 2
    assert "is neither a folder nor a file" in capsys.readouterr().err


def test_check_tells_of_one_of_several_gpus(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for size in ("1", "2"):
        assert main(["check", str(plain), "--card", "h200", "--json", "--tensor-parallel-size", size]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["kv_bytes_per_token"] == found[0]["kv_bytes_per_token"] / 2
    assert found[1]["cards"][0]["num_tokens"] > 1.9 * found[0]["cards"][0]["num_tokens"]


def test_check_refuses_heads_that_cannot_be_shared_out(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(plain), "--tensor-parallel-size", "3"]) == 1
    assert "cannot be shared out among 3 devices" in capsys.readouterr().out
