"""Which shapes of step have a CUDA graph. It knows numbers alone, neither plans nor devices."""

from __future__ import annotations

from typing import NamedTuple

_ALIGNED = 4  # int32 elements in 16 bytes
# Prompt tokens a mixed step has a graph for, and how many requests they may come from. Above the last, the device is
# busy for longer than the host needs to launch the step kernel by kernel.
_PROMPTS_OF_PREFILL = {32: 4, 128: 4, 256: 8, 512: 8, 1024: 16, 2048: 16}
MAX_GRAPH_PROMPTS = max(_PROMPTS_OF_PREFILL.values())


class StepShape(NamedTuple):
    """What a step has room for. `num_rows`: rows that may sample."""

    num_decode: int
    num_prefill: int = 0  # prompt tokens
    num_prompts: int = 0  # requests they belong to

    @property
    def num_rows(self) -> int:
        return self.num_decode + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decode + self.num_prefill

    @property
    def num_deltas(self) -> int:
        return max(self.num_rows, 16)

    def sizes(self) -> dict[str, int]:
        """The segments of the host array, in order."""
        sizes = {"slots": self.num_rows, "deltas": 3 * self.num_deltas}
        if self.num_prefill:
            tokens = self.num_tokens  # the decode rows' part is filled in on the device
            sizes |= {"token_ids": tokens, "positions": tokens, "slot_mapping": tokens, "num_prompt_tokens": tokens}
            sizes |= {"sample_index": self.num_rows, "prompt_slots": self.num_prompts}
            sizes |= {"query_start_loc": self.num_prompts + 1, "prompt_seq_lens": self.num_prompts}
        return sizes

    def layout(self) -> tuple[dict[str, slice], int]:
        """Where each segment lies in the host array, and the array's length.

        Segments begin at 16 bytes: `triton` compiles a kernel anew for pointers that are aligned otherwise.
        """
        layout, end = {}, 0
        for name, size in self.sizes().items():
            layout[name] = slice(end, end + size)
            end += -(-size // _ALIGNED) * _ALIGNED
        return layout, end


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Decode batches with a graph of their own, ascending: fine where a row more is felt, coarse where it is not."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 32, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def step_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepShape]:
    """Every shape to capture: all decode sizes, and a few beside each number of prompt tokens."""
    shapes = [StepShape(size) for size in decode_sizes(max_num_seqs)]
    beside = [size for size in (0, 8, 32, 64, 128, 256, 512) if size < max_num_seqs]
    for num_prefill, num_prompts in _PROMPTS_OF_PREFILL.items():
        if num_prefill <= max_num_batched_tokens:
            shapes += [StepShape(size, num_prefill, num_prompts) for size in [*beside, max_num_seqs]]
    return shapes
