"""What ranks tell each other, over gloo: sums, tokens, logits, one value for all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cb_backend.layers.layer_spec import NormSpec
from cb_backend.layers.norm import Junction, RMSNorm
from cb_backend.layers.ops import resolve_ops
from cb_backend.parallel import torch_group
from cb_backend.parallel.group import Agreed, Group, NoGroup
from cb_backend.parallel.torch_group import TorchGroup, join_group
from tests.parallel.ranks import on_ranks

CPU = torch.device("cpu")


def junction(hidden_size: int, scale: float = 1.0) -> Junction:
    norm = RMSNorm("n", NormSpec(eps=1e-5), hidden_size, dtype=torch.float32, device=CPU)
    norm.weight.copy_(torch.linspace(0.5, 1.5, hidden_size))
    return Junction(resolve_ops("torch"), NormSpec(eps=1e-5), leaving=norm, joining=None, scale=scale)


def parts_of(rank: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("num_parts", [None, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_partial_sums_become_one_stream(size: int, num_parts: int | None) -> None:
    """The same bits on every rank; of whole numbers, which no order of additions rounds, those of the whole sum."""
    shape = (5, 16) if num_parts is None else (5, num_parts, 16)
    residual, join = parts_of(99, 5, 16), junction(16, scale=0.5)
    for change in (lambda part: part, lambda part: (8 * part).round()):
        found = on_ranks(
            size, lambda group, of=change: group.reduce_add_norm(of(parts_of(group.rank, *shape)), residual, join)
        )
        total = sum(change(parts_of(rank, *shape)) for rank in range(size))
        wanted = join.add(total if num_parts is None else total.sum(1), residual)
        for normed, stream in found:
            assert torch.equal(stream, found[0][1])
            assert torch.equal(normed, found[0][0])
        torch.testing.assert_close(found[0], wanted)
    assert torch.equal(found[0][1], wanted[1])


@pytest.mark.parametrize("shape", [(5, 16), (5, 1, 16), (5, 3, 16)])
def test_an_addition_gets_the_parts_of_a_row_beside_one_another(shape: tuple[int, ...]) -> None:
    """As its kernel reads them."""

    class Seen:
        weight, eps, options = None, 0.0, {}

        def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            return x, residual

    for x, _ in on_ranks(
        2, lambda group: group.reduce_add_norm(parts_of(group.rank, *shape), torch.zeros(5, 16), Seen())
    ):
        assert x.is_contiguous()
        assert torch.equal(x.flatten(1), torch.cat([parts_of(rank, *shape).flatten(1) for rank in (0, 1)], dim=1))


def test_nothing_is_added_up_without_tokens() -> None:
    found = on_ranks(2, lambda group: group.reduce_add_norm(torch.empty(0, 16), torch.empty(0, 16), junction(16)))
    assert [tuple(stream.shape) for _, stream in found] == [(0, 16), (0, 16)]


def test_what_rank_0_chose_every_rank_has() -> None:
    """In the slots that are named; what other slots hold stays."""

    def work(group: TorchGroup) -> tuple[list[int], list[int]]:
        tokens = torch.arange(6, dtype=torch.int32) + 100 * group.rank
        lengths = tokens + 50
        group.share_tokens(tokens, lengths, torch.tensor([4, 1], dtype=torch.int32))
        group.share_tokens(tokens, lengths, torch.tensor([], dtype=torch.int32))
        return tokens.tolist(), lengths.tolist()

    assert on_ranks(3, work) == [
        ([0, 1, 2, 3, 4, 5], [50, 51, 52, 53, 54, 55]),
        ([100, 1, 102, 103, 4, 105], [150, 51, 152, 153, 54, 155]),
        ([200, 1, 202, 203, 4, 205], [250, 51, 252, 253, 54, 255]),
    ]


@pytest.mark.parametrize("vocab_size", [12, 10, 7])
def test_logits_lie_side_by_side_on_rank_0(vocab_size: int) -> None:
    """What the vocabulary is padded with is left out."""

    def work(group: TorchGroup) -> Tensor | None:
        part = torch.arange(8.0).view(2, 4) + 10 * group.rank
        out = torch.full((2, vocab_size), float("nan")) if group.rank == 0 else None
        group.gather_logits(part, out)
        return out

    found, *others = on_ranks(3, work)
    assert others == [None, None]
    assert found is not None
    whole = [[0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23], [4, 5, 6, 7, 14, 15, 16, 17, 24, 25, 26, 27]]
    assert found.tolist() == [row[:vocab_size] for row in whole]


def test_ranks_agree_on_one_value() -> None:
    values = [7, 3, 5]
    for how, wanted in ((Agreed.LEAST, 3), (Agreed.OF_RANK_0, 7)):
        assert on_ranks(3, lambda group, how=how: group.agree(values[group.rank], how)) == [wanted] * 3


def test_rows_are_summed_in_float32() -> None:
    found = on_ranks(3, lambda group: group.sum_rows(torch.full((2, 1), 2.0**-9 if group.rank else 1.0).bfloat16()))
    assert all(each.dtype == torch.float32 and each.tolist() == [[1 + 2.0**-8]] * 2 for each in found)


def test_one_device_asks_nobody() -> None:
    group: Group = NoGroup()
    x, residual = parts_of(0, 3, 16), parts_of(1, 3, 16)
    for found, wanted in zip(
        group.reduce_add_norm(x, residual, junction(16)), junction(16).add(x, residual), strict=True
    ):
        assert torch.equal(found, wanted)
    out = torch.empty(2, 3)
    group.gather_logits(torch.arange(8.0).view(2, 4), out)
    assert out.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert group.agree(5, Agreed.LEAST) == 5


def test_a_group_of_one_meets_by_a_file(tmp_path: Path) -> None:
    """Others of the same process may do so in folders of theirs."""
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
    groups = [join_group(tmp_path / "one", 0, 1, CPU), join_group(tmp_path / "other", 0, 1, CPU)]
    for value, group in enumerate(groups):
        assert (group.rank, group.size) == (0, 1)
        assert group.agree(value, Agreed.OF_RANK_0) == value
    assert (tmp_path / "one" / "ranks").exists()


class Stuck:
    """Stands for NCCL's processes while a graph has its sums: `abort` returns when the graph has gone."""

    def __init__(self) -> None:
        self.graph_has_gone = threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.graph_has_gone.wait()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_group_that_a_graph_still_needs_holds_nobody_up(
    is_stuck: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    destroyed: list[str] = []
    if is_stuck:
        monkeypatch.setattr(torch_group, "LEAVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append("destroyed"))
    processes: Any = Stuck()
    group = TorchGroup(processes, torch.device("cpu"), hosts=cast("dist.ProcessGroup", object()))
    if not is_stuck:
        processes.graph_has_gone.set()
    group.leave()
    processes.graph_has_gone.set()
    assert destroyed == ([] if is_stuck else ["destroyed"])
    assert ("has not let go" in caplog.text) is is_stuck
