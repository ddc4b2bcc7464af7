"""GGUF files compute what the equal safetensors checkpoint computes, or are refused by the name of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cb_backend.models.checkpoint import resolve_checkpoint
from cb_backend.models.gguf import conversion
from cb_backend.models.registry import read_model_config
from tests.models.gguf_checks import assert_equal, assert_refused
from tests.models.gguf_files import CONTROL, GgufFile, byte_level, rope_factors, tiny_gguf
from tests.models.tiny_checkpoints import random_tokens, reference_logits

pytestmark = pytest.mark.usefixtures("cache")


def refused(tmp_path: Path, name: str, changes: dict[str, Any], *messages: str) -> None:
    _, file = tiny_gguf(name, tmp_path / "source")
    file.metadata |= changes
    assert_refused(file.write(tmp_path / "tiny.gguf"), "tiny.gguf", *messages)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-gqa", {}),
        ("llama-mha", {"llama.attention.head_count_kv": None}),  # as many as heads
        ("llama-mqa", {"llama.rope.dimension_count": None, "llama.attention.key_length": None}),
        ("llama-gqa", {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [40, 40]}),
        ("llama-gqa", {"llama.expert_count": 0, "llama.pooling_type": 0}),  # said, and without effect
        ("llama-tied", {}),
        ("llama-biases", {}),
        ("llama-head-dim-gqa", {}),
        ("mistral-full", {}),
        ("mistral-window", {"llama.attention.sliding_window": 16}),
        ("qwen2-bias", {}),
        ("qwen3", {}),
    ],
)
def test_families_are_equal(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source, file = tiny_gguf(name, tmp_path / "source")
    if name == "qwen3":  # its tiny checkpoint has biases on all four, as llama's
        assert "blk.0.attn_output.bias" in file.tensors
    file.metadata |= changes
    assert_equal(file.write(tmp_path / "tiny.gguf"), source)


@pytest.mark.parametrize(
    ("pattern", "messages"),
    [
        (r"blk\.1\..*", ["lacks 9 of 21 tensors: blk.1.attn_norm.weight", "and 5 more", "put all parts"]),
        (r"blk\.0\.ffn_up\.weight", ["lacks 1 of 21 tensors: blk.0.ffn_up.weight."]),
        (r"output_norm\.weight", ["lacks 1 of 21 tensors: output_norm.weight."]),
        (r"token_embd\.weight", ["lacks the tensor token_embd.weight"]),
    ],
)
def test_r20b_missing_tensors_are_named(pattern: str, messages: list[str], tmp_path: Path, cache: Path) -> None:
    _, file = tiny_gguf("llama-gqa", tmp_path / "source")
    assert_refused(file.without(pattern).write(tmp_path / "tiny.gguf"), "tiny.gguf", *messages)
    assert list((cache / "models").iterdir()) == []  # nothing half done is kept


@pytest.mark.parametrize(
    ("name", "tensor"), [("qwen2-bias", "blk.1.attn_k.bias"), ("qwen3", "blk.1.attn_q_norm.weight")]
)
def test_r20b_missing_tensors_of_other_families_are_named(name: str, tensor: str, tmp_path: Path) -> None:
    _, file = tiny_gguf(name, tmp_path / "source")
    assert_refused(
        file.without(tensor.replace(".", r"\.")).write(tmp_path / "tiny.gguf"), "lacks 1 of ", f" tensors: {tensor}."
    )


def test_r20b_unknown_misshapen_and_broken_tensors_are_named(tmp_path: Path) -> None:
    def changed(name: str, value: np.ndarray) -> Path:
        _, file = tiny_gguf("llama-gqa", tmp_path / "source")
        file.tensors[name] = value
        return file.write(tmp_path / "tiny.gguf")

    unknown = changed("blk.0.attn_sinks.weight", np.zeros(4, np.float32))
    assert_refused(unknown, "no place in a llama model: blk.0.attn_sinks.weight")
    misshapen = changed("blk.0.attn_q.weight", np.zeros((40, 48), np.float32))
    assert_refused(misshapen, "blk.0.attn_q.weight has shape [40, 48], the metadata asks for [48, 48]")
    broken = changed("blk.0.attn_q.weight", np.full((48, 48), np.nan, np.float32))
    assert_refused(broken, "blk.0.attn_q.weight holds values that are not finite")


def test_r20b_some_biases_alone_are_refused(tmp_path: Path) -> None:
    _, file = tiny_gguf("llama-biases", tmp_path / "source")
    path = file.without(r"blk\..*\.attn_output\.bias").write(tmp_path / "tiny.gguf")
    assert_refused(path, "has blk.0.attn_q.bias", "but not blk.0.attn_output.bias")


@pytest.mark.parametrize("changes", [{}, {"llama.rope.scaling.type": "none"}])
def test_r20e_rope_factors_are_honoured(changes: dict[str, Any], tmp_path: Path) -> None:
    source, file = tiny_gguf("llama-llama3", tmp_path / "source")
    file.metadata |= changes
    file.tensors["rope_freqs.weight"] = rope_factors(source)
    folder = assert_equal(file.write(tmp_path / "tiny.gguf"), source)
    prompt = random_tokens(8, seed=1)  # seen at 8 tokens already
    torch.testing.assert_close(
        reference_logits(folder, prompt, []), reference_logits(source, prompt, []), atol=1e-4, rtol=0
    )
    assert read_model_config(folder).max_context_len == read_model_config(source).max_context_len


def test_r20e_factors_of_one_change_nothing(tmp_path: Path) -> None:
    source, file = tiny_gguf("llama-gqa", tmp_path / "source")
    file.tensors["rope_freqs.weight"] = np.ones(6, np.float32)
    assert_equal(file.write(tmp_path / "tiny.gguf"), source)


@pytest.mark.parametrize(
    ("factors", "changes", "message"),
    [
        (np.ones(5, np.float32), {}, "rope_freqs.weight is F32 [5]; heads of 12 need 6 numbers"),
        (np.array([1, 1, 0, 1, 1, 1], np.float32), {}, "rope_freqs.weight holds numbers that are not above 0"),
        (np.ones(6, np.float16), {}, "rope_freqs.weight is F16"),
        (
            np.ones(6, np.float32),
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            "twice: by llama.rope.scaling.type 'linear' and by the tensor rope_freqs.weight",
        ),
    ],
)
def test_r20e_factors_that_do_not_fit_are_refused(
    factors: np.ndarray, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = tiny_gguf("llama-gqa", tmp_path / "source")
    file.tensors["rope_freqs.weight"] = factors
    file.metadata |= changes
    assert_refused(file.write(tmp_path / "tiny.gguf"), message)


LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0}
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 8.0,
    "llama.rope.scaling.original_context_length": 16,
    "llama.rope.scaling.finetuned": True,
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-yarn", YARN),
        ("llama-yarn", YARN | {"llama.rope.scaling.yarn_beta_fast": 32.0, "llama.rope.scaling.yarn_attn_factor": 1.0}),
        ("llama-linear", LINEAR),
        ("llama-linear", {"llama.rope.scaling.factor": 8.0}),  # the kind is linear where none is named
        ("llama-linear", {"llama.rope.scale_linear": 8.0}),  # as the first files said it
        ("llama-gqa", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}),
    ],
)
def test_r20f_rope_scaling_is_honoured(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source, file = tiny_gguf(name, tmp_path / "source")
    file.metadata |= changes
    folder = assert_equal(file.write(tmp_path / "tiny.gguf"), source)
    assert read_model_config(folder).max_context_len == read_model_config(source).max_context_len


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-gqa", {"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'; supported:"),
        ("qwen2-bias", {"qwen2.rope.scaling.type": "su"}, "qwen2.rope.scaling.type is 'su'; supported:"),
        ("llama-gqa", YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ("llama-gqa", YARN | {"llama.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0; supported is 1.0 only"),
        ("llama-gqa", YARN | {"llama.rope.scaling.factor": None}, "factor is 0.0; yarn needs a number above 0"),
        ("llama-gqa", YARN | {"llama.rope.scaling.original_context_length": None}, "original_context_length"),
        ("llama-gqa", {"llama.rope.dimension_count": 6}, "llama.rope.dimension_count is 6, but heads have 12"),
    ],
)
def test_r20f_other_scaling_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(tmp_path, name, changes, message)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-gqa", {"general.architecture": "gemma3"}, "architecture 'gemma3'; supported: llama, qwen2, qwen3"),
        ("llama-gqa", {"llama.expert_count": 8}, "llama.expert_count to 8, which this backend does not know; mixtures"),
        ("llama-gqa", {"llama.attention.scale": 0.5}, "sets llama.attention.scale to 0.5"),
        ("llama-gqa", {"llama.attention.causal": False}, "llama.attention.causal is false"),
        ("llama-gqa", {"llama.attention.value_length": 8}, "llama.attention.value_length is 8, but heads have 12"),
        (
            "llama-gqa",
            {"llama.attention.head_count_kv": [2, 4]},
            "llama.attention.head_count_kv differs between layers",
        ),
        ("llama-gqa", {"llama.attention.head_count": 0}, "'llama.attention.head_count' is 0; it must be at least 1"),
        ("llama-gqa", {"llama.context_length": None}, "does not set 'llama.context_length'"),
        ("llama-biases", {"llama.attention.sliding_window": 16}, "a window beside biases is not supported"),
        (
            "qwen2-bias",
            {"qwen2.attention.sliding_window": 16},
            "qwen2.attention.sliding_window is 16, but not of which",
        ),
    ],
)
def test_settings_that_are_not_supported_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = tiny_gguf(name, tmp_path / "source")
    file.architecture = changes.get("general.architecture", file.architecture)
    file.metadata |= changes
    assert_refused(file.write(tmp_path / "tiny.gguf"), "tiny.gguf", message)


def ends(tmp_path: Path, file: GgufFile, **changes: Any) -> tuple[int, ...]:
    own = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")}
    file.metadata = own | byte_level(**changes)
    return read_model_config(resolve_checkpoint(str(file.write(tmp_path / "tiny.gguf")))).eos_token_ids


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias", "mistral-full"])
def test_r20i_all_ends_of_the_file_end_an_answer(name: str, tmp_path: Path) -> None:
    _, file = tiny_gguf(name, tmp_path / "source")
    assert ends(tmp_path, file, eot_token_id=4) == (2, 4)
    assert ends(tmp_path, file, eot_token_id=4, eom_token_id=3) == (2, 4, 3)
    assert ends(tmp_path, file, eot_token_id=2) == (2,)
    assert ends(tmp_path, file, eos_token_id=None, eot_token_id=4) == (4,)


def test_r20i_ends_of_turn_that_the_file_marks_but_does_not_name(tmp_path: Path) -> None:
    """Llama 3.1 has three ends, its files name one or two."""
    tokens = list(byte_level()["tokenizer.ggml.tokens"])
    tokens[3:5] = ["<|eot_id|>", "<|eom_id|>"]
    _, file = tiny_gguf("llama-gqa", tmp_path / "source")
    assert ends(tmp_path, file, tokens=tokens, eos_token_id=3) == (3, 4)
    types = [CONTROL, CONTROL, CONTROL, 1, 1] + [1] * 92  # words like others
    assert ends(tmp_path, file, tokens=tokens, token_type=types) == (2,)


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "bos_token_id"])
def test_r20i_ids_beyond_the_vocabulary_are_named(key: str, tmp_path: Path) -> None:
    refused(tmp_path, "llama-gqa", byte_level(**{key: 97}), f"tokenizer.ggml.{key} is 97, but there are 97 tokens")


def test_sampling_that_the_file_proposes_is_kept(tmp_path: Path) -> None:
    _, file = tiny_gguf("llama-gqa", tmp_path / "source")
    file.metadata |= {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    folder = resolve_checkpoint(str(file.write(tmp_path / "tiny.gguf")))
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"], generation["do_sample"]) == (0.6, 20, True)


def test_a_conversion_that_lost_something_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, file = tiny_gguf("llama-gqa", tmp_path / "source")
    path = file.write(tmp_path / "tiny.gguf")
    write = conversion.write_tensors
    with monkeypatch.context() as patch:
        patch.setattr(
            conversion,
            "write_tensors",
            lambda source, places, *others: write(source, dict(list(places.items())[1:]), *others),
        )
        assert_refused(path, "the conversion lost its tensors")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "read_generation_settings", lambda *_: {"eos_token_id": [5]})
        assert_refused(path, "the conversion lost its settings")
    assert list((cache / "models").iterdir()) == []
    resolve_checkpoint(str(path))
