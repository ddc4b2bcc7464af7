"""Which steps have a graph: sizes and number of shapes, and that a full step fits one of the budget's size."""

from __future__ import annotations

import itertools

import pytest

from cb_backend.engine.runner.step_graphs import StepGraphs
from cb_backend.engine.step_shapes import (
    MAX_GRAPH_PROMPTS,
    FullSteps,
    StepShape,
    decode_sizes,
    pooling_shapes,
    step_shapes,
)
from tests.fakes.graphs import graphs_of

# Where a step has room for four times the running requests, padding of decode rows is small beside the prompt tokens.
ROOMY = [(256, 2048), (512, 2048), (300, 1300), (256, 1024), (128, 1100), (100, 777), (128, 512), (5, 600)]
TIGHT = [(256, 512), (512, 512), (1000, 600), (1024, 2048), (700, 1024), (4000, 4096)]
LARGE = [(256, 2049), (256, 2176), (200, 2304), (512, 3000), (256, 4096), (8, 8192), (256, 8192), (1024, 8192)]
WITHOUT = [(4, 1), (8, 16), (256, 64), (64, 511), (256, 8193), (512, 16384)]


def shape_for(graphs: StepGraphs, num_decode: int, num_prefill: int, num_prompts: int) -> StepShape | None:
    found = graphs.find(num_decode, num_prefill, num_prompts)
    return None if found is None else found[1].shape


def test_every_batch_size_has_a_shape_that_holds_it() -> None:
    sizes = decode_sizes(300)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 300
    assert max(later - size for size, later in itertools.pairwise(sizes)) <= 16
    for shape in step_shapes(300, 1000):
        assert shape.num_decode <= 300
        assert shape.num_prefill <= 1000


def test_sixty_four_rows_leave_1984_prompt_tokens_of_2048() -> None:
    full_steps, graphs = FullSteps(256, 2048), graphs_of(256, 2048)
    assert [full_steps.most_prompt_tokens(n) for n in (0, 1, 8, 33, 40, 64)] == [2048, 2040, 2040, 1984, 1984, 1984]
    assert shape_for(graphs, 40, 1984, 4) == StepShape(64, 1984, 16)
    assert shape_for(graphs, 0, 2048, 1) == StepShape(0, 2048, 16)


@pytest.mark.parametrize(("max_num_seqs", "budget"), ROOMY + LARGE)
def test_every_full_step_fits_a_graph_of_the_budgets_size(max_num_seqs: int, budget: int) -> None:
    full_steps, graphs = FullSteps(max_num_seqs, budget), graphs_of(max_num_seqs, budget)
    for num_decode in range(max_num_seqs + 1):
        most = full_steps.most_prompt_tokens(num_decode)
        for num_prompts in (1, full_steps.num_prompts):
            shape = shape_for(graphs, num_decode, most, num_prompts)
            assert shape is not None
            assert shape.num_tokens == budget, f"{num_decode} rows beside {most} prompt tokens run as {shape}"


