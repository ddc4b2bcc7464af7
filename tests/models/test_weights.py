"""Loading weights: what is cast and tied, and how every kind of broken checkpoint is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.models.weight_files import INDEX
from tests.models.paged_model import CPU, PagedModel
from tests.models.tiny_checkpoints import random_tokens, reference_logits, write_checkpoint

FILE = "model.safetensors"
SHARD_BYTES = 20_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen2-bias", tmp_path_factory.mktemp("sharded"), max_shard_size=SHARD_BYTES)


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> DecoderForCausalLM:
    return load_model(folder, read_model_config(folder), ops=resolve_ops("torch"), dtype=dtype, device=CPU, **options)


def tensors_of(model: DecoderForCausalLM) -> dict[str, Any]:
    return {placement.name: placement.target for placement in model.placements()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def test_sharded_checkpoint_equals_transformers(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    prompt = random_tokens(20, seed=1)
    paged = PagedModel(sharded)
    paged.start(0, 20)
    torch.testing.assert_close(paged.prefill(0, prompt), reference_logits(sharded, prompt, []), atol=1e-4, rtol=0)


def test_every_tensor_of_the_file_is_in_its_place_and_cast(whole: Path) -> None:
    """Read back through the checkpoint's names, parts of fused weights included, in another dtype."""
    tensors = load_file(whole / FILE)
    loaded = tensors_of(load(whole, torch.bfloat16))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.to(torch.bfloat16)), name


def test_old_rotary_buffers_are_ignored(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)}))
    load(checkpoint)


def test_progress_is_reported_in_bytes_of_the_files(whole: Path, sharded: Path) -> None:
    for folder in (whole, sharded):
        seen: list[tuple[int, int]] = []
        load(folder, progress=lambda *bytes_read, seen=seen: seen.append(bytes_read))
        total = sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_dummy_weights_follow_the_seed(tmp_path: Path, whole: Path) -> None:
    shutil.copy(whole / "config.json", tmp_path)  # no weights at all
    first, again, other = (tensors_of(load(tmp_path, load_format="dummy", seed=s)) for s in (1, 1, 2))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert abs(first["model.embed_tokens.weight"].std().item() - 0.02) < 0.001
    assert torch.equal(first["model.norm.weight"], torch.ones(48))


def remove_k_proj(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))


def reshape_down_proj(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(40, 48)}))


def add_unknown_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.bias": torch.zeros(40)}))


def quantise(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(40, 48, dtype=torch.int8)}))


def truncate(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[: len(data) - 1000])


def empty(folder: Path) -> None:
    (folder / FILE).write_bytes(b"")


def fill_with_garbage(folder: Path) -> None:
    (folder / FILE).write_bytes(b"\xff" * 4096)


def pickle_instead(folder: Path) -> None:
    (folder / FILE).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def remove_weights(folder: Path) -> None:
    (folder / FILE).unlink()


def name_missing_shard(folder: Path) -> None:
    weight_map = {"model.norm.weight": "model-1-of-2.safetensors", "lm_head.weight": "model-2-of-2.safetensors"}
    (folder / FILE).rename(folder / "model-1-of-2.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def break_index(folder: Path) -> None:
    (folder / FILE).rename(folder / "model-1-of-1.safetensors")
    (folder / INDEX).write_text('{"metadata": {}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_k_proj, r"model\.layers\.1\.self_attn\.k_proj\.weight is missing in model\.safetensors"),
        (
            reshape_down_proj,
            r"model\.safetensors: tensor model\.layers\.0\.mlp\.down_proj\.weight has shape \[40, 48\], "
            r"config\.json asks for \[48, 40\]",
        ),
        (add_unknown_tensor, r"tensor model\.layers\.0\.mlp\.gate_proj\.bias has no place"),
        (quantise, r"tensor model\.layers\.0\.mlp\.up_proj\.weight is I8; supported are unquantised"),
        (truncate, r"^model\.safetensors is not a whole safetensors file .*fetch the checkpoint again"),
        (empty, r"^model\.safetensors is not a whole safetensors file"),
        (fill_with_garbage, r"^model\.safetensors is not a whole safetensors file"),
        (pickle_instead, r"pytorch_model\.bin, which is pickled.*save_pretrained"),
        (remove_weights, r"holds no \.safetensors file"),
        (name_missing_shard, r"names model-2-of-2\.safetensors, which is missing"),
        (break_index, r"model\.safetensors\.index\.json is broken"),
    ],
)
def test_broken_checkpoint_is_refused_by_name(checkpoint: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(checkpoint)
    with pytest.raises(ConfigError, match=message) as caught:
        load(checkpoint)
    assert str(checkpoint) not in str(caught.value)


def test_an_outline_does_not_import_what_only_compilers_need(whole: Path, tmp_path: Path) -> None:
    """The first operation on torch's device "meta" imports a second's worth of modules; sizes need none."""
    tied = write_checkpoint("llama-tied", tmp_path)
    code = (
        "import sys, torch; from pathlib import Path; from cb_backend.layers.ops import resolve_ops;"
        "from cb_backend.models.registry import load_model, read_model_config;"
        "[load_model(folder, read_model_config(folder), ops=resolve_ops('torch'), dtype=torch.float32,"
        " device=torch.device('cpu')) for folder in map(Path, sys.argv[1:])];"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(whole), str(tied)], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"
