"""Drives a model over a paged KV cache by hand: the smallest runner, with blocks handed out in shuffled order.

It builds what the engine's model runner builds, from nothing but lists, so that the model's tests need no engine.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.kv_cache.layout import layout_of
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.models.lora_checkpoint import read_adapter
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.models.sharding import shard_spec
from cb_backend.parallel.group import Group

CPU = torch.device("cpu")


class PagedModel:
    """A few slots, each with a block table that grows as its tokens arrive. `step` returns every token's logits."""

    def __init__(
        self,
        folder: Path,
        *,
        num_slots: int = 3,
        max_len: int = 256,
        block_size: int = 8,
        backend: str = "torch",
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        quantization: str | None = None,
        device: torch.device = CPU,
        max_adapters: int = 0,
        max_rank: int = 16,
        group: Group | None = None,
        spreads_experts: bool = False,
    ) -> None:
        self.config = read_model_config(folder)
        self.adapters: AdapterTable | None = None
        if max_adapters:
            self.adapters = AdapterTable(max_adapters=max_adapters, max_rank=max_rank, dtype=dtype, device=device)
        options: dict[str, Any] = {
            "has_kv_scales": kv_dtype is not None,
            "quantization": quantization,
            "max_model_len": max_len,
            "adapters": self.adapters,
            "group": group,
            "spreads_experts": spreads_experts,
        }
        self.ops = resolve_ops(backend)
        self.model = load_model(folder, self.config, ops=self.ops, dtype=dtype, device=device, **options)
        if self.adapters is not None:
            self.adapters.allocate()
        self.adapter_of_slot = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.device = device
        max_blocks = -(-max_len // block_size)
        num_blocks = num_slots * max_blocks + 1
        kv_dtype = kv_dtype or dtype
        self.storage = KVCacheStorage(
            layout_of(shard_spec(self.config, group.size if group else 1), block_size, kv_dtype.itemsize),
            num_blocks,
            kv_dtype,
            device,
        )
        # What nobody wrote must not reach an answer.
        self.storage.data[:, 1:] = torch.tensor(1e30 if kv_dtype == dtype else float("nan")).to(self.storage.data.dtype)
        self.block_size = block_size
        self.free_blocks = random.Random(7).sample(range(1, num_blocks), num_blocks - 1)
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        self.num_blocks = [0] * num_slots
        self.num_tokens = [0] * num_slots
        self.num_prompt_tokens = [0] * num_slots

    def start(self, slot: int, num_prompt_tokens: int, *, cached: tuple[int, int] = (0, 0)) -> None:
        """Give the slot to a new request; `cached` = (slot, number of tokens) whose full blocks it shares."""
        donor, num_cached = cached
        assert num_cached % self.block_size == 0
        shared = num_cached // self.block_size
        self.block_tables[slot, :shared] = self.block_tables[donor, :shared].clone()
        self.num_blocks[slot], self.num_tokens[slot] = shared, num_cached
        self.num_prompt_tokens[slot] = num_prompt_tokens

    @torch.inference_mode()
    def step(self, decode: list[tuple[int, int]], prefill: list[tuple[int, list[int]]]) -> Tensor:
        """Compute one token for each (slot, token) and a chunk for each (slot, tokens): logits [num_tokens, vocab]."""
        rows = [(slot, [token]) for slot, token in decode] + prefill
        token_ids, positions, prompt_lens, mapping = [], [], [], []
        for slot, tokens in rows:
            start = self.num_tokens[slot]
            self._grow(slot, start + len(tokens))
            for position in range(start, start + len(tokens)):
                block = int(self.block_tables[slot, position // self.block_size])
                mapping.append(block * self.block_size + position % self.block_size)
                positions.append(position)
                prompt_lens.append(self.num_prompt_tokens[slot])
            token_ids += tokens
        counts = [len(tokens) for _, tokens in prefill]
        starts = self._int32([sum(counts[:index]) for index in range(len(counts) + 1)])
        step = StepMetadata(
            ropes=self.model.ropes.rows(self._int32(positions), self._int32(prompt_lens)),
            slot_mapping=(self._int32(mapping),),
            block_tables=(self.block_tables,),
            num_decode_rows=len(decode),
            decode_slots=self._int32([slot for slot, _ in decode]),
            decode_seq_lens=self._int32([self.num_tokens[slot] for slot, _ in decode]),
            prefill_slots=self._int32([slot for slot, _ in prefill]),
            prefill_query_start_loc=starts,
            prefill_seq_lens=self._int32([self.num_tokens[slot] for slot, _ in prefill]),
            max_query_len=max(counts, default=0),
            adapters=self._adapter_plan([slot for slot, _ in decode], [slot for slot, _ in prefill], starts),
        )
        return self.model.compute_logits(self.model(self._int32(token_ids), step, self.storage.layers))

    def prefill(self, slot: int, tokens: list[int], chunk: int | None = None) -> Tensor:
        """The prompt in chunks: logits [len(tokens), vocab]."""
        chunk = chunk or len(tokens)
        return torch.cat([self.step([], [(slot, tokens[at : at + chunk])]) for at in range(0, len(tokens), chunk)])

    def load_adapter(self, slot: int, folder: Path) -> None:
        assert self.adapters is not None, "the model was made without adapters"
        whole = read_adapter(folder, self.config, self.adapters.whole).data
        self.adapters.load(slot, whole if self.adapters.whole is self.adapters else self.adapters.share_of(whole))

    def _adapter_plan(self, decode_slots: list[int], prompt_slots: list[int], starts: Tensor) -> AdapterPlan | None:
        """None where no row goes through one."""
        if self.adapters is None or bool((self.adapter_of_slot[decode_slots + prompt_slots] < 0).all()):
            return None
        slots, prompts = self._int32(decode_slots), self._int32(prompt_slots)
        return self.ops.plan_adapters(
            slots, len(decode_slots), prompts, starts, int(starts[-1]), self.adapter_of_slot, self.adapters.max_adapters
        )

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _grow(self, slot: int, num_tokens: int) -> None:
        while self.num_blocks[slot] * self.block_size < num_tokens:
            self.block_tables[slot, self.num_blocks[slot]] = self.free_blocks.pop()
            self.num_blocks[slot] += 1
        self.num_tokens[slot] = num_tokens
