"""What `cb-backend check` says beforehand is what the engine says and takes: of every family, format and shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from cb_backend.cli.main import main
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.runner_factory import create_runner
from cb_backend.layers.moe import MoE
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.packed_experts import PackedMixture
from cb_backend.layers.packed_linear import PackedLinear
from cb_backend.models.checkpoint import resolve_checkpoint
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.registry import load_model, read_model_config
from tests.cli.test_check import look_at
from tests.engine.test_pooling import classifier_folder
from tests.models.published_checkpoints import published_checkpoints
from tests.models.published_gguf import published_gguf
from tests.models.published_shape import PublishedShape
from tests.models.quantised_models import FORMATS, pair
from tests.models.test_gguf_packed import file_of
from tests.models.test_packed_experts import as_mxfp4
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint


def load(folder: Path, dtype: torch.dtype, **options: Any) -> DecoderForCausalLM:
    spec, cpu = read_model_config(folder), torch.device("cpu")
    return load_model(folder, spec, ops=resolve_ops("torch"), dtype=dtype, device=cpu, **options)


def bytes_of(model: DecoderForCausalLM) -> int:
    """Of the tensors that were really made."""
    mixtures = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoE)]
    of_mixtures = {placement.name for experts in mixtures for placement in experts.placements()}
    packed: dict[int, int] = {}
    plain = 0
    for placement in model.placements():
        target = placement.target
        linear = getattr(target, "_linear", None)
        if isinstance(linear, PackedLinear):
            packed[id(linear)] = sum(piece.weight.num_bytes for piece in linear.pieces)
        elif placement.name not in of_mixtures:
            plain += target.nbytes
    return plain + sum(packed.values()) + sum(each for experts in mixtures for each in _bytes_of_experts(experts))


def _bytes_of_experts(experts: Any) -> Iterator[int]:
    for product in (experts.gate_up, experts.down):
        yield product.weight.num_bytes if isinstance(experts, PackedMixture) else product.nbytes
    yield from (bias.nbytes for bias in experts.biases if bias is not None)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_is_served_and_takes_what_is_said(name: str, tmp_path: Path, tokenizer: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    found = look_at(folder, tokenizer, dtype="bfloat16")
    assert found.refusals == []
    model = load(folder, torch.bfloat16)
    assert found.weight_bytes == bytes_of(model)
    assert found.has_own_head == model.has_own_head
    stored = {tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).items()}
    assert found.num_parameters == sum(tensor.numel() for _, tensor in stored if tensor is not None)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_a_classifier_and_an_embedding_model(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Neither has a head of its own; a classifier has its labels' weight beside the decoder."""
    folder = classifier_folder(name, tmp_path)
    found = look_at(folder, tokenizer, dtype="bfloat16")
    assert found.refusals == []
    assert found.has_own_head is False
    engine = create_engine(EngineConfig(model=str(folder), tokenizer=str(tokenizer), device="cpu", dtype="bfloat16"))
    assert found.weight_bytes == bytes_of(engine.runner.model)
    embedding = look_at(tmp_path / "base", tokenizer, runner="pooling")
    assert embedding.refusals == []
    assert embedding.has_own_head is False
    told = look_at(folder, tokenizer, runner="generate").refusals
    assert len(told) == 1
    assert "has no head to generate with" in told[0]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_takes_what_is_said(name: str, tmp_path: Path, tokenizer: Path) -> None:
    config, writer = FORMATS[name]
    plain, quantised = pair(tmp_path, "llama", config, writer)
    found = look_at(quantised, tokenizer, dtype="bfloat16")
    assert found.refusals == []
    taken = bytes_of(load(quantised, torch.bfloat16))
    assert found.weight_bytes == pytest.approx(taken, rel=0.01)
    assert found.num_parameters == look_at(plain, tokenizer).num_parameters
    assert any(group.served not in ("bfloat16", "fp8") for group in found.groups or [])


