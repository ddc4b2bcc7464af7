"""Sinks: a score of each head's own that takes part in the softmax and brings no value.

The attention kernels add it where a row's sums are complete: once, after all of its keys.
"""

from __future__ import annotations

from cb_backend.kernels.launch import jit, tl


@jit()
def with_sink(acc, largest, denominator, sink_ptr, is_head):
    """(acc, denominator) of a softmax in powers of two whose largest score so far was `largest`, one a row."""
    sink = tl.load(sink_ptr, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
    new_largest = tl.maximum(largest, sink)
    correction = tl.exp2(largest - new_largest)
    return acc * correction[:, None], denominator * correction + tl.exp2(sink - new_largest)
