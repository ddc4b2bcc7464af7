"""The graphs that a GPU would have captured, which compute nothing: what tests of shapes need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cb_backend.engine.runner.step_graphs import StepGraphs
from cb_backend.engine.step_shapes import step_shapes


class NoGraph:
    """A `Replayable` that does nothing."""

    def replay(self) -> None:
        pass


def graphs_of(max_num_seqs: int, max_num_batched_tokens: int) -> StepGraphs:
    """All shapes of an engine with these arguments; of their buffers there is only the shape."""
    graphs = StepGraphs()
    for shape in step_shapes(max_num_seqs, max_num_batched_tokens):
        buffers: Any = SimpleNamespace(shape=shape)
        graphs.add(shape, NoGraph(), buffers)
    return graphs
