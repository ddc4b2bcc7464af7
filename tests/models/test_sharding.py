"""Models whose weights several devices share: what they compute together is what one device computes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.layer_maker import LayerMaker
from cb_backend.layers.layer_spec import NormSpec
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.packed_pieces import Piece, PlainPiece
from cb_backend.layers.projection import Projection, Split
from cb_backend.layers.weight_format import ModuleFormats, PlainFormat
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.models.sharding import shard_spec
from cb_backend.parallel.group import Addition, Group, NoGroup
from cb_backend.parallel.torch_group import TorchGroup
from tests.models.paged_model import PagedModel
from tests.models.quantised_models import FAMILIES, FORMATS, pair
from tests.models.test_experts import WITH_EXPERTS
from tests.models.tiny_checkpoints import CONFIGS, random_tokens, write_checkpoint
from tests.parallel.ranks import on_ranks

STEP: Any = None  # plain products do not look at it
PROMPTS = random_tokens(21, 1), random_tokens(9, 2)


@torch.inference_mode()
def logits(folder: Path, group: Group | None = None, **options: Any) -> Tensor:
    """Of a prompt in chunks beside another one, then of single tokens of both."""
    model = PagedModel(folder, group=group, **options)
    for slot, prompt in enumerate(PROMPTS):
        model.start(slot, len(prompt))
    found = [model.step([], [(0, PROMPTS[0][:8]), (1, PROMPTS[1])]), model.step([], [(0, PROMPTS[0][8:])])]
    found += [model.step([(0, token), (1, token + 1)], []) for token in (5, 60, 17)]
    return torch.cat(found)


# On four devices KV heads are replicated and shares padded: what each takes is held to all checkpoints in
# `test_shards_of_checkpoints`, what they compute to one of each kind here.
ON_FOUR = [
    "llama-gqa", "llama-mqa", "llama-tied", "phi3-partial", "qwen2-bias", "olmo2", "gemma3", "qwen3-moe", "gpt-oss",
    "gpt-oss-mxfp4", "glm4-moe",
]  # fmt: skip
SPREAD = [name for name in WITH_EXPERTS if name not in ("mixtral", "granitemoe")]  # which have 5
SPREAD_ON_FOUR = ["qwen3-moe", "glm4-moe", "gpt-oss-full"]
FORMATS_ON_FOUR = ["awq 64", "gptq act-order", "w4a16, zeros", "w4a16, channel", "fp8 blocks", "nvfp4"]


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in sorted(CONFIGS)] + [(name, 4) for name in ON_FOUR])
def test_devices_of_every_family_compute_what_one_computes(name: str, size: int, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)
    whole = logits(folder)
    first, *others = on_ranks(size, lambda group: logits(folder, group))
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(first.argmax(1), whole.argmax(1))
    assert all(each.shape == (len(whole), 0) for each in others)


@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in SPREAD] + [(name, 4) for name in SPREAD_ON_FOUR])
def test_devices_with_experts_of_their_own_compute_what_one_computes(name: str, size: int, tmp_path: Path) -> None:
    """However experts are stored and chosen; what all tokens share is still shared out."""
    folder = write_checkpoint(name, tmp_path)
    whole = logits(folder)
    first, *others = on_ranks(size, lambda group: logits(folder, group, spreads_experts=True))
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(first.argmax(1), whole.argmax(1))
    assert all(each.shape == (len(whole), 0) for each in others)


def test_experts_that_cannot_be_spread_are_named(tmp_path: Path) -> None:
    mixtral, llama = (write_checkpoint(name, tmp_path / name) for name in ("mixtral", "llama-gqa"))
    with pytest.raises(
        ConfigError,
        match="5 experts cannot be spread over 2 devices whole; with enable_expert_parallel this model can be on 1, 5;",
    ):
        on_ranks(2, lambda group: loaded(mixtral, group, spreads_experts=True))
    with pytest.raises(ConfigError, match="enable_expert_parallel is on, but the model has no experts; remove it"):
        on_ranks(2, lambda group: loaded(llama, group, spreads_experts=True))
    for folder in (mixtral, llama):
        loaded(folder, NoGroup(), spreads_experts=True)  # on one device it changes nothing


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_three_devices_where_the_heads_divide(kv_heads: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 100, "vocab_size": 97, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": kv_heads}
    torch.manual_seed(kv_heads)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.25)).save_pretrained(tmp_path)
    whole = logits(tmp_path)
    first, *_ = on_ranks(3, lambda group: logits(tmp_path, group))
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), [(name, 2) for name in sorted(FORMATS)] + [(name, 4) for name in FORMATS_ON_FOUR]
)
def test_devices_of_every_format_compute_what_one_computes(name: str, size: int, tmp_path: Path) -> None:
    _, folder = pair(tmp_path, "llama", *FORMATS[name])
    whole = logits(folder)
    first, *_ = on_ranks(size, lambda group: logits(folder, group))
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in sorted(FAMILIES) for name in ("awq 64", "w4a16", "w8a16")] + [("qwen2", "nvfp4")],
)
def test_families_of_few_bits(family: str, name: str, tmp_path: Path) -> None:
    """Routers of few bits, where there are such, are whole on every device."""
    _, folder = pair(tmp_path, family, *FORMATS[name], has_routers=family == "qwen3-moe, 8 experts")
    whole = logits(folder)
    first, *_ = on_ranks(2, lambda group: logits(folder, group))
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_products_of_whole_numbers_have_the_bits_of_one_device(size: int) -> None:
    """Rows, then columns, with 40 features between them, which no number of devices here divides without padding."""
    torch.manual_seed(size)
    weights = [torch.randint(-4, 5, shape).float() for shape in ((40, 8), (24, 40))]
    x, residual = torch.randint(-4, 5, (5, 8)).float(), torch.zeros(5, 24)
    parts = [{"up": 40}, {"down": 24}]

    def work(group: TorchGroup) -> Tensor:
        make = LayerMaker(
            ops=resolve_ops("torch"), dtype=torch.float32, device=x.device, group=group,
            format_of=ModuleFormats(PlainFormat()),
        )  # fmt: skip
        share, inner = make.inner_share(40, ["m.up", "m.down"]), x
        splits: list[dict[str, Any]] = [
            {"split": Split.ROWS, "shares": {"up": share}},
            {"split": Split.COLUMNS, "columns": share},
        ]
        for weight, part, split in zip(weights, parts, splits, strict=True):
            linear = make.linear(Projection(name="m", in_size=weight.shape[1], parts=part, **split))
            for placement in linear.placements():
                placement.target.copy_(placement.prepare(weight))
            inner = linear(inner, STEP)
        return group.reduce_add_norm(
            inner, residual, make.junction(NormSpec(eps=1e-5), 24, leaving=None, joining=None)
        )[1]

    wanted = x @ weights[0].T @ weights[1].T
    assert all(torch.equal(found, wanted) for found in on_ranks(size, work))


@pytest.mark.parametrize("name", ["gptq act-order", "w4a16, act-order"])
def test_columns_that_groups_are_not_cut_at_are_written_out(name: str, tmp_path: Path) -> None:
    """Those alone: rows keep their few bits."""
    _, folder = pair(tmp_path, "llama", *FORMATS[name])

    def kinds(group: TorchGroup) -> list[type]:
        layer = loaded(folder, group).layers[0]
        linears = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
        return [type(piece) for linear in linears for piece in linear.pieces[:1]]

    assert on_ranks(2, kinds) == [[Piece, PlainPiece, Piece, PlainPiece]] * 2


def loaded(folder: Path, group: Group, **options: Any) -> DecoderForCausalLM:
    spec = read_model_config(folder)
    return load_model(
        folder, spec, ops=resolve_ops("torch"), dtype=torch.float32, device=torch.device("cpu"), group=group, **options
    )


@pytest.mark.parametrize("name", ["llama-gqa", "llama-biases", "phi3", "qwen3-moe", "gpt-oss", "granitemoe"])
def test_what_is_quantised_while_it_is_loaded(name: str, tmp_path: Path) -> None:
    """In fp8 a row's scale is that of a device's columns, so sums differ by roundings to 3 bits, and no more."""
    folder = write_checkpoint(name, tmp_path)
    plain, whole = logits(folder), logits(folder, quantization="fp8")
    first, *_ = on_ranks(2, lambda group: logits(folder, group, quantization="fp8"))
    assert (first - plain).std() < 1.5 * (whole - plain).std()


class Watched:
    """A group that keeps what its sums leave."""

    def __init__(self, group: Group) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size
        self.streams: list[Tensor] = []

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Addition) -> tuple[Tensor, Tensor]:
        normed, total = self._group.reduce_add_norm(x, residual, junction)
        self.streams += [normed.clone(), total.clone()]
        return normed, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-bias", "gemma3", "olmo2", "qwen3-moe"])
def test_streams_of_ranks_are_the_same_bits_and_so_are_those_of_a_second_run(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path)

    def work(group: TorchGroup) -> tuple[list[Tensor], Tensor]:
        watched = Watched(group)
        return watched.streams, logits(folder, watched)

    (first, its_logits), (second, _) = on_ranks(2, work)
    (again, other_logits), _ = on_ranks(2, work)
    num_layers = read_model_config(folder).num_layers
    assert len(first) == 5 * 2 * 2 * num_layers  # steps, results of a sum, and sums of a layer
    for one, other, repeated in zip(first, second, again, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, repeated)
    assert torch.equal(its_logits, other_logits)


@pytest.mark.parametrize("size", [2, 4])
def test_random_weights_are_the_same_where_ranks_have_the_same(size: int, tmp_path: Path) -> None:
    """Embedding, norms, router; else their residual streams would drift apart."""
    folder = write_checkpoint("mixtral", tmp_path)

    def work(group: TorchGroup) -> list[Tensor]:
        model = loaded(folder, group, load_format="dummy")
        return [model.embed_tokens.weight, *(layer.mlp.router.weight for layer in model.layers)]

    found = on_ranks(size, work)
    for other in found[1:]:
        assert all(torch.equal(*both) for both in zip(found[0], other, strict=True))


def test_heads_that_cannot_be_shared_out_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    message = "4 query heads and 2 KV heads cannot be shared out among 3 devices; this model can be on 1, 2, 4"
    with pytest.raises(ConfigError, match=message):
        shard_spec(read_model_config(folder), 3)
    with pytest.raises(ConfigError, match=message):
        on_ranks(3, lambda group: loaded(folder, group))


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_a_rank_keeps_the_keys_of_its_heads(size: int, kv_heads: int, tmp_path: Path) -> None:
    spec = shard_spec(read_model_config(write_checkpoint("llama-gqa", tmp_path)), size)
    assert (spec.num_heads, spec.num_kv_heads) == (4 // size, kv_heads)


def test_a_tensor_that_no_rank_needs_is_refused_on_every_rank(tmp_path: Path) -> None:
    """And one of another rank alone, as the bias of a partial sum, is not."""
    folder = write_checkpoint("llama-biases", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.extra": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})

    def work(group: TorchGroup) -> str:
        with pytest.raises(ConfigError) as caught:
            loaded(folder, group)
        return str(caught.value)

    assert all("tensor model.layers.0.extra has no place" in message for message in on_ranks(2, work))
