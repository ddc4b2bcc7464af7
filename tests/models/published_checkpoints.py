"""The shapes in which people publish checkpoints of safetensors: configs in many spellings, files in many layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cb_backend.models.weight_files import INDEX, SINGLE
from tests.models.published_shape import PublishedShape
from tests.models.test_fp8_weights import COMPRESSED, DYNAMIC_FP8, quantise_checkpoint
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint

Change = Callable[[Path], object]

ABSENT = object()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665ce\nsize 9951028193\n"
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0]}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8}

# What the config says instead, of a checkpoint that transformers loads as it is.
_CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    ("null head_dim", "llama-gqa", {"head_dim": None}),
    ("absent head_dim", "llama-gqa", {"head_dim": ABSENT}),
    ("null KV heads", "llama-mha", {"num_key_value_heads": None}),
    ("absent KV heads", "llama-mha", {"num_key_value_heads": ABSENT}),
    ("Llama 1: no length", "llama-mha", {"max_position_embeddings": ABSENT, "max_sequence_length": 2048}),
    ("Mistral: no length", "mistral-window", {"max_position_embeddings": ABSENT}),
    ("Qwen2: no length", "qwen2-bias", {"max_position_embeddings": ABSENT}),
    ("integer rope_theta", "llama-gqa", {"rope_parameters": ABSENT, "rope_theta": 500_000}),
    ("null rope_scaling", "llama-gqa", {"rope_parameters": ABSENT, "rope_theta": 1e6, "rope_scaling": None}),
    ("empty rope_scaling", "llama-gqa", {"rope_scaling": {}}),
    ("two names of the rope type", "llama-gqa", {"rope_scaling": {"type": "x", "rope_type": "linear", "factor": 2.0}}),
    ("yarn without a length", "llama-gqa", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("yarn, its factor given", "llama-gqa", {"rope_scaling": {**_YARN, "attention_factor": 1.3}}),
    ("yarn, mscale", "llama-gqa", {"rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    ("yarn, Qwen2.5's long form", "qwen2-bias", {"rope_scaling": _YARN}),
    ("longrope, length beside it", "llama-gqa", {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 16}),
    ("swish", "llama-gqa", {"hidden_act": "swish"}),
    ("half as dtype", "llama-gqa", {"dtype": ABSENT, "torch_dtype": "half"}),
    ("no dtype", "llama-gqa", {"dtype": ABSENT}),
    ("eps of 1e-5", "llama-gqa", {"rms_norm_eps": 1e-5}),
    ("no eps", "qwen3", {"rms_norm_eps": ABSENT}),
    ("pretraining_tp 2", "llama-gqa", {"pretraining_tp": 2}),
    ("Llama with a window of no use", "llama-gqa", {"sliding_window": 128}),
    ("several ends", "llama-gqa", {"eos_token_id": [2, 5]}),
    ("an end beyond the vocabulary", "llama-gqa", {"eos_token_id": [2, 99_999]}),
    ("a pad id of -1", "llama-gqa", {"pad_token_id": -1}),
    ("Mistral, null window", "mistral-window", {"sliding_window": None}),
    ("Mistral, absent window", "mistral-full", {"sliding_window": ABSENT}),
    ("Mistral, alike layer_types", "mistral-window", {"layer_types": ["sliding_attention"] * 2}),
    ("Qwen2, a window that is off", "qwen2-bias", {"use_sliding_window": False, "sliding_window": 8}),
    ("Qwen2, no layer_types", "qwen2-mixed", {"layer_types": ABSENT}),
    ("Qwen2, all layers slide", "qwen2-bias", {**_WINDOWS, "layer_types": ABSENT, "max_window_layers": 0}),
    ("Qwen2, a null window", "qwen2-mixed", {"layer_types": ABSENT, "sliding_window": None}),
    ("Qwen3, null layer_types", "qwen3", {"layer_types": None}),
]
_REFUSED_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("another model_type", {"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ("no model_type", {"model_type": ABSENT}, "does not set 'model_type'"),
    ("bitsandbytes", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised (bitsandbytes)"),
    ("MLX's quantisation", {"quantization": {"group_size": 64, "bits": 4}}, "quantised (MLX's way)"),
    ("tokens that see all others", {"is_causal": False}, "is_causal is false"),
    ("an eps below 0", {"rms_norm_eps": -1.0}, "'rms_norm_eps' is -1.0; it must be above 0"),
    ("Llama with a window", {"sliding_window": 8}, "sliding_window is 8, which llama does not have"),
    ("no rotation of a part", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("an odd head", {"head_dim": 11}, "head_dim is 11"),
    ("an unknown rope", {"rope_scaling": {"type": "su"}}, "rope_type 'su'"),
    ("a larger vocabulary", {"vocab_size": 131}, "config.json asks for [131, 48]"),
    ("a layer more", {"num_hidden_layers": 3}, "tensor model.layers.2."),
    ("a layer less", {"num_hidden_layers": 1}, "has no place in the model that config.json describes"),
    ("biases that are not there", {"attention_bias": True}, "q_proj.bias is missing"),
]


def published_checkpoints() -> Iterator[PublishedShape]:
    """Every case builds its own files, in a folder that exists and is empty."""
    for name in sorted(CONFIGS):
        yield _shape(f"saved by transformers 5: {name}", name, _nothing)
        if name.partition("-")[2] in ("linear", "dynamic", "llama3", "yarn", "longrope", "theta", "mixed"):
            yield _shape(f"as transformers 4 wrote it: {name}", name, _old_spelling)
    for title, name, changes in _CONFIGS:
        yield _shape(f"config: {title}", name, partial(_edit_config, changes=changes))
    for title, changes, outcome in _REFUSED_CONFIGS:
        yield _shape(f"config: {title}", "llama-gqa", partial(_edit_config, changes=changes), outcome)
    yield from _published_files()
    towers = {**COMPRESSED, "ignore": ["re:.*lm_head", "re:vision_tower.*"]}
    of_modelopt = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    for title, config, is_flat in (
        ("fp8", DYNAMIC_FP8, False),
        ("compressed-tensors", COMPRESSED, True),
        ("compressed-tensors, towers left out", towers, False),
        ("ModelOpt, one level down", of_modelopt, True),
    ):
        change = partial(
            quantise_checkpoint, config=config, is_per_tensor=False, scale_shape="flat" if is_flat else "as is"
        )
        yield _shape(f"weights: {title}", "qwen3", change, is_own_reference=False)


def _published_files() -> Iterator[PublishedShape]:
    equal: list[tuple[str, str, Change, bool]] = [
        ("shards and their index", "qwen2-bias", _split_with_index, True),
        ("shards in a folder of their own", "llama-gqa", partial(_split_with_index, prefix="weights/"), False),
        ("shards without index", "llama-gqa", _split, False),
        ("consolidated file beside shards", "llama-gqa", _split_and_consolidated, False),
        ("adapter beside the model", "llama-gqa", _add_adapter, False),
        ("stale index beside the whole", "llama-gqa", _stale_index, True),
        ("index of the one file", "llama-gqa", _index_of_one, True),
        ("one file of another name", "llama-gqa", lambda f: (f / SINGLE).rename(f / "weights.safetensors"), False),
        ("pickled copy beside it", "llama-gqa", lambda f: torch.save({}, f / "pytorch_model.bin"), True),
        ("tied, the head alone", "llama-tied", partial(_rename, names={EMBEDDING: HEAD}), True),
        ("tied, both stored", "llama-tied", lambda f: _change(f, _copy_embedding), True),
        ("tied, the decoder alone", "llama-tied", lambda f: _rename_all(f, lambda n: n.removeprefix("model.")), True),
        ("rotary buffers", "llama-gqa", lambda f: _change(f, _add_rotary_buffers), True),
        ("scales of an fp8 cache", "llama-gqa", lambda f: _change(f, _add_kv_scales), True),
        *((f"stored in {dtype}", "qwen3", partial(_store_in, dtype=dtype), True) for dtype in ("bfloat16", "float16")),
        ("no generation_config", "llama-gqa", lambda f: (f / "generation_config.json").unlink(), True),
        ("byte order mark in the config", "llama-gqa", partial(_re_encode, encoding="utf-8-sig"), False),
    ]
    for title, name, change, is_own_reference in equal:
        yield _shape(f"files: {title}", name, change, is_own_reference=is_own_reference)
    refused: list[tuple[str, Change, str]] = [
        ("Git LFS pointer as weights", lambda f: (f / SINGLE).write_text(POINTER), "model.safetensors is a Git LFS"),
        ("Git LFS pointer as config", lambda f: (f / "config.json").write_text(POINTER), "config.json is a Git LFS"),
        ("Git LFS pointer as a shard", lambda f: _split(f)[1].write_text(POINTER), "is a Git LFS pointer"),
        ("a shard less", lambda f: _split(f)[1].unlink(), "model-00002-of-00003.safetensors is missing"),
        ("pickled alone", lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "is pickled and may run code"),
        ("no weights", lambda f: (f / SINGLE).unlink(), "holds no .safetensors file"),
        ("no config", lambda f: (f / "config.json").unlink(), "holds no config.json"),
        ("config in UTF-16", partial(_re_encode, encoding="utf-16"), "config.json is not text in UTF-8"),
        ("half a download", _cut_off, "is not a whole safetensors file"),
        ("the makers' own names", lambda f: _rename_all(f, _makers_name), "their makers' own names"),
        ("a classifier", partial(_rename, names={HEAD: "score.weight"}), "tensor lm_head.weight is missing"),
    ]
    for title, change, outcome in refused:
        yield _shape(f"files: {title}", "llama-gqa", change, outcome)


def _shape(
    title: str, checkpoint: str, change: Change, outcome: str = "equal", is_own_reference: bool = True
) -> PublishedShape:
    def build(folder: Path) -> Path:
        change(write_checkpoint(checkpoint, folder))
        return folder

    return PublishedShape(title, build, outcome, None if is_own_reference else partial(write_checkpoint, checkpoint))


# ---- changes of a folder ------------------------------------------------------------------------------------------


def _nothing(_folder: Path) -> None:
    pass


def _edit_config(folder: Path, changes: dict[str, Any]) -> None:
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {key: value for key, value in values.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(kept))


def _old_spelling(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    rope = dict(values.pop("rope_parameters"))
    changes: dict[str, Any] = {"rope_theta": rope.pop("rope_theta"), "torch_dtype": values["dtype"]}
    rope["type"] = rope.pop("rope_type")
    changes["rope_scaling"] = None if rope["type"] == "default" else rope
    _edit_config(folder, {**changes, "rope_parameters": ABSENT, "dtype": ABSENT})


def _re_encode(folder: Path, encoding: str) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text(), encoding=encoding)


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def _copy_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def _add_rotary_buffers(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(6) for index in range(2)}


def _add_kv_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {f"model.layers.{index}.self_attn.k_scale": torch.ones(1) for index in range(2)}


def _rename_all(folder: Path, new_name: Callable[[str], str]) -> None:
    renamed = {new_name(name): tensor for name, tensor in load_file(folder / SINGLE).items()}
    save_file(renamed, folder / SINGLE, metadata={"format": "pt"})


def _rename(folder: Path, names: dict[str, str]) -> None:
    _rename_all(folder, lambda name: names.get(name, name))


def _makers_name(name: str) -> str:
    return name.removeprefix("model.").replace("self_attn.q_proj", "attention.wq").replace("embed_tokens", "embeddings")


def _store_in(folder: Path, dtype: str) -> None:
    _change(folder, lambda tensors: tensors.update({n: t.to(getattr(torch, dtype)) for n, t in tensors.items()}))


def _cut_off(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: len(data) // 2])


def _split(folder: Path, prefix: str = "") -> list[Path]:
    tensors = sorted(load_file(folder / SINGLE).items())
    paths = [folder / f"{prefix}model-{index + 1:05d}-of-00003.safetensors" for index in range(3)]
    for index, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        save_file(dict(tensors[index::3]), path, metadata={"format": "pt"})
    (folder / SINGLE).unlink()
    return paths


def _split_with_index(folder: Path, prefix: str = "") -> None:
    weight_map = {name: prefix + path.name for path in _split(folder, prefix) for name in load_file(path)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def _split_and_consolidated(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / "copy")
    _split(folder)
    (folder / "copy").rename(folder / SINGLE)
    _rename_all(folder, _makers_name)
    (folder / SINGLE).rename(folder / "consolidated.safetensors")


def _add_adapter(folder: Path) -> None:
    save_file({"base_model.model.lora_A.weight": torch.zeros(4, 4)}, folder / "adapter_model.safetensors")


def _stale_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {HEAD: "model-00001-of-00002.safetensors"}}))


def _index_of_one(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(folder / SINGLE), SINGLE)}))
