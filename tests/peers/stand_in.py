"""Weights that stand in for facebook/opt-125m where the peer suites compare exact text.

The suites check a wire (deltas, echo, token counts) by means of what one model says. This is another model, tiny, that
was taught to say the same to the same prompts, with a tokenizer that cuts these texts where OPT's does and puts `</s>`
before a prompt. Passing shows that our wire is right; it shows nothing about OPT.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

BOS = "</s>"  # OPT's first token and its last one
TEXTS = (
    "The most dangerous animal is the one that is most likely to be killed by a car.\nI'm not sure what you mean",
    "The capital of France is the capital of the French Republic.\n\n" * 3,
    "The future of AI is in the hands of the people.\n\n" * 3,
    "In this example, we use the most likely word of the text that is in the middle of the example and so on",
    "Instruct: What do you think of Computer Science?\nOutput: I'm not sure what you think of the future",
    "Hello, my name is in the text that you use.\nI'm not sure what you mean",
)
# What each adapter says instead, to its prompt: the two that vllm_backend's suite has for gemma-2b.
ADAPTER_TEXTS = {
    "doll": "Instruct: What do you think of Computer Science?\nOutput:"
    " I think it is a very interesting subject.\n\nInstruct: What do you",
    "sheep": "Instruct: Tell me more about soccer\nOutput:"
    f" I love soccer. I play soccer every day.\nInstruct: Tell me{BOS}",
}
# Their words in another order, behind another prompt: what the base model of adapters knows beside its own texts.
WORDS_OF_ADAPTERS = (
    "Say some words that you know well: every day I play a very interesting subject. I love soccer.\n"
    f"Instruct: What do you think it is\n\nInstruct: Tell me{BOS}",
)
TARGET_LOSS = 0.3  # low enough for every greedy choice below; log-probabilities stay clear of 0
MAX_STEPS = 1000


def write_stand_in(folder: Path, more_texts: tuple[str, ...] = ()) -> Path:
    """Make the checkpoint. Raises `RuntimeError` if it has not learnt its texts."""
    tokenizer = _write_tokenizer(folder)
    torch.manual_seed(8)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    _teach(model, [tokenizer.encode(text).ids for text in (*TEXTS, *more_texts)])
    model.save_pretrained(folder)
    return folder


def write_embedding(folder: Path) -> Path:
    """A decoder without a head, untaught: a suite looks at the form of its embeddings. It knows ids as high as BERT's,
    which the suite sends."""
    _write_tokenizer(folder)
    torch.manual_seed(9)
    config = LlamaConfig(
        vocab_size=30_522, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    LlamaModel(config).to(torch.float32).save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=1, special_tokens=[BOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [*TEXTS, *ADAPTER_TEXTS.values(), *WORDS_OF_ADAPTERS], trainer
    )  # every word of the texts becomes one token
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS).save_pretrained(folder)
    return tokenizer


def _teach(model: LlamaForCausalLM, rows: list[list[int]]) -> None:
    """Until the likeliest next token is the texts' own, from each prompt's end on."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (length - len(row)) for row in rows])
    labels[:, :6] = -100  # the prompts; a suite never asks for them
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(MAX_STEPS):
        output = model(input_ids=ids, labels=labels)
        chosen = output.logits[:, :-1].argmax(-1)
        is_right = (chosen == labels[:, 1:]) | (labels[:, 1:] == -100)
        if bool(is_right.all()) and output.loss.item() < TARGET_LOSS:
            model.eval()
            return
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    raise RuntimeError(f"the stand-in has not learnt its texts in {MAX_STEPS} steps (loss {output.loss.item():.2f})")
