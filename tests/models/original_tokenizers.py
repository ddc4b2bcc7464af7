"""`tokenizer.json` as models' own repositories have it, over the tokens of the tiny GGUF files."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.models.gguf_files import BYTE_MERGES, BYTE_TOKENS, PIECE_SCORES, PIECES


def llama2_original(adds_prefix: bool = True) -> Tokenizer:
    """`tokenizer.json` as Llama 2's is published, over the same pieces; merges by the rank of what they give."""
    ids = {piece: i for i, piece in enumerate(PIECES)}
    pairs = sorted(
        ((PIECE_SCORES[ids[piece]], piece[:cut], piece[cut:])
         for piece in PIECES[4:] for cut in range(1, len(piece)) if piece[:cut] in ids and piece[cut:] in ids),
        reverse=True,
    )  # fmt: skip
    merges = [(left, right) for _, left, right in pairs]
    original = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if adds_prefix else []
    original.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_prefix else []
    original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    original.add_special_tokens([AddedToken(text, normalized=False) for text in PIECES[:4]])
    original.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return original


def gpt2_original(pre_tokenizer: pre_tokenizers.PreTokenizer, **options: Any) -> Tokenizer:
    ids = {token: i for i, token in enumerate(BYTE_TOKENS)}
    original = Tokenizer(models.BPE(ids, [tuple(merge.split()) for merge in BYTE_MERGES], **options))
    original.pre_tokenizer = pre_tokenizer
    original.decoder = decoders.ByteLevel()
    original.add_special_tokens(BYTE_TOKENS[:5])
    return original