def test_weights_that_are_to_be_quantised_take_what_is_said(plain: Path) -> None:
    found = look_at(plain, quantization="fp8", dtype="bfloat16")
    assert found.refusals == []
    assert found.weight_bytes == bytes_of(load(plain, torch.bfloat16, quantization="fp8"))
    assert {group.served for group in found.groups or []} == {"bfloat16", "fp8"}


def engine_says(path: Path) -> str | None:
    try:
        folder = resolve_checkpoint(str(path))
        load(folder, torch.float32)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FORMATS)
def test_it_says_of_experts_in_every_format_what_the_engine_says(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """What they cannot be is known before a weight is read."""
    plain, folder = pair(tmp_path, "qwen3-moe", *FORMATS[name])
    said, found = engine_says(folder), look_at(folder, tokenizer, dtype="bfloat16")
    assert found.refusals[:1] == ([] if said is None else [said])
    if said is None:
        assert found.weight_bytes == bytes_of(load(folder, torch.bfloat16))
        assert found.num_parameters == look_at(plain, tokenizer).num_parameters
    else:
        assert any(kind in name for kind in ("act-order", "nvfp4", "8 bits, 32", "w8a16, 32"))


def test_experts_of_gpt_oss_take_what_is_said(tmp_path: Path, tokenizer: Path) -> None:
    """Those of all experts in one tensor; their scales are a byte each on the device, as in the file."""
    plain = write_checkpoint("gpt-oss-mxfp4", tmp_path / "plain")
    folder = as_mxfp4(plain)
    found = look_at(folder, tokenizer, dtype="bfloat16")
    assert found.refusals == []
    assert found.weight_bytes == bytes_of(load(folder, torch.bfloat16))
    assert found.num_parameters == look_at(plain, tokenizer).num_parameters
    modules = {group.modules: group for group in found.groups or []}
    experts = [group for name, group in modules.items() if name.endswith(".experts")]
    assert {group.served for group in experts} == {"mxfp4"}
    assert sum(group.num_parameters for group in experts) > 0.5 * (found.num_parameters or 0)


@pytest.mark.parametrize("name", ["gpt-oss", "granitemoe", "qwen3-moe"])
def test_experts_that_are_to_be_quantised_take_what_is_said(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """However the checkpoint stores them: interleaved, stacked or apart."""
    is_apart = name == "qwen3-moe"  # whose parts are padded together: of a size that needs none
    folder = pair(tmp_path, name, *FORMATS["w4a16"])[0] if is_apart else write_checkpoint(name, tmp_path)
    found = look_at(folder, tokenizer, quantization="fp8", dtype="bfloat16")
    assert found.refusals == []
    assert found.weight_bytes == bytes_of(load(folder, torch.bfloat16, quantization="fp8"))
    plain = look_at(folder, tokenizer, dtype="bfloat16")
    assert found.num_parameters == plain.num_parameters
    for served, kinds in ((found, {"bfloat16", "fp8"}), (plain, {"bfloat16"})):
        assert {group.served for group in served.groups or []} - {"float32"} == kinds


# Those that transformers saved and nobody changed are the families above.
CHANGED = [shape for shape in published_checkpoints() if not shape.name.startswith("saved by")]


@pytest.mark.parametrize("shape", CHANGED, ids=lambda shape: shape.name)
def test_it_says_of_published_checkpoints_what_the_engine_says(
    shape: PublishedShape, tmp_path: Path, tokenizer: Path
) -> None:
    path = shape.build(tmp_path)
    said, refusals = engine_says(path), look_at(path, tokenizer).refusals
    assert refusals[:1] == ([] if said is None else [said])


VALUES_ALONE_TELL = ("not finite",)  # what no header says


@pytest.mark.parametrize("shape", list(published_gguf()), ids=lambda shape: shape.name)
def test_it_says_of_gguf_files_what_the_engine_says(
    shape: PublishedShape, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "cache"))
    (tmp_path / "built").mkdir()
    path = shape.build(tmp_path / "built")
    refusals = look_at(path, tokenizer).refusals
    assert not (tmp_path / "cache").exists()
    said = engine_says(path)
    if said is not None and any(reason in said for reason in VALUES_ALONE_TELL):
        return
    assert refusals[:1] == ([] if said is None else [said])


def test_a_gguf_file_takes_what_is_said(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "cache"))
    (tmp_path / "built").mkdir()
    shape = next(shape for shape in published_gguf() if shape.outcome == "equal")
    path = shape.build(tmp_path / "built")
    found = look_at(path, tokenizer, dtype="bfloat16")
    assert found.kind == "GGUF"
    assert found.weight_bytes == pytest.approx(bytes_of(load(resolve_checkpoint(str(path)), torch.bfloat16)), rel=0.01)


