"""How a published tokenizer's folder is written, and compared with what transformers makes of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.detokenizer import IncrementalDetokenizer
from cb_backend.front_end.text.tokenizer import Tokenizer
from tests.front_end.conftest import byte_level_backend

Case = tuple[str, Callable[[Path], Path], Callable[[Path], None]]  # name, build, check

TEXTS = [
    "Hello world, stop!", " two  spaces\n\tab", "Grüße 中文 😀", "a<|im_end|>b</s> <|tool|>x", "<|im_start|>user\nok",
    "<extra> x  <image>", "[INST] x [/INST]",
]  # fmt: skip


class ChatPair(NamedTuple):
    """The same conversation as a client sends it and as transformers wants it for the right text."""

    sent: list[dict[str, Any]]
    theirs: list[dict[str, Any]]
    arguments: dict[str, Any] = {}  # noqa: RUF012 never changed


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chatml_byte_level() -> BackendTokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return backend


CHATML = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
PLAIN = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SYSTEM = {"role": "system", "content": "be kind"}
_TURNS = [SYSTEM, user("a"), {"role": "assistant", "content": "b"}, user("c")]
SAME = [ChatPair([user("Hello")], [user("Hello")]), ChatPair(_TURNS, _TURNS)]


def case(
    name: str,
    backend: Callable[[], BackendTokenizer],
    files: dict[str, Any],
    chats: list[ChatPair] = SAME,
    reference: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast,
) -> Case:
    """`files`: path in the folder -> text, or an object to write as JSON."""

    def build(folder: Path) -> Path:
        backend().save(str(folder / "tokenizer.json"))
        for path, content in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    def check(folder: Path) -> None:
        theirs, ours = reference.from_pretrained(str(folder)), Tokenizer(folder)
        assert ours.named_tokens == theirs.special_tokens_map
        check_texts(ours, theirs)
        if theirs.chat_template is not None:
            check_chats(ours, theirs, chats)

    return name, build, check


def check_texts(ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    draw = random.Random(4)
    for length in (1, 2, 5, 20, 100):
        ids = [draw.randrange(len(theirs)) for _ in range(length)]
        ids += theirs(draw.choice(TEXTS)).input_ids
        for skips_special in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skips_special)
            assert streamed(ours, ids, skips_special, draw) == expected, ids


def streamed(tokenizer: Tokenizer, ids: list[int], skips_special: bool, draw: random.Random) -> str:
    stream, parts, at = IncrementalDetokenizer(tokenizer, skips_special=skips_special), [], 0
    while at < len(ids):
        length = draw.choice([1, 1, 2, 7])
        parts.append(stream.push(ids[at : at + length]))
        at += length
    return "".join([*parts, stream.flush()])


def check_chats(ours: Tokenizer, theirs: PreTrainedTokenizerFast, chats: list[ChatPair]) -> None:
    chat = Chat(ours)
    try:
        for sent, wanted, arguments in chats:
            options = {"add_generation_prompt": True, **arguments}
            expected = theirs.apply_chat_template(wanted, tokenize=True, return_dict=False, **options)
            assert chat.encode(json.dumps({"messages": sent, **arguments})) == list(expected), sent
    finally:
        chat.close()
