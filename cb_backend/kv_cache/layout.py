"""What a model keeps of its tokens, and the bytes of it: the one place that knows how large keys and values are.

Storage, sizing, swapped blocks, rooflines and benchmarks ask here. Pure arithmetic: this module does not know tensors,
devices or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cb_backend.contracts.config import EngineConfig

ALL_TOKENS = 0  # a window: every earlier token is read
KEYS_AND_VALUES = "keys and values"
_PER_TOKEN = {KEYS_AND_VALUES: 2}  # vectors that a KV head of a layer keeps of a token, by kind of group


MOST_GROUPS = 8  # each costs the host as much at a block's border as a model without groups does
_USUAL_CONTEXT = 8192  # tokens: layers are put together so that so long a request takes the least memory


class CachedModel(Protocol):
    """The sizes of a `models.spec.ModelSpec` that a cache depends on."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class WindowedModel(CachedModel, Protocol):
    """The same, and what each of its layers sees."""

    @property
    def windows(self) -> tuple[int, ...]: ...


class KVGroup(NamedTuple):
    """Layers that keep the same tokens, so that one block table serves them all."""

    window: int  # newest tokens that are kept, the one that is computed included; ALL_TOKENS: all
    layers: tuple[int, ...]  # of the model, in order: the i-th lies in row i of the storage
    kind: str = KEYS_AND_VALUES


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The groups of a cache and the sizes of its blocks. A block holds `block_size` tokens of one group's layers."""

    groups: tuple[KVGroup, ...]
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    element_bytes: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for groups that cannot share blocks: there is none, or a kind is not known."""
        for group in self.groups:
            if group.kind not in _PER_TOKEN:
                raise ValueError(f"layers {group.layers} keep {group.kind!r}; {', '.join(_PER_TOKEN)} can be kept")
        if not self.groups:
            raise ValueError("a layout needs a group of layers at least")

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def layers_per_block(self) -> int:
        """What a block has room for: the layers of the largest group. In blocks of smaller groups some stays empty."""
        return max(len(group.layers) for group in self.groups)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Of one layer's part of a block: keys (index 0) and values (index 1) of each KV head, token by token."""
        return (_PER_TOKEN[KEYS_AND_VALUES], self.num_kv_heads, self.block_size, self.head_dim)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Of the whole cache: [layers_per_block, num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return (self.layers_per_block, num_blocks, *self.layer_shape)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return int(bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.element_bytes))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, whichever group it is given to."""
        a_token = bytes_per_token(self.layers_per_block, self.num_kv_heads, self.head_dim, self.element_bytes)
        return self.block_size * int(a_token)

    def num_blocks_in(self, num_bytes: int) -> int:
        """Whole blocks in so much memory."""
        return max(0, num_bytes // self.bytes_per_block)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: float) -> float:
    """Bytes of a token's keys and values in so many layers."""
    return _PER_TOKEN[KEYS_AND_VALUES] * num_layers * num_kv_heads * head_dim * element_bytes


def one_group(num_layers: int) -> tuple[KVGroup, ...]:
    """All layers keep all tokens."""
    return (KVGroup(ALL_TOKENS, tuple(range(num_layers))),)


def kept_windows(windows: Sequence[int], max_model_len: int) -> tuple[int, ...]:
    """The windows that a cache can make use of: nothing falls out of those as long as the longest request."""
    return tuple(window if window < max_model_len else ALL_TOKENS for window in windows)


def kv_groups(windows: Sequence[int]) -> tuple[KVGroup, ...]:
    """Layers by their windows, [num_layers], in groups of as equal sizes as can be: those that keep most come first.

    A block has room for as many layers as the largest group has. Small groups leave little of it empty, large ones are
    few: of the sizes with at most `MOST_GROUPS` groups, this is the one with which a long request takes least memory.
    """
    kinds = {kept: [layer for layer, window in enumerate(windows) if window == kept] for kept in windows}
    in_order = sorted(kinds, key=lambda window: (window != ALL_TOKENS, -window))

    def cost(size: int) -> tuple[bool, int, int]:
        numbers = {window: -(-len(kinds[window]) // size) for window in in_order}
        kept = sum(number * min(window or _USUAL_CONTEXT, _USUAL_CONTEXT) for window, number in numbers.items())
        return sum(numbers.values()) > MOST_GROUPS, size * kept, sum(numbers.values())

    size = min(range(1, len(windows) + 1), key=cost)
    return tuple(
        KVGroup(window, tuple(kinds[window][first : first + size]))
        for window in in_order
        for first in range(0, len(kinds[window]), size)
    )


def layout_of(model: CachedModel, block_size: int, element_bytes: int, windows: Sequence[int] = ()) -> KVLayout:
    """How the keys and values of this model are kept, in blocks of `block_size` tokens.

    `windows` [num_layers]: what each layer gives back, see `kept_windows`; none: all keep all tokens.
    """
    return KVLayout(
        groups=kv_groups(windows) if windows else one_group(model.num_layers),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        element_bytes=element_bytes,
    )


def engine_layout(config: EngineConfig, model: WindowedModel, element_bytes: int, max_model_len: int) -> KVLayout:
    """The layout that the engine's arguments make of a model, or of a device's part of it."""
    windows = () if config.disable_hybrid_kv_cache_manager else kept_windows(model.windows, max_model_len)
    return layout_of(model, config.block_size, element_bytes, windows)
