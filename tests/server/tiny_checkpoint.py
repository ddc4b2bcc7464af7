"""A checkpoint small enough for a server that starts in seconds: two layers, random weights, a byte-level tokenizer.

The weights are drawn wide, so that greedy choices are far from ties; the answers are nonsense, and always the same.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
VOCAB_SIZE = 384
MAX_MODEL_LEN = 16384

_CORPUS = [
    "the quick brown fox jumps over the lazy dog while seven wizards make toxic brew for the evil queen",
    "Grüße aus Köln, café, naïve, 東京は夜の七時, Привет мир, 🙂🙃🚀",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
]


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE: the 256 bytes, so that tokens can end inside a character, and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=CHAT_TEMPLATE).save_pretrained(
        folder
    )


def write_tiny_checkpoint(folder: Path) -> Path:
    """A Llama checkpoint with its tokenizer, as transformers saves it."""
    write_tokenizer(folder)
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


class Reference:
    """What transformers answers, greedily, for the same checkpoint: the outside opinion."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def num_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text).ids)

    @torch.inference_mode()
    def greedy_text(self, prompt: str, max_tokens: int) -> str:
        ids = torch.tensor([self.tokenizer.encode(prompt).ids])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return self.tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
