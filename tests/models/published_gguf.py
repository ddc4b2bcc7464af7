"""The shapes in which people publish GGUF files: each is equal to a safetensors checkpoint, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
from transformers import GgufConfig

from tests.models.gguf_files import GgufFile, byte_level, rope_factors, sentencepiece, tiny_gguf
from tests.models.published_shape import PublishedShape
from tests.models.tiny_checkpoints import load_reference, write_checkpoint

_LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
_YARN = {
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 8.0,
    "llama.rope.scaling.original_context_length": 16,
}  # fmt: skip
_WINDOW = {"llama.attention.sliding_window": 16}
_LLAMA3_TOKENS = byte_level(pre="llama-bpe", eos_token_id=4, eot_token_id=3)

# Name, checkpoint, what the metadata says beside it.
_EQUAL: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama, sentencepiece", "llama-gqa", sentencepiece()),
    ("Llama, byte-level, end of turn", "llama-mha", _LLAMA3_TOKENS),
    ("Llama, tied head", "llama-tied", byte_level(pre="smollm")),
    ("Llama, biases", "llama-biases", {}),
    ("Llama, own head size", "llama-head-dim-gqa", {}),
    ("Llama, linear rope", "llama-linear", _LINEAR),
    ("Llama, linear rope as of 2023", "llama-linear", {"llama.rope.scale_linear": 8.0}),
    ("Llama, yarn", "llama-yarn", _YARN),
    ("Mistral", "mistral-full", sentencepiece()),
    ("Mistral, window", "mistral-window", sentencepiece() | _WINDOW),
    ("Mistral, tekken", "mistral-full", byte_level(pre="tekken")),
    ("Qwen2", "qwen2-bias", byte_level(pre="qwen2", bos_token_id=None)),
    ("Qwen3", "qwen3", byte_level(pre="qwen2", add_bos_token=False)),
    ("Llama, no bos", "llama-gqa", byte_level(bos_token_id=None)),
    ("Llama, no tokenizer", "llama-gqa", byte_level(model="none", tokens=None, token_type=None, merges=None)),
]
_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("longrope", {"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
    ("experts", {"llama.expert_count": 8}, "mixtures of experts are not supported"),
    ("partial rotation", {"llama.rope.dimension_count": 6}, "llama.rope.dimension_count is 6"),
    ("scaled attention", {"llama.attention.scale": 0.5}, "sets llama.attention.scale to 0.5"),
    ("unlike layers", {"llama.feed_forward_length": [40, 80]}, "llama.feed_forward_length differs between layers"),
    ("eos beyond the tokens", byte_level(eos_token_id=97), "tokenizer.ggml.eos_token_id is 97"),
    ("no context length", {"llama.context_length": None}, "does not set 'llama.context_length'"),
]


def published_gguf() -> Iterator[PublishedShape]:
    """Every case builds its own files, in a folder that exists and is empty."""
    for name, checkpoint, metadata in _EQUAL:
        yield _shape(name, checkpoint, lambda file, path, metadata=metadata: _with(file, metadata).write(path))
    yield _shape("Llama 3.1, factors of the rope", "llama-llama3", _with_factors)
    for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        yield PublishedShape(
            f"GGUF: Llama, {kind}", partial(_quantised, kind=kind), "equal", partial(_dequantised, kind=kind)
        )
    yield _shape("in capitals", "llama-gqa", lambda file, path: file.write(path.with_name("MODEL.GGUF")))
    yield _shape("named by its digest", "llama-gqa", lambda file, path: file.write(path.with_name("sha256-0123")))
    yield _shape("a folder with one file", "llama-gqa", lambda file, path: file.write(path).parent)
    yield _shape("a file beside a config", "llama-gqa", _beside_config)
    yield _shape("split in three", "llama-gqa", lambda file, path: file.write_split(path.parent, "tiny", 3)[0])
    yield _shape("the middle of a split", "qwen2-bias", lambda file, path: file.write_split(path.parent, "tiny", 3)[1])
    for name, metadata, outcome in _REFUSED:
        write = lambda file, path, metadata=metadata: _with(file, metadata).write(path)  # noqa: E731
        yield _shape(name, "llama-gqa", write, outcome)
    yield _shape("another architecture", "llama-gqa", _gemma, "architecture 'gemma3'; supported: llama, qwen2, qwen3")
    yield _shape("no layer 1", "llama-gqa", _cut_layer, "lacks 9 of 21 tensors: blk.1.attn_norm.weight")
    yield _shape("a part alone", "llama-gqa", _part_alone, "missing tiny-00002-of-00002.gguf")
    yield _shape("a part renamed", "llama-gqa", _part_renamed, "is part 1 of a split GGUF file of 2")
    yield _shape("two files in a folder", "llama-gqa", _two_files, "holds 2 GGUF models; name one of its files: a.gguf")
    yield _shape("cut off", "llama-gqa", _cut_off, "is cut off or damaged")
    yield _shape("a pointer of Git LFS", "llama-gqa", _pointer, "is a pointer of Git LFS, not the file itself")


def _shape(
    name: str, checkpoint: str, write: Callable[[GgufFile, Path], Path], outcome: str = "equal"
) -> PublishedShape:
    def build(folder: Path) -> Path:
        _, file = tiny_gguf(checkpoint, folder / "source")
        (folder / "file").mkdir()
        return write(file, folder / "file" / "tiny.gguf")

    return PublishedShape(f"GGUF: {name}", build, outcome, partial(write_checkpoint, checkpoint))


def _with(file: GgufFile, metadata: dict[str, Any]) -> GgufFile:
    file.metadata |= metadata
    return file


def _with_factors(file: GgufFile, path: Path) -> Path:
    file.tensors["rope_freqs.weight"] = rope_factors(path.parent.parent / "source")
    return _with(file, _LLAMA3_TOKENS).write(path)


def _quantised(folder: Path, kind: str) -> Path:
    _, file = tiny_gguf("llama-head-dim-gqa", folder / "source")
    return file.quantised(gguf.GGMLQuantizationType[kind]).write(folder / "tiny.gguf")


def _dequantised(folder: Path, kind: str) -> Path:
    """The checkpoint with the values that transformers reads of the file."""
    name = _quantised(folder, kind).name
    model = load_reference(folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(folder / "dequantised")
    return folder / "dequantised"


def _beside_config(file: GgufFile, path: Path) -> Path:
    (path.parent / "config.json").write_bytes((path.parent.parent / "source" / "config.json").read_bytes())
    return file.write(path).parent


def _gemma(file: GgufFile, path: Path) -> Path:
    file.architecture = "gemma3"
    return file.write(path)


def _cut_layer(file: GgufFile, path: Path) -> Path:
    return file.without(r"blk\.1\..*").write(path)


def _part_alone(file: GgufFile, path: Path) -> Path:
    first, second = file.write_split(path.parent, "tiny", 2)
    second.unlink()
    return first


def _part_renamed(file: GgufFile, path: Path) -> Path:
    return file.write_split(path.parent, "tiny", 2)[0].rename(path.with_name("first.gguf"))


def _two_files(file: GgufFile, path: Path) -> Path:
    file.write(path.with_name("a.gguf"))
    return file.write(path.with_name("b.gguf")).parent


def _cut_off(file: GgufFile, path: Path) -> Path:
    data = file.write(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def _pointer(file: GgufFile, path: Path) -> Path:
    size = file.write(path).stat().st_size
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {size}\n")
    return path
