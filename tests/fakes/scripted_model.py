"""S on a real engine: the real runner's sampler, rules and log-probabilities over logits that the prompt dictates.

A prompt is JSON, `script` writes it: {"say": [step, ...], "then": token}. A step is a token (its text as one token, or
its id), an object {token: logit} of several, or null for a row of NaN. What is not named has logit 0, a bare token 30.
After the last step comes `then`, for ever; without it the first end of sequence. A prompt that is no script is
answered with "x".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import MaskSource, StepPlan
from cb_backend.engine.runner.pending_step import PendingStep
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.layers.ops import resolve_ops
from cb_backend.parallel.group import NoGroup
from tests.fakes.counting_runner import byte_characters
from tests.fakes.storage import empty_storage

WORDS = ["DEF", "HI", " stop", "a b", "c!d", "London", " London", "New", " York", " Delhi", "\ufffd"]
SPECIAL = ["<s>", "</s>", "<|end|>", "<pad>"]
BOS, EOS, SECOND_EOS, PAD = SPECIAL
NUM_PADDED_IDS = 12  # ids of the model that the tokenizer does not know
FAVOURITE = 30.0

Step = int | str | dict[int | str, float] | None


def script(*say: Step, then: int | str = EOS, pad: str = "") -> str:
    """A prompt. `pad` makes it longer."""
    return json.dumps({"say": say, "then": then, **({"pad": pad} if pad else {})}, ensure_ascii=False)


def spell(text: str) -> list[int]:
    """Text as steps: the id of each of its bytes."""
    return list(text.encode())


def write_scripted_tokenizer(folder: Path, chat_template: str = "") -> None:
    """Byte-level: ids 0 to 255 are the bytes, then words that are one token wherever they are met, then special ones.

    A BOS is added in front of every prompt.
    """
    table = byte_characters()
    vocab = {table[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in sorted(WORDS, key=lambda word: word.startswith(" ")):
        parts = [table[byte] for byte in word.encode()]
        inner = "".join(parts[1:])
        pairs = [("".join(parts[:n]), parts[n]) for n in range(1, len(parts))]
        if inner in vocab:  # " London" is a space before "London", whose merges come first
            pairs = [(parts[0], inner)]
        for left, right in pairs:
            vocab.setdefault(left + right, len(vocab))
            merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Vocabulary:
    """Token texts to ids."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._table = byte_characters()
        self.size = self.tokenizer.get_vocab_size() + NUM_PADDED_IDS

    def id(self, token: int | str) -> int:
        token_id = token if isinstance(token, int) else self.tokenizer.token_to_id(self._spelled(token))
        if token_id is None:
            token_id = int(token)  # JSON's keys are strings
        return token_id % self.size

    def _spelled(self, token: str) -> str:
        return token if token in SPECIAL else "".join(self._table[byte] for byte in token.encode())


class _Script:
    """The logits of each step of one request."""

    def __init__(self, prompt_ids: NDArray[np.int32], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        try:
            text = vocabulary.tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
            parsed = json.loads(text.removeprefix(BOS))
        except ValueError:
            parsed = None
        scripted: dict[str, Any] = parsed if isinstance(parsed, dict) else {"then": "x"}
        self._say: list[Any] = scripted.get("say", [])
        self._then = scripted.get("then", EOS)

    def logits(self, index: int) -> Tensor:
        step = self._say[index] if index < len(self._say) else self._then
        if step is None:
            return torch.full((self._vocabulary.size,), float("nan"))
        logits = torch.zeros(self._vocabulary.size)
        for token, logit in (step if isinstance(step, dict) else {step: FAVOURITE}).items():
            logits[self._vocabulary.id(token)] = logit
        return logits


class ScriptedModelRunner(SlotRunner):
    """The runner itself, with a model that looks its logits up by slot and position."""

    def __init__(self, vocabulary: Vocabulary, num_blocks: int, config: EngineConfig, max_model_len: int) -> None:
        storage = empty_storage(num_blocks + 1, block_size=config.block_size)
        model: Any = _ScriptedModel(self, vocabulary.size)
        super().__init__(model, resolve_ops("torch"), storage, config.max_num_seqs, max_model_len)
        self.vocabulary = vocabulary
        self.scripts: dict[int, _Script] = {}  # by slot

    def execute(self, plan: StepPlan, masks: MaskSource) -> PendingStep:
        for row in plan.joined:
            self.scripts[row.slot] = _Script(row.token_ids[: row.num_prompt_tokens], self.vocabulary)
        return super().execute(plan, masks)

    def _compute_hidden(self, buffers: StepBuffers) -> Tensor:
        """Instead of hidden states, (slot, position) of each token: no more is needed. float32 [num_tokens, 2]."""
        shape, rows, segments = buffers.shape, buffers.rows, buffers.segments
        self.ops.prepare_rows(buffers.slots, shape.num_decode, self.state, self.block_size, rows)
        slots = buffers.slots[: shape.num_decode]
        if shape.num_prefill:
            prompts = segments["prompt_slots"].repeat_interleave(segments["query_start_loc"].diff())
            slots = torch.cat((slots, prompts))
        return torch.stack((slots, rows.positions), dim=1).float()


class _ScriptedModel:
    dtype = torch.float32
    group = NoGroup()
    adapters = None

    def __init__(self, runner: ScriptedModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self.spec = type("Spec", (), {"vocab_size": vocab_size, "hidden_size": 2, "generates": True})
        self.ropes = _NoRopes()

    def compute_logits(self, places: Tensor, out: Tensor | None = None) -> Tensor:
        """Of each token, whatever `out` is. What comes after a token of the prompt but its last is in no script."""
        num_prompt_tokens = self._runner.batch.num_prompt_tokens
        rows = [
            self._runner.scripts[slot].logits(max(0, position + 1 - int(num_prompt_tokens[slot])))
            for slot, position in places.long().tolist()
        ]
        return torch.stack(rows)


class _NoRopes:
    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""


def create_runner(config: EngineConfig) -> tuple[ScriptedModelRunner, ModelInfo]:
    """A factory for `worker_cls`; `model` names a folder of `write_scripted_tokenizer`."""
    vocabulary = Vocabulary(Path(config.model))
    max_model_len = config.max_model_len or 4096
    num_blocks = config.num_gpu_blocks_override or 1024
    info = ModelInfo(
        model=config.model,
        tokenizer_dir=config.model,
        vocab_size=vocabulary.size,
        max_model_len=max_model_len,
        eos_token_ids=(vocabulary.id(EOS), vocabulary.id(SECOND_EOS)),
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        dtype="float32",
        device="cpu",
    )
    return ScriptedModelRunner(vocabulary, num_blocks, config, max_model_len), info
