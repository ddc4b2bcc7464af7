"""Which shapes of step have a CUDA graph, and how many prompt tokens a full step has so that it fits one.

A graph computes its rows whether the plan fills them or not, and libraries' products cost by tiles of 128 or 256 rows:
2,112 rows take 10 % longer than 2,048 (Llama-3.1-8B's gate and up on an H100). Under load nearly every step with
prompts is as large as the budget. So the shapes of such steps have the budget's tokens and not one more, and the
scheduler plans just what they hold. Scheduler and runner both read the rule here. It knows numbers alone, neither
plans nor devices.

Up to 2,048 prompt tokens every shape has a graph. Above, whether the device is busy for longer than the host needs to
launch the step kernel by kernel depends on model and machine: the runner measures it, and makes no graphs of such full
steps where they gain nothing. What is planned does not depend on that.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

_ALIGNED = 4  # int32 elements in 16 bytes
# Prompt tokens a mixed step has a graph for, and how many requests they may come from. Beside these prompts, which
# often have just so many tokens, there are all numbers of decode rows.
_PROMPTS_OF_PREFILL = {32: 4, 128: 4, 256: 8, 512: 8, 1024: 16, 2048: 16}
# In between, so that a step computes a tenth more tokens than it has and not a third (the mean over all steps), beside
# fewer numbers of decode rows: each graph is captured at the start.
_PROMPTS_IN_BETWEEN = {384: 8, 640: 16, 768: 16, 1280: 16, 1536: 16, 1792: 16}
_BESIDE = (0, 8, 32, 64, 128, 256, 512)
_BESIDE_IN_BETWEEN = (0, 64, 128, 256, 512)
# The same of steps with rows that go through adapters.
_ADAPTER_DECODE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512)
_ADAPTER_PREFILL = (128, 512, 1024, 2048)
_ADAPTER_BESIDE = (0, 64, 256)
_ADAPTER_FULL = (8, 64, 256)  # with room for any plan; plans of full steps fit the sizes of `FullSteps` as well
_MOST_PREFILL = max(_PROMPTS_OF_PREFILL)
_LEAST_PROMPTS = max(_PROMPTS_OF_PREFILL.values())  # room of every full step
_TOKENS_OF_TEXT = 16  # where nothing is generated: as many prompts as are this long, for many texts are short
# A small step with prompts has no more of these, and fits a graph whatever the device. Any larger one may have to be
# launched kernel by kernel.
MOST_SMALL_TOKENS, MOST_SMALL_PROMPTS = _MOST_PREFILL, _LEAST_PROMPTS
_TOKENS_OF_PROMPT = 128  # and of larger ones: as many prompts as are this long
# Budgets whose full steps have shapes of their own. Below, a step takes as long as reading the weights, whatever its
# rows; above, the device is slower than any host.
_LEAST_BUDGET, _MOST_BUDGET = 512, 8192
MAX_GRAPH_PROMPTS = _MOST_BUDGET // _TOKENS_OF_PROMPT
_LEAST_PART = 4  # a full step may leave one in so many prompt tokens out to fit its graph
_MOST_PADDING = 16  # of a graph of more prompt tokens than those above at most one token in so many is padding


class StepShape(NamedTuple):
    """What a step has room for. `num_rows`: rows that may sample."""

    num_decode: int
    num_prefill: int = 0  # prompt tokens
    num_prompts: int = 0  # requests they belong to
    num_drafts: int = 0  # guessed tokens of each decode row, beside its own
    has_adapters: bool = False  # rows may go through adapters
    num_groups: int = 1  # of layers, each with block tables of its own

    @property
    def num_rows(self) -> int:
        return self.num_decode + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decode + self.num_prefill

    @property
    def is_large(self) -> bool:
        """Whether it depends on model and machine if a graph of this shape gains anything."""
        return self.num_prefill > _MOST_PREFILL

    @property
    def least_tokens(self) -> int:
        """Steps of fewer tokens are better launched kernel by kernel, at their own size, than run in this shape."""
        return self.num_tokens - self.num_tokens // _MOST_PADDING if self.is_large else 0

    @property
    def num_deltas(self) -> int:
        return max(self.num_rows, 16) * self.num_groups

    @property
    def mapping_shape(self) -> tuple[int, ...]:
        """Of the slot mapping: of several groups, each begins at 16 bytes."""
        return (self.num_tokens,) if self.num_groups == 1 else (self.num_groups, _aligned(self.num_tokens))

    def sizes(self) -> dict[str, int]:
        """The segments of the host array, in order."""
        sizes = {"slots": self.num_rows, "deltas": 3 * self.num_deltas}
        if self.num_prefill:
            tokens = self.num_tokens  # the decode rows' part is filled in on the device
            sizes |= {"token_ids": tokens, "positions": tokens, "slot_mapping": tokens, "num_prompt_tokens": tokens}
            if self.num_groups > 1:
                sizes["slot_mapping"] = self.num_groups * _aligned(tokens)
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
            end += _aligned(size)
        return layout, end


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Decode batches with a graph of their own, ascending: fine where a row more is felt, coarse where it is not."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 32, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def step_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepShape]:
    """Every shape to capture: all decode sizes, a few beside each number of prompt tokens, and those of full steps."""
    most_rows = min(max_num_seqs, max_num_batched_tokens)  # a running request has a token in every step
    full_steps = FullSteps(max_num_seqs, max_num_batched_tokens)
    longest = max_num_batched_tokens
    if full_steps.decode_sizes and longest <= _MOST_PREFILL:
        longest = longest * 3 // 4  # hardly smaller than a full step is not worth graphs of its own
    prompts = {
        (size, num_prefill): num_prompts
        for prompts_of, beside in ((_PROMPTS_OF_PREFILL, _BESIDE), (_PROMPTS_IN_BETWEEN, _BESIDE_IN_BETWEEN))
        for num_prefill, num_prompts in prompts_of.items()
        if num_prefill <= longest
        for size in (*(size for size in beside if size < most_rows), most_rows)
    }
    prompts |= {(size, max_num_batched_tokens - size): full_steps.num_prompts for size in full_steps.decode_sizes}
    return [
        *(StepShape(size) for size in decode_sizes(most_rows)),
        *(StepShape(*size, num_prompts) for size, num_prompts in prompts.items()),
    ]


def pooling_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepShape]:
    """Every shape to capture where nothing is generated: those of prompts alone, with room for many. None of them is
    sampled for, so that a prompt of padding costs next to nothing.
    """
    return [
        shape._replace(num_prompts=max(shape.num_prompts, min(shape.num_prefill // _TOKENS_OF_TEXT, max_num_seqs)))
        for shape in step_shapes(max_num_seqs, max_num_batched_tokens)
        if not shape.num_decode
    ]


def adapter_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepShape]:
    """Shapes to capture of steps with rows that go through adapters: coarser, so that the start does not take twice as
    long, but for full steps, which under load are most of those with prompts. A few more have room for some tokens more
    than the budget, so that each plan fits one.
    """
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = [*(size for size in _ADAPTER_DECODE if size < most_rows), most_rows]
    beside = [*(size for size in _ADAPTER_BESIDE if size < most_rows), most_rows]
    shapes = [StepShape(size, has_adapters=True) for size in sizes]
    for num_prefill in _ADAPTER_PREFILL:
        if num_prefill < max_num_batched_tokens:
            num_prompts = _PROMPTS_OF_PREFILL[num_prefill]
            shapes += [StepShape(size, num_prefill, num_prompts, has_adapters=True) for size in beside]
    full_steps = FullSteps(max_num_seqs, max_num_batched_tokens)
    if full_steps.decode_sizes:
        full = [*(size for size in _ADAPTER_FULL if size < most_rows), most_rows]
        for least, size in zip((0, *full[:-1]), full, strict=True):
            num_prefill = max_num_batched_tokens - least
            shapes.append(StepShape(size, num_prefill, full_steps.num_prompts, has_adapters=True))
    if max_num_batched_tokens <= _MOST_PREFILL:  # above, each takes long to capture
        for size in full_steps.decode_sizes:
            shape = StepShape(size, max_num_batched_tokens - size, full_steps.num_prompts, has_adapters=True)
            shapes += [shape] if shape not in shapes else []
    return shapes


class FullSteps:
    """The steps with prompts that are as large as the budget: their shapes, and what may be planned for them."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._budget = max_num_batched_tokens
        most_rows = min(max_num_seqs, max_num_batched_tokens)
        # What is missing to the next size is missing to the prompts: finer than beside fewer prompt tokens.
        few = [*range(32, 257, 32), *range(320, 513, 64)]
        if max_num_batched_tokens > _MOST_PREFILL:
            few = [*range(64, 513, 64)]  # it is missed less, and each graph takes longer to capture
        sizes = [*(size for size in (0, 8, *few, *range(640, most_rows, 128)) if size < most_rows), most_rows]
        has_shapes = _LEAST_BUDGET <= max_num_batched_tokens <= _MOST_BUDGET
        # Ascending; the rest of the budget is prompt tokens.
        self.decode_sizes = [size for size in sizes if size < max_num_batched_tokens] if has_shapes else []
        # Requests they may belong to: no more than can run, but for a few of padding.
        self.num_prompts = max(_LEAST_PROMPTS, min(max_num_batched_tokens // _TOKENS_OF_PROMPT, max_num_seqs))

    def most_prompt_tokens(self, num_decode: int) -> int:
        """Prompt tokens to plan at most beside so many decode rows: the graph's, and with none of these the budget's.

        Never 0 where the budget leaves room, and never less than three quarters of that room.
        """
        left = self._budget - num_decode
        index = bisect_left(self.decode_sizes, num_decode)
        if index == len(self.decode_sizes):
            return left
        num_padding = self.decode_sizes[index] - num_decode
        return left - num_padding if num_padding * _LEAST_PART <= left else left
