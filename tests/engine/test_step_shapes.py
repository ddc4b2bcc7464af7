"""Which steps have a graph: sizes and number of shapes."""

from __future__ import annotations

import itertools

from cb_backend.engine.step_shapes import decode_sizes, step_shapes


def test_every_batch_size_has_a_shape_that_holds_it() -> None:
    sizes = decode_sizes(300)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 300
    assert max(later - size for size, later in itertools.pairwise(sizes)) <= 16
    for shape in step_shapes(300, 1000):
        assert shape.num_decode <= 300
        assert shape.num_prefill <= 1000