@pytest.mark.parametrize(("max_num_seqs", "budget"), ROOMY + LARGE)
def test_lesser_steps_have_graphs_that_are_not_much_larger_once_the_device_is_busy(
    max_num_seqs: int, budget: int
) -> None:
    full_steps, graphs = FullSteps(max_num_seqs, budget), graphs_of(max_num_seqs, budget)
    for num_decode in range(0, max_num_seqs + 1, 7):
        for num_prefill in range(1, full_steps.most_prompt_tokens(num_decode), 61):
            shape = shape_for(graphs, num_decode, num_prefill, 1)
            num_tokens = num_decode + num_prefill
            if num_prefill <= 2048:
                assert shape is not None
            if shape is not None:
                assert num_tokens <= shape.num_tokens <= budget + max_num_seqs
                assert num_prefill <= 2048 or num_tokens >= shape.num_tokens * 15 / 16


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(256, 2048), (256, 8192), (512, 8192)])
def test_a_step_computes_about_a_tenth_more_tokens_than_it_has(max_num_seqs: int, budget: int) -> None:
    """Also when its prompt tokens are of several requests: of 64 tokens each, until they are 16."""
    full_steps, graphs = FullSteps(max_num_seqs, budget), graphs_of(max_num_seqs, budget)
    num_tokens = num_computed = 0
    for num_decode in range(0, max_num_seqs + 1, 16):
        most = min(2048, full_steps.most_prompt_tokens(num_decode))
        for num_prefill in range(16, most + 1, 32):
            shape = shape_for(graphs, num_decode, num_prefill, min(-(-num_prefill // 64), 16))
            assert shape is not None
            num_tokens += num_decode + num_prefill
            num_computed += shape.num_tokens
    assert num_computed <= 1.15 * num_tokens  # a third more without the sizes in between


@pytest.mark.parametrize(("max_num_seqs", "budget"), ROOMY + TIGHT + LARGE + WITHOUT)
def test_prompts_get_most_of_the_room_that_decode_rows_leave(max_num_seqs: int, budget: int) -> None:
    full_steps = FullSteps(max_num_seqs, budget)
    for num_decode in range(min(max_num_seqs, budget) + 1):
        room = budget - num_decode
        assert 3 * room <= 4 * full_steps.most_prompt_tokens(num_decode) <= 4 * room


@pytest.mark.parametrize(("max_num_seqs", "budget"), WITHOUT)
def test_other_budgets_are_used_to_the_last_token(max_num_seqs: int, budget: int) -> None:
    full_steps = FullSteps(max_num_seqs, budget)
    assert all(full_steps.most_prompt_tokens(n) == budget - n for n in range(min(max_num_seqs, budget) + 1))


def test_a_large_budget_keeps_graphs_of_its_smaller_steps() -> None:
    graphs = graphs_of(256, 8192)
    assert shape_for(graphs, 64, 2048, 4) == StepShape(64, 2048, 16)
    assert shape_for(graphs, 64, 2049, 4) is None
    assert shape_for(graphs, 64, 7679 - 64, 4) is None
    assert shape_for(graphs, 64, 7680 - 64, 4) == StepShape(64, 8128, 64)


@pytest.mark.parametrize(("max_num_seqs", "budget"), ROOMY + TIGHT + LARGE + WITHOUT)
def test_no_graph_has_more_decode_rows_than_the_budget_or_prompts_than_there_is_room_for(
    max_num_seqs: int, budget: int
) -> None:
    for shape in step_shapes(max_num_seqs, budget):
        assert shape.num_decode <= min(max_num_seqs, budget)
        assert shape.num_prefill <= budget
        assert shape.num_prompts <= MAX_GRAPH_PROMPTS
        # Of a result, pinned memory is kept for so many.
        assert shape.num_rows <= 2 * max_num_seqs + 32


@pytest.mark.parametrize(("max_num_seqs", "budget"), ROOMY + TIGHT + LARGE + WITHOUT)
def test_texts_that_nothing_is_generated_for_have_the_same_sizes_and_room_for_many(
    max_num_seqs: int, budget: int
) -> None:
    """32 texts of 64 tokens, which a search asks for at once, are one launch."""
    shapes = pooling_shapes(max_num_seqs, budget)
    others = [shape for shape in step_shapes(max_num_seqs, budget) if not shape.num_decode]
    assert [shape.num_prefill for shape in shapes] == [shape.num_prefill for shape in others]
    for shape, other in zip(shapes, others, strict=True):
        assert other.num_prompts <= shape.num_prompts
        assert shape.num_prompts >= min(max_num_seqs, shape.num_prefill // 16)
        # Rows whose states graphs leave behind; of a result, pinned memory is kept for so many.
        assert shape.num_rows <= max_num_seqs + min(MAX_GRAPH_PROMPTS, 32)
    if (max_num_seqs, budget) == (256, 2048):
        assert any(shape.num_prefill == 2048 and shape.num_prompts >= 32 for shape in shapes)


@pytest.mark.parametrize(("max_num_seqs", "budget"), LARGE)
def test_large_shapes_are_few(max_num_seqs: int, budget: int) -> None:
    """Each takes an eager step and a capture at the start."""
    large = [shape for shape in step_shapes(max_num_seqs, budget) if shape.is_large]
    assert all(shape.num_tokens == budget for shape in large)
    assert 1 <= len(large) <= 4 + min(max_num_seqs, 512) // 64 + max(max_num_seqs - 512, 0) // 128


@pytest.mark.parametrize(("max_num_seqs", "budget", "most_more"), [(256, 2048, 4), (512, 2048, 7), (128, 2048, 1)])
def test_full_steps_cost_few_more_graphs_than_other_steps(max_num_seqs: int, budget: int, most_more: int) -> None:
    """As many decode sizes as beside any other number of prompt tokens, and a few in between."""
    mixed = [shape for shape in step_shapes(max_num_seqs, budget) if shape.num_prefill]
    num_full = sum(shape.num_tokens == budget for shape in mixed)
    num_beside = sum(shape.num_prefill == 32 for shape in mixed)
    assert len({shape[:2] for shape in mixed}) == len(mixed), "the same step twice"
    assert num_full <= num_beside + most_more


def test_the_graph_with_the_fewest_tokens_is_found() -> None:
    graphs = graphs_of(256, 2048)
    shapes = graphs.shapes
    for plan in itertools.product((0, 1, 8, 33, 90, 200, 256), (1, 32, 33, 200, 513, 1024, 1025), (1, 5, 16)):
        fitting = [one for one in shapes if one.num_prefill and all(a <= b for a, b in zip(plan, one[:3], strict=True))]
        found = shape_for(graphs, *plan)
        assert (found is None) == (not fitting)
        assert found is None or found.num_tokens == min(one.num_tokens for one in fitting)
    for num_decode in range(1, 257):
        found = shape_for(graphs, num_decode, 0, 0)
        assert found == StepShape(min(size for size in decode_sizes(256) if size >= num_decode))


def test_no_graph_is_found_after_the_end() -> None:
    graphs = graphs_of(8, 512)
    graphs.clear()
    assert graphs.shapes == []
    assert graphs.find(4, 0, 0) is None
    assert graphs.find(4, 20, 1) is None
