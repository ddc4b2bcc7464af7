"""Configs as people publish them: end-of-sequence ids, keys that are null or absent, numbers of no use."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.engine.runner.runner_factory import create_runner
from cb_backend.front_end.wire.sampling_json import read_params
from cb_backend.models.generation_config import read_sampling_defaults
from cb_backend.models.registry import read_model_config, resolve_dtype
from tests.models.test_model_config import LLAMA, write
from tests.models.tiny_checkpoints import TEXT_FAMILIES, write_checkpoint

VOCAB_SIZE = 97


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("plain"))


@pytest.fixture
def checkpoint(plain: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def write_tokenizer(folder: Path, eos_id: int, size: int = VOCAB_SIZE) -> Path:
    tokenizer = Tokenizer(WordLevel({f"t{index}": index for index in range(size)}, unk_token="t0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"t{eos_id}"}))
    return folder


def served(folder: Path, **arguments: Any) -> Any:
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_memory_bytes=1 << 20, **arguments)
    runner, info = create_runner(config)
    runner.close()
    return info


# ---- end-of-sequence ids ------------------------------------------------------------------------------------------


def test_r08c_answers_end_at_the_ids_of_generation_config_and_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert served(write_tokenizer(checkpoint, eos_id=0)).eos_token_ids == (7, 0)


def test_r08c_an_id_that_both_name_is_there_once(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert served(write_tokenizer(checkpoint, eos_id=5)).eos_token_ids == (7, 5)


def test_r08c_the_tokenizer_named_apart_counts(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    tokenizer = write_tokenizer(tmp_path / "tokenizer", eos_id=9)
    (checkpoint / "generation_config.json").unlink()
    assert served(checkpoint, tokenizer=str(tokenizer)).eos_token_ids == (2, 9)


def test_r08c_without_a_tokenizer_the_config_alone_counts(checkpoint: Path) -> None:
    assert served(checkpoint).eos_token_ids == (2,)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("ids", "kept"), [([0, 99_999], (0,)), (VOCAB_SIZE, ()), ([-1, 3], (3,)), (-1, ())])
def test_r08d_ids_outside_the_vocabulary_are_ignored_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, ids: Any, kept: tuple[int, ...]
) -> None:
    values = {**LLAMA, "vocab_size": VOCAB_SIZE}
    is_generation = where.startswith("generation")
    write(tmp_path, values if is_generation else {**values, "eos_token_id": ids}, {"eos_token_id": ids})
    with caplog.at_level(logging.WARNING):
        assert read_model_config(tmp_path).eos_token_ids == kept
    assert "outside the vocabulary (0 to 96); ignored" in caplog.text


def test_r08d_the_tokenizers_end_outside_the_vocabulary_is_ignored(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "generation_config.json").unlink()
    write_tokenizer(checkpoint, eos_id=VOCAB_SIZE + 3, size=VOCAB_SIZE + 4)
    with caplog.at_level(logging.WARNING):
        assert served(checkpoint).eos_token_ids == (2,)
    assert "the tokenizer's eos_token names [100]" in caplog.text


# ---- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_r03a_null_kv_heads_are_as_many_as_heads(tmp_path: Path, model_type: str) -> None:
    config = read_model_config(write(tmp_path, {**LLAMA, "model_type": model_type, "num_key_value_heads": None}))
    assert config.num_kv_heads == config.num_heads == 4


def test_r03a_transformers_reads_null_kv_heads_so_too(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "model_type": "qwen3", "num_key_value_heads": None})
    assert AutoConfig.from_pretrained(tmp_path).num_key_value_heads == read_model_config(tmp_path).num_kv_heads


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_r04a_an_absent_length_is_the_familys(tmp_path: Path, model_type: str) -> None:
    values = {**LLAMA, "model_type": model_type, "num_key_value_heads": 4}
    del values["max_position_embeddings"]
    config = read_model_config(write(tmp_path, values))
    assert config.max_position_embeddings == AutoConfig.from_pretrained(tmp_path).max_position_embeddings
    if model_type == "llama":
        assert config.max_context_len == 2048


@pytest.mark.parametrize(("spelling", "dtype"), [("half", torch.float16), ("float", torch.float32)])
def test_other_names_of_dtypes(tmp_path: Path, spelling: str, dtype: torch.dtype) -> None:
    config = read_model_config(write(tmp_path, {**LLAMA, "torch_dtype": spelling}))
    assert resolve_dtype("auto", config, torch.device("cuda")) == dtype


LONGROPE = {"type": "longrope", "long_factor": [1.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": -1e-5}, r"'rms_norm_eps' is -1e-05; it must be above 0"),
        ({"rope_scaling": {**LONGROPE, "short_factor": ["a"] * 8}}, r"short_factor\[0\]' must be of type float"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 7 + [0]}}, r"short_factor\[7\]' is 0.0; it must be"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [None] * 8}}, r"does not set 'short_factor\[0\]'"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            r"high_freq_factor \(4.0\) must be above low_freq_factor \(4.0\)",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e30}}, r"a context of \S+ tokens"),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, r"a context of \S+ tokens"),
        ({"num_attention_heads": 128}, r"'head_dim' is 0; it must be at least 1"),
        ({"head_dim": 2**31 - 2}, r"'head_dim' is 2147483646; it must be at least 1 and at most 4096"),
        ({"hidden_size": 2**31 - 4}, r"'head_dim' is 536870911; it must be at least 1 and at most 4096"),
    ],
)
def test_r08d_numbers_that_reach_a_size_are_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(write(tmp_path, {**LLAMA, **changes}))


def test_a_tokenizer_that_cannot_be_converted_is_said_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "cache"))
    (checkpoint / "tokenizer.model").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"the checkpoint's tokenizer cannot be read"):
        served(checkpoint)


# ---- sampling defaults --------------------------------------------------------------------------------------------

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1, "max_new_tokens": 2048}


def test_r08f_sampling_defaults_are_off_unless_asked_for(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({**DEFAULTS, "do_sample": True}))
    assert served(checkpoint).sampling_defaults == {}
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0, "max_tokens": 2048}
    assert served(checkpoint, generation_config="auto").sampling_defaults == expected


def test_r08f_requests_go_before_the_defaults_and_null_means_them() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 2048}
    params, _ = read_params({"temperature": 1.0, "top_k": None}, VOCAB_SIZE, defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 20, 2048)
    assert defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 2048}
    params, _ = read_params({}, VOCAB_SIZE)
    assert (params.temperature, params.top_k, params.most_tokens) == (1.0, 0, 16)


def test_r08f_do_sample_false_is_greedy(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, {"do_sample": False})
    assert read_sampling_defaults(tmp_path, VOCAB_SIZE) == {"temperature": 0.0}


def test_r08f_without_the_file_there_are_none(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path, VOCAB_SIZE) == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 0}, r"generation_config\.json: top_p must be above 0.*generation_config 'auto'"),
        ({"temperature": "hot"}, r"generation_config\.json: 'temperature' must be of type float, found 'hot'"),
        ({"max_new_tokens": 0}, r"max_tokens must be"),
    ],
)
def test_r08f_values_of_no_request_are_refused_at_load(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    write(tmp_path, LLAMA, values)
    with pytest.raises(ConfigError, match=message):
        read_sampling_defaults(tmp_path, VOCAB_SIZE)


def test_r08f_the_argument_has_two_values() -> None:
    with pytest.raises(ConfigError, match=r"generation_config is 'folder'; use one of vllm, auto"):
        EngineConfig(model="m", generation_config="folder")


# ---- every setting ------------------------------------------------------------------------------------------------

# Settings of the families' configs in transformers; each is here, so that a new one is not dropped unseen.
READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "eos_token_id",
    "tie_word_embeddings", "rope_parameters", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window",
    "max_window_layers", "layer_types", "original_max_position_embeddings", "attention_multiplier",
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "no_rope_layers", "no_rope_layer_interval",
    "sliding_window_pattern", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "hidden_activation", "use_bidirectional_attention", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts",
    "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "decoder_sparse_step", "mlp_only_layers",
    "first_k_dense_replace", "use_qk_norm", "qkv_bias", "clip_qkv", "num_mtp_layers",
}  # fmt: skip
# Of training, of transformers' own cache, or of texts, which the tokenizer's files say.
WITHOUT_EFFECT = {
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "pretraining_tp", "attention_dropout",
    "resid_pdrop", "embd_pdrop", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
}  # fmt: skip


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_every_setting_of_transformers_is_read_or_known_to_be_without_effect(model_type: str) -> None:
    config_class = CONFIG_MAPPING[model_type]
    own = {name for name in config_class.__annotations__ if name not in vars(PretrainedConfig)}
    settings = {name for name in own if not name.startswith(("base_model", "keys_to", "model_type"))}
    assert settings - WITHOUT_EFFECT - READ == set()
    assert len(settings & READ) > 10


@pytest.mark.parametrize("model_type", ["llama", "granite", "olmo2"])
@pytest.mark.parametrize(("window", "is_served"), [(None, True), (512, True), (4096, True), (511, False), (8, False)])
def test_a_window_that_a_family_does_not_have_is_refused_where_it_would_count(
    tmp_path: Path, model_type: str, window: int | None, is_served: bool
) -> None:
    write(tmp_path, {**LLAMA, "model_type": model_type, "sliding_window": window})
    if is_served:
        assert read_model_config(tmp_path).windows == (0, 0, 0)
    else:
        with pytest.raises(ConfigError, match=rf"is {window}, which {model_type} does not have; set it to null"):
            read_model_config(tmp_path)
