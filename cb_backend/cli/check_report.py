"""What `cb-backend check` says of a checkpoint: for people, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cb_backend.cli.check_findings import Findings
from cb_backend.kv_cache.storage import show_bytes
from cb_backend.layers.layer_spec import FULL_ATTENTION
from cb_backend.layers.rope_config import RopeConfig
from cb_backend.models.spec import ModelSpec

MOST_REFUSALS = 20  # of a checkpoint that are printed; JSON has all


@dataclass(frozen=True, slots=True)
class CacheFit:
    """What one card has left for the cache."""

    card: str
    card_bytes: int
    num_tokens: int | None  # None: it does not do, for these reasons
    longest_request: int | None  # tokens of prompt and answer that it takes; None as above
    reasons: tuple[str, ...] = ()


def first_of(refusals: Sequence[str], most: int) -> Iterator[str]:
    """So many of them, and how many more there are: each of hundreds of modules may have one of its own."""
    yield from refusals[:most]
    if len(refusals) > most:
        yield f"and {len(refusals) - most} more (--json has all)"


def as_json(found: Findings, kv_bytes_per_token: int | None, fits: list[CacheFit]) -> dict[str, Any]:
    spec = found.spec
    return {
        "model": found.model,
        "kind": found.kind,
        "is_served": not found.refusals,
        "refusals": found.refusals,
        "architecture": None if spec is None else _architecture(spec),
        "num_parameters": found.num_parameters,
        "dtype": None if found.dtype is None else str(found.dtype).removeprefix("torch."),
        "quantization": found.quantization,
        "max_model_len": found.max_model_len,
        "eos_token_ids": list(found.eos_token_ids),
        "has_own_head": found.has_own_head,
        "tokenizer": None if found.tokenizer is None else asdict(found.tokenizer),
        "weight_bytes": found.weight_bytes,
        "adapter_bytes": found.adapter_bytes,
        "modules": None if found.groups is None else [asdict(group) for group in found.groups],
        "kv_bytes_per_token": kv_bytes_per_token,
        "cards": [asdict(fit) for fit in fits],
    }


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.attention
    return {
        "model_type": spec.model_type,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": spec.vocab_size,
        "windows": list(spec.windows),
        "ropes": [_rope(rope) for rope in spec.ropes],
        "layers_without_rope": sum(layer.rope is None for layer in spec.layers),
        "tie_word_embeddings": spec.tie_word_embeddings,
        "context_length": spec.max_context_len,
    }


def _rope(rope: RopeConfig) -> str:
    stretch = f", factor {rope.factor:g}" if rope.factor != 1.0 else ""
    return f"{rope.rope_type}, theta {rope.theta:g}{stretch}"


def report(found: Findings, kv_bytes_per_token: int | None, fits: list[CacheFit]) -> Iterator[str]:
    """Lines of text."""
    outcome = "is served" if not found.refusals else "is refused"
    size = "" if found.num_parameters is None else f", {_in_words(found.num_parameters)} parameters"
    family = "" if found.spec is None else f", {found.spec.model_type}"
    yield f"{found.model}: {found.kind}{family}{size}: {outcome}"
    if found.spec is not None:
        for name, text in _rows(found, found.spec):
            yield f"  {name:<16}{text}"
    if found.groups:
        yield ""
        yield from _modules(found)
    if found.refusals:
        yield ""
        yield f"Refused for {len(found.refusals)} reason{'s' * (len(found.refusals) > 1)}:"
        yield from (f"  - {line}" for line in first_of(found.refusals, MOST_REFUSALS))
    if kv_bytes_per_token is not None:
        yield ""
        room = "; room for it beside the weights, nearly:" if fits else ""
        yield f"A token takes {show_bytes(kv_bytes_per_token)} of cache{room}"
        yield from (f"  {fit.card:<12}{show_bytes(fit.card_bytes):>11}  {_room(found, fit)}" for fit in fits)


def _in_words(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 10**9 else f"{number / 1e6:.2f} million"


def _room(found: Findings, fit: CacheFit) -> str:
    if fit.num_tokens is None:
        return "; ".join(fit.reasons)
    length = found.max_model_len
    if length and (fit.longest_request or 0) < length:
        return f"{fit.num_tokens:,} tokens, of requests of {fit.longest_request:,} at most (max_model_len {length:,})"
    requests = f": {fit.num_tokens / length:,.1f} requests of {length:,}" if length else ""
    return f"{fit.num_tokens:,} tokens{requests}"


def _rows(found: Findings, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    attention = spec.attention
    yield "layers", f"{spec.num_layers}, hidden size {spec.hidden_size}"
    yield (
        "attention",
        f"{attention.num_heads} query heads, {attention.num_kv_heads} of keys and values, size {attention.head_dim}; "
        + _windows(spec.windows),
    )
    experts: list[Any] = [layer.mlp for layer in spec.layers if hasattr(layer.mlp, "num_experts")]
    if experts:
        yield "experts", f"{experts[0].num_experts} in each of {len(experts)} layers, {experts[0].top_k} a token"
    without = sum(layer.rope is None for layer in spec.layers)
    ropes = "; ".join(dict.fromkeys(_rope(rope) for rope in spec.ropes))
    yield "positions", ropes + (f"; {without} layers without" if without else "")
    asked = "" if found.max_model_len in (None, spec.max_context_len) else f", max_model_len {found.max_model_len:,}"
    yield "context", f"{spec.max_context_len:,} tokens{asked}"
    has_own_head = found.has_own_head if found.has_own_head is not None else not spec.tie_word_embeddings
    yield "vocabulary", f"{spec.vocab_size:,}, the head {'is apart' if has_own_head else 'is the embedding'}"
    texts = {} if found.tokenizer is None else found.tokenizer.ends
    ends = [f"{end} {texts[end]}" if texts.get(end) else str(end) for end in found.eos_token_ids]
    yield "ends of answers", ", ".join(ends) or "none: only max_tokens ends them"
    if found.tokenizer is not None:
        yield "tokenizer", f"{found.tokenizer.num_tokens:,} tokens, {found.tokenizer.folder}"
        yield "chat templates", ", ".join(found.tokenizer.chat_templates) or "none"
    if found.dtype is not None:
        quantised = f", weights: {found.quantization}" if found.quantization else ""
        yield "computed in", f"{str(found.dtype).removeprefix('torch.')}{quantised}"
    if found.weight_bytes is not None:
        adapters = "" if found.adapter_bytes is None else f", {show_bytes(found.adapter_bytes)} for adapters"
        yield "memory", f"{show_bytes(found.weight_bytes)} of weights{adapters}"


def _windows(windows: tuple[int, ...]) -> str:
    counts = Counter(windows)
    if counts.keys() == {FULL_ATTENTION}:
        return "all layers see everything"
    return ", ".join(
        f"{count} layers see {'everything' if window == FULL_ATTENTION else f'the newest {window}'}"
        for window, count in counts.items()
    )


def _modules(found: Findings) -> Iterator[str]:
    """A line for each kind of module, those of one block that are alike together."""
    together: dict[tuple[str, int, str, str], list[str]] = {}
    sizes: Counter[tuple[str, int, str, str]] = Counter()
    for group in found.groups or []:
        block, _, name = group.modules.rpartition(".")
        key = (block, group.count, group.stored, group.served)
        together.setdefault(key, []).append(name)
        sizes[key] += group.num_bytes
    rows = [("modules", "number", "in the files", "served as", "on the device")]
    for key, names in together.items():
        block, count, stored, served = key
        joined = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
        where = f"{block}.{joined}" if block else joined
        rows.append((where, str(count * len(names)), stored, served, show_bytes(sizes[key])))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row[:4], widths[:4], strict=True))
        yield f"  {'  '.join(cells)}  {row[4].rjust(widths[4])}"
