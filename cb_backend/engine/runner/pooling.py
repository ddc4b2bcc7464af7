"""What pooling requests get instead of tokens: hidden states, pooled, and what a classifier or the head makes of them.

The states of a step's last tokens are there whether or not anybody asks, inside graphs too, so the rows that ask take
theirs after the step. A mean needs the states of every token: sums stay on the device from chunk to chunk, and such
steps are launched kernel by kernel. Where several ranks hold the model, all of them have the states, and rank 0 alone
reads them; but for the head, of which each has its rows. Knows hidden states and slots, not requests; nothing here
waits for the device before `result`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.step import HIDDEN_WANTED, JoinedRow, Pooled, StepPlan
from cb_backend.engine.runner.device_state import copy_to
from cb_backend.engine.runner.logprobs import to_host
from cb_backend.models.decoder import DecoderForCausalLM


class PoolingOfRank:
    """The slots of pooling requests, and what every rank does for them: the layers, and its rows of the head."""

    def __init__(self, model: DecoderForCausalLM, num_slots: int, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.is_used = False  # until the first pooling request joins, nothing else here is looked at
        self._rules: list[PoolingRules | None] = [None] * num_slots
        self._is_mean = np.zeros(num_slots, np.bool_)
        self._lengths = np.zeros(num_slots, np.int32)  # tokens of the prompts

    def join(self, rows: tuple[JoinedRow, ...]) -> None:
        for row in rows:
            rules = row.params.pooling
            if rules is None and not self.is_used:
                continue
            self.is_used = True
            self._rules[row.slot] = rules
            self._is_mean[row.slot] = rules is not None and rules.pooling == "mean"
            self._lengths[row.slot] = row.num_prompt_tokens

    def needs_all_states(self, plan: StepPlan) -> bool:
        """Whether the hidden states of all the step's tokens are wanted, and not only of the rows' last ones."""
        return self.is_used and bool(self._is_mean[plan.slots[plan.num_decode_rows :]].any())

    def share_head(self, plan: StepPlan, hidden: Tensor, first_prompt: int) -> None:
        """Of a rank that does not read: its part of the logits that rank 0 asks for in `PoolingOfStep.launch`, whose
        arguments these are."""
        if not self.is_used:
            return
        for rules, owners in self._ending(plan):
            if rules.readout == "head":
                self._logits(self._last_states(plan, owners, hidden, first_prompt))

    def _ending(self, plan: StepPlan) -> list[tuple[PoolingRules, NDArray[np.int64]]]:
        """The plan's rows whose prompts end, by what is read off them, in an order that all ranks find."""
        (rows,) = (plan.wants == HIDDEN_WANTED).nonzero()
        kinds: dict[PoolingRules, list[int]] = {}
        for row in rows.tolist():
            rules = self._rules[int(plan.slots[row])]
            assert rules is not None, "a row that wants a hidden state has rules of pooling"
            kinds.setdefault(rules, []).append(row)
        return [(rules, np.array(same, np.int64)) for rules, same in kinds.items()]

    def _last_states(self, plan: StepPlan, rows: NDArray[np.int64], hidden: Tensor, first_prompt: int) -> Tensor:
        """[num_rows_asked, hidden_size] in the model's dtype."""
        return hidden.index_select(0, copy_to(rows - plan.num_decode_rows + first_prompt, self._device))

    def _logits(self, states: Tensor) -> Tensor:
        """[num_rows_asked, hidden_size] -> [num_rows_asked, vocab_size], on rank 0 alone."""
        return self._model.compute_logits(states.to(self._model.dtype))


class PoolingOfStep(PoolingOfRank):
    """And the reading: the work of a step for the rows whose prompts end in it."""

    def __init__(self, model: DecoderForCausalLM, num_slots: int, device: torch.device) -> None:
        super().__init__(model, num_slots, device)
        self._sums: Tensor | None = None  # float32 [num_slots, hidden_size], made for the first mean

    def add(self, plan: StepPlan, hidden: Tensor) -> None:
        """Add a step's states, [num_tokens, hidden_size] in the plan's order, to the sums of the means."""
        if self._sums is None:
            shape = len(self._rules), hidden.shape[1]
            self._sums = torch.zeros(shape, dtype=torch.float32, device=self._device)
        ends = np.cumsum(plan.num_tokens)
        for row in range(plan.num_decode_rows, plan.num_rows):
            slot = int(plan.slots[row])
            if not self._is_mean[slot]:
                continue
            own = hidden[int(ends[row] - plan.num_tokens[row]) : int(ends[row])].sum(dim=0, dtype=torch.float32)
            if plan.first[row] == 0:  # a prompt that begins, or is computed anew
                self._sums[slot] = own
            else:
                self._sums[slot] += own

    def launch(self, plan: StepPlan, hidden: Tensor | None, first_prompt: int) -> PendingPooled | None:
        """Start what is to be done for the rows whose prompts end.

        hidden [num_rows, hidden_size]: of the rows' last tokens, prompts from `first_prompt` on; None: no prompts.
        """
        if not self.is_used or hidden is None:
            return None
        parts = []
        for rules, owners in self._ending(plan):
            states = self._pooled(rules, plan, owners, hidden, first_prompt)
            parts.append((owners, to_host(self._read(rules, states))))
        return PendingPooled(parts) if parts else None

    def _pooled(
        self, rules: PoolingRules, plan: StepPlan, rows: NDArray[np.int64], hidden: Tensor, first_prompt: int
    ) -> Tensor:
        """[num_rows_asked, hidden_size]: float32 means, or last states in the model's dtype."""
        if rules.pooling == "last":
            return self._last_states(plan, rows, hidden, first_prompt)
        assert self._sums is not None
        slots = plan.slots[rows].astype(np.int64)
        lengths = copy_to(self._lengths[slots].astype(np.float32), self._device)
        return self._sums.index_select(0, copy_to(slots, self._device)) / lengths[:, None]

    def _read(self, rules: PoolingRules, states: Tensor) -> Tensor:
        """float32 [num_rows_asked, size]"""
        model = self._model
        # What is called a model's hidden state is not divided yet by what its logits are.
        own = states if rules.readout == "head" else states.float() * model.spec.logits_divisor
        if rules.readout == "hidden":
            return own
        if rules.readout == "classifier":
            assert model.classifier is not None, "who asks for a classifier has been told if there is none"
            return model.classifier(own)
        ids = copy_to(np.array(rules.token_ids, np.int64), self._device)
        return self._logits(states).index_select(1, ids).float()


class PendingPooled:
    """Results on their way to the host; read them after the step's own result is there."""

    def __init__(self, parts: list[tuple[NDArray[np.int64], Tensor]]) -> None:
        self._parts = parts

    def result(self) -> tuple[tuple[Pooled, ...], NDArray[np.int64]]:
        """What was read off, and the plan's rows whose numbers are not finite."""
        pooled, broken = [], []
        for owners, values in self._parts:
            numbers = values.numpy()
            is_finite = np.isfinite(numbers).all(axis=1)
            broken.append(owners[~is_finite])
            pooled.append(Pooled(owners, numbers).given_to(owners, is_finite))
        return tuple(pooled), np.concatenate(broken)
