"""`cb-backend check`: how many tokens and adapters have room beside a model, on which card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.cli.check_cards import CARDS, cache_room, memory_size
from cb_backend.cli.main import main
from cb_backend.contracts.config import EngineConfig
from cb_backend.kv_cache.layout import kept_windows, layout_of
from cb_backend.models.registry import read_model_config
from tests.cli.test_check import FILE, look_at, run


def test_tokens_on_an_h200_are_those_that_were_measured(tmp_path: Path, tokenizer: Path) -> None:
    """An 8B of Llama's shape: 55,906 blocks of 16 tokens beside weights and graphs."""
    found = look_at(write_outline(tmp_path, LLAMA_8B), tokenizer, max_model_len=8192)
    assert found.refusals == []
    assert found.num_parameters == 8_030_261_248
    config = EngineConfig(model="8b", max_model_len=8192)
    spec, weight_bytes = found.spec, found.weight_bytes
    assert spec is not None
    assert weight_bytes is not None
    room = cache_room(config, spec, torch.bfloat16, layout_of(spec, 16, 2), CARDS["h200"], weight_bytes)
    assert room.num_tokens == pytest.approx(55_906 * 16, rel=0.01)


LLAMA_8B = {
    "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def write_outline(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint whose file has a header and holes: nobody may read more of it than that."""
    from cb_backend.models.registry import outline_spec

    (folder / "config.json").write_text(json.dumps(config))
    model = outline_spec(read_model_config(folder), torch.bfloat16)
    entries, end = {}, 0
    for placement in model.placements():
        size = 2 * placement.target.numel()
        entries[placement.name] = {"dtype": "BF16", "shape": placement.shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with (folder / FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return folder


def test_a_card_that_is_too_small_is_refused_in_the_engines_words(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_outline(tmp_path, LLAMA_8B))
    more = ("--tokenizer", str(tokenizer))
    code, text = run(capsys, folder, "--memory", "12GB", *more)
    assert code == 1
    assert "not enough memory for the weights of" in text
    assert "they take 14.96 GiB, and 10.38 GiB of 11.18 GiB are free on the cuda device" in text
    code, text = run(capsys, folder, "--memory", "18GiB", *more)
    assert code == 1
    assert "no room for a KV cache: a block of 16 tokens takes 2048.0 KiB" in text
    assert run(capsys, folder, "--card", "l4", *more)[0] == 0


def test_cards_without_fp8_are_told_apart(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--quantization", "fp8", "--dtype", "bfloat16"), ("--kv-cache-dtype", "fp8")):
        code, text = run(capsys, str(plain), "--card", "a100", *arguments)
        assert code == 1
        assert "needs a GPU of compute capability 8.9 (Ada, Hopper) or newer; this one is a100 (8.0). Use" in text
        assert run(capsys, str(plain), "--card", "l40s", *arguments)[0] == 0
    assert "set dtype 'bfloat16'" in run(capsys, str(plain), "--card", "h100", "--quantization", "fp8")[1]


def test_more_cache_where_less_is_asked_for(tmp_path: Path, tokenizer: Path) -> None:
    found = look_at(write_outline(tmp_path, LLAMA_8B), tokenizer)
    assert found.spec is not None
    assert found.weight_bytes is not None

    def tokens(card: str = "h100", kv_bytes: int = 2, **arguments: Any) -> int:
        config = EngineConfig(model="8b", **arguments)
        layout = layout_of(found.spec, 16, kv_bytes)
        return cache_room(config, found.spec, torch.bfloat16, layout, CARDS[card], found.weight_bytes).num_tokens  # type: ignore[arg-type]

    usual = tokens()
    assert tokens(kv_bytes=1) == pytest.approx(2 * usual, rel=0.001)
    assert tokens("h200") > tokens(gpu_memory_utilization=0.95) > usual > tokens(max_num_batched_tokens=1 << 15)
    assert tokens(num_gpu_blocks_override=100) == 1600


def test_layers_with_a_window_leave_room_for_more_tokens(tmp_path: Path, tokenizer: Path) -> None:
    """20 of 24 layers see 1,024 tokens: a request of 8,192 holds 4 layers' whole and the others' last."""
    windows = {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4, "sliding_window": 1024}
    config = {**LLAMA_8B, "model_type": "ministral", "num_hidden_layers": 24, "head_dim": 128, **windows}
    found = look_at(write_outline(tmp_path, config), tokenizer)
    assert found.spec is not None
    assert found.weight_bytes is not None

    def tokens(length: int, windows: tuple[int, ...] = ()) -> int:
        layout = layout_of(found.spec, 16, 2, windows)  # type: ignore[arg-type]
        config = EngineConfig(model="windows")
        room = cache_room(
            config, found.spec, torch.bfloat16, layout, CARDS["h100"], found.weight_bytes, length=length  # type: ignore[arg-type]
        )  # fmt: skip
        return room.num_tokens

    kept = kept_windows(found.spec.windows, 8192)
    assert tokens(8192, kept) == pytest.approx(tokens(8192) * 24 / (4 + 20 * 1024 / 8192), rel=0.03)
    assert tokens(1024, kept) == pytest.approx(tokens(1024), rel=0.03)  # nothing has fallen out of anything yet
    assert tokens(8192) == tokens(100)


def test_windows_count_where_an_engine_would_use_them(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 128}
    small = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = {**LLAMA_8B, "model_type": "ministral", "head_dim": 128, "num_key_value_heads": 4, **small, **windows}
    folder = write_outline(tmp_path, config)
    found: dict[str, int] = {}
    for prefix in ("", "no-"):
        arguments = ("--card", "l40s", "--json", "--tokenizer", str(tokenizer))
        code, text = run(capsys, str(folder), *arguments, f"--{prefix}disable-hybrid-kv-cache-manager")
        assert code == 0, text
        found[prefix] = json.loads(text)["cards"][0]["num_tokens"]
    assert found["no-"] == pytest.approx(found[""] * 2 / (1 + 128 / 8192), rel=0.02)


@pytest.mark.parametrize(
    ("text", "size"),
    [("141GB", 141 * 10**9), ("80GiB", 80 << 30), ("79.5 gib", int(79.5 * 2**30)), ("80G", 80 * 10**9), ("1024", 1024)],
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "-3GB", "0GB", "1e3GB", "80GBB", "9" * 12 + "TB", "9" * 400])
def test_what_is_no_size_is_told(text: str, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", str(plain), f"--memory={text}"])
    assert caught.value.code == 2
    assert "is not a size of memory, like 80GB or 79.1GiB" in capsys.readouterr().err


def test_places_for_adapters_are_memory_that_the_cache_does_not_get(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> dict[str, Any]:
        assert main(["check", str(plain), "--memory", "16GB", "--json", *arguments]) == 0
        return dict(json.loads(capsys.readouterr().out))

    without, two, wide = (
        shown(*each)
        for each in (
            (),
            ("--enable-lora", "--max-loras", "2"),
            ("--enable-lora", "--max-loras", "20000", "--max-lora-rank", "64"),
        )
    )
    assert without["adapter_bytes"] is None
    assert 0 < two["adapter_bytes"] < wide["adapter_bytes"]
    assert without["cards"][0]["num_tokens"] >= two["cards"][0]["num_tokens"] > wide["cards"][0]["num_tokens"]
    lost = without["cards"][0]["num_tokens"] - wide["cards"][0]["num_tokens"]
    assert lost * without["kv_bytes_per_token"] == pytest.approx(wide["adapter_bytes"], rel=0.01)
    main(["check", str(plain), "--enable-lora"])
    assert "for adapters" in capsys.readouterr().out
    assert main(["check", str(plain), "--memory", "16GB", "--enable-lora", "--max-loras", "9000000"]) == 1
    assert "not enough memory for adapters" in capsys.readouterr().out