@pytest.mark.parametrize(
    "kinds",
    [{"": "Q8_0"}, {"": "Q4_0"}, {"": "Q4_1"}, {"": "Q4_K", "ffn_down": "Q6_K"}, {"": "Q5_K", "output": "Q8_0"}],
)
def test_a_gguf_file_in_its_own_bits_takes_what_is_said(
    kinds: dict[str, str], tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "cache"))
    path = file_of("llama", tmp_path / "source", kinds).write(tmp_path / "model.gguf")
    found = look_at(path, tokenizer, dtype="bfloat16")
    assert found.refusals == []
    taken = bytes_of(load(resolve_checkpoint(str(path)), torch.bfloat16))
    assert found.weight_bytes == pytest.approx(taken, rel=0.01)
    by_name = {group.modules: group for group in found.groups or []}
    down = by_name["model.layers.*.mlp.down_proj"]
    assert down.stored == kinds.get("ffn_down", kinds[""])
    assert down.served == ("bfloat16" if down.stored == "Q6_K" else f"GGUF {down.stored}")
    assert by_name["model.embed_tokens"].stored == "F32"


TINY_CACHE = {"num_gpu_blocks_override": 30, "block_size": 4, "max_num_batched_tokens": 6, "max_num_seqs": 4}


@pytest.mark.parametrize("arguments", [{}, {"run_ahead": 1}, {"enable_chunked_prefill": False}], ids=str)
@pytest.mark.parametrize("name", ["gemma3", "llama-gqa"])
def test_the_longest_request_is_the_engines(
    name: str, arguments: dict[str, Any], tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a cache that holds less than the context: where layers with a window give back, what is launched counts."""
    folder = write_checkpoint(name, tmp_path)
    config = EngineConfig(
        model=str(folder), tokenizer=str(tokenizer), device="cpu", dtype="bfloat16", **{**TINY_CACHE, **arguments}
    )
    runner, info = create_runner(config)
    on_a_card = msgspec.structs.replace(info, device="cuda")  # where steps are launched ahead
    longest = LLMEngine(config, runner, on_a_card).scheduler.longest_request
    assert longest < info.max_model_len
    options = ["--card", "l40s", "--tokenizer", str(tokenizer), "--dtype", "bfloat16", "--json"]
    for key, value in {**TINY_CACHE, **arguments}.items():
        flag = key.replace("_", "-")
        options += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    assert main(["check", str(folder), *options]) == 0
    fit = json.loads(capsys.readouterr().out)["cards"][0]
    assert fit["longest_request"] == longest
    assert fit["num_tokens"] >= longest
    lengths = ["--gpus", "1", "--output-len", "4", "--input-len"]
    for length, code in ((longest, 0), (longest + 1, 1)):
        assert main(["plan", "--model", str(folder), *lengths, str(length - 4), *options]) == code
        (way,) = json.loads(capsys.readouterr().out)["ways"]
        assert way["room"]["longest_request"] == longest
        assert bool(way["num_streams"]) is (code == 0)


def test_arguments_are_refused_in_the_engines_words(plain: Path) -> None:
    for arguments in ({"max_model_len": 1 << 20}, {"quantization": "awq"}):
        with pytest.raises(ConfigError) as caught:
            create_engine(EngineConfig(model=str(plain), device="cpu", **arguments))
        assert look_at(plain, **arguments).refusals == [str(caught.value)]
