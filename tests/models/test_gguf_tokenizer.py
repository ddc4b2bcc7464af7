"""The tokenizer, special tokens and templates of GGUF files are the file's own, as every reader of ours sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.engine.grammar.grammar_compiler import GrammarCompiler
from cb_backend.front_end.text.tokenizer import Tokenizer as FrontEndTokenizer
from cb_backend.models.checkpoint import resolve_checkpoint, resolve_tokenizer
from cb_backend.models.registry import read_model_config
from cb_backend.support.token_pieces import DecoderKind
from tests.models.gguf_checks import assert_refused
from tests.models.gguf_files import (
    BYTE_MERGES,
    BYTE_TOKENS,
    CONTROL,
    NORMAL,
    PIECE_SCORES,
    PIECES,
    USER_DEFINED,
    byte_level,
    sentencepiece,
    tiny_gguf,
)
from tests.models.original_tokenizers import gpt2_original, llama2_original

pytestmark = pytest.mark.usefixtures("cache")

TEXTS = ["abcab the end", " abc  ab", "a<s>b</s>\nx", "the THE 1234 don't", "é\n\n\n", "", "x" * 40]


def write(tmp_path: Path, metadata: dict[str, Any], name: str = "llama-gqa") -> Path:
    _, file = tiny_gguf(name, tmp_path / "source")
    file.metadata |= metadata
    (tmp_path / "file").mkdir(exist_ok=True)
    return file.write(tmp_path / "file" / "tiny.gguf")


def read(tmp_path: Path, metadata: dict[str, Any], name: str = "llama-gqa") -> FrontEndTokenizer:
    return FrontEndTokenizer(resolve_tokenizer(None, resolve_checkpoint(str(write(tmp_path, metadata, name)))))


def assert_same_ids(tokenizer: FrontEndTokenizer, original: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer._backend.encode(text).ids == original.encode(text).ids, text
        ids = original.encode(text, add_special_tokens=False).ids
        assert tokenizer._backend.decode(ids) == original.decode(ids), text


@pytest.mark.parametrize("adds_prefix", [True, False])
def test_sentencepiece_cuts_as_the_original(adds_prefix: bool, tmp_path: Path) -> None:
    says = {} if adds_prefix else {"add_space_prefix": False}
    tokenizer = read(tmp_path, sentencepiece(**says))
    assert tokenizer.pieces.kind is DecoderKind.FALLBACK
    assert_same_ids(tokenizer, llama2_original(adds_prefix))


def test_byte_level_cuts_as_the_original_smollm(tmp_path: Path) -> None:
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert_same_ids(read(tmp_path, byte_level(pre="smollm")), gpt2_original(digits))


def test_byte_level_cuts_as_the_original_llama3(tmp_path: Path) -> None:
    """A word that is a token is that token, BOS is added unless the file says no, and digits go by three."""
    tokens = [*BYTE_TOKENS[5:95], "<pad>", "<s>", "</s>", "ab", "Ġt", "123", "he"]  # no merge gives the last three
    metadata = byte_level(pre="llama-bpe", tokens=tokens, token_type=[NORMAL] * 97, merges=["a b"], bos_token_id=91)
    tokenizer = read(tmp_path, metadata)
    assert tokenizer.encode("123456") == [91, tokens.index("123"), *map(tokens.index, "456")]
    assert tokenizer.encode("he t")[-2:] == [tokens.index("he"), tokens.index("Ġt")]
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert read(tmp_path, metadata).encode("a") == [tokens.index("a")]


@pytest.mark.parametrize("pre", ["qwen2", None])
def test_byte_level_cuts_as_the_original_qwen2(pre: str | None, tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({token: i for i, token in enumerate(BYTE_TOKENS)}))
    merges.write_text("#version: 0.2\n" + "\n".join(BYTE_MERGES) + "\n")
    original = Qwen2Tokenizer.from_pretrained(tmp_path).backend_tokenizer
    original.add_special_tokens(BYTE_TOKENS[:5])
    tokenizer = read(tmp_path, byte_level(pre=pre), "qwen2-bias")
    assert_same_ids(tokenizer, original)


@pytest.mark.parametrize(
    "metadata", [byte_level(), sentencepiece(), byte_level(add_eos_token=True, add_bos_token=True)]
)
def test_transformers_reads_the_same(metadata: dict[str, Any], tmp_path: Path) -> None:
    folder = resolve_checkpoint(str(write(tmp_path, metadata)))
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = FrontEndTokenizer(folder)
    for text in TEXTS:
        assert theirs(text).input_ids == ours._backend.encode(text).ids
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("bos", "eos"), [(6, 0), (0, 6), (3, 3)]
)  # ids of control tokens and of words; one token for both
@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_r20t_each_special_token_is_its_own(kind: Any, bos: int, eos: int, tmp_path: Path) -> None:
    metadata = kind(bos_token_id=bos, eos_token_id=eos)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = read(tmp_path, metadata)
    assert tokenizer.named_tokens["bos_token"] == tokens[bos]
    assert tokenizer.named_tokens["eos_token"] == tokens[eos]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, (eos,))


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        (byte_level(), "llama-gqa"),  # says nothing of add_space_prefix
        (byte_level(add_space_prefix=False), "llama-gqa"),
        (byte_level(pre="llama-bpe"), "mistral-full"),
        (byte_level(pre="qwen2"), "qwen2-bias"),
        (byte_level(pre="qwen2"), "qwen3"),
        (sentencepiece(), "llama-gqa"),
        (sentencepiece(add_space_prefix=False), "llama-gqa"),
    ],
)
def test_r20u_structured_output_works(metadata: dict[str, Any], name: str, tmp_path: Path) -> None:
    folder = resolve_checkpoint(str(write(tmp_path, metadata, name)))
    kind = FrontEndTokenizer(folder).pieces.kind
    assert kind is (DecoderKind.FALLBACK if metadata["tokenizer.ggml.model"] == "llama" else DecoderKind.BYTES)
    compiler = GrammarCompiler(str(folder), 97, read_model_config(folder).eos_token_ids)
    guide = compiler.compile(StructuredOutput(kind="regex", text="abc")).result().new_guide()
    guide.consume(metadata["tokenizer.ggml.tokens"].index("abc"))
    assert guide.is_complete


def template(name: str = "") -> dict[str, Any]:
    return {f"tokenizer.chat_template{name}": f"template{name} of the file"}


def test_r20r_a_tokenizer_beside_the_file_and_the_template_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level() | template())
    without = resolve_checkpoint(str(path))
    original = json.loads((without / "tokenizer.json").read_text())
    original["normalizer"] = {"type": "Lowercase"}  # what a file cannot say
    (path.parent / "tokenizer.json").write_text(json.dumps(original))
    (path.parent / "tokenizer_config.json").write_text('{"chat_template": "another", "eos_token": "<s>", "x": 1}')
    folder = resolve_checkpoint(str(path))
    assert folder != without
    tokenizer = FrontEndTokenizer(resolve_tokenizer(None, folder))
    assert tokenizer.chat_templates == {"default": "template of the file"}
    assert tokenizer.named_tokens["eos_token"] == "</s>"
    assert tokenizer.encode("ABC") == [BYTE_TOKENS.index("abc")]
    (path.parent / "tokenizer.json").unlink()
    assert resolve_checkpoint(str(path)) == without


def test_r20r_a_template_beside_the_file_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level() | template())
    assert FrontEndTokenizer(resolve_checkpoint(str(path))).chat_templates == {"default": "template of the file"}
    (path.parent / "chat_template.jinja").write_text("mended")
    assert FrontEndTokenizer(resolve_checkpoint(str(path))).chat_templates == {"default": "mended"}


def test_r20r_a_template_that_only_the_tokenizer_beside_has(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level())
    (path.parent / "tokenizer.json").write_bytes((resolve_checkpoint(str(path)) / "tokenizer.json").read_bytes())
    (path.parent / "tokenizer_config.json").write_text('{"chat_template": "beside"}')
    assert FrontEndTokenizer(resolve_checkpoint(str(path))).chat_templates == {"default": "beside"}


def test_r20r_a_tokenizer_of_another_model_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, byte_level() | template())
    gpt2_original(pre_tokenizers.ByteLevel()).save(str(path.parent / "tokenizer.json"))
    other = json.loads(
        (path.parent / "tokenizer.json").read_text().replace('"abc"', '"xyz"').replace('"ab c"', '"a c"')
    )
    other["model"]["merges"] = []
    (path.parent / "tokenizer.json").write_text(json.dumps(other))
    tokenizer = FrontEndTokenizer(resolve_checkpoint(str(path)))
    assert tokenizer.encode("abc") == [BYTE_TOKENS.index("abc")]
    assert "tokenizer.json beside tiny.gguf is not its own (id 96 is 'xyz', in the file 'abc')" in caplog.text


def test_r20r_named_templates_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level() | template() | template(".tool_use"))
    config = json.loads((resolve_checkpoint(str(path)) / "tokenizer_config.json").read_text())
    assert config["chat_template"] == [
        {"name": "default", "template": "template of the file"},
        {"name": "tool_use", "template": "template.tool_use of the file"},
    ]


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
@pytest.mark.parametrize("bos", [None, 0xFFFFFFFF])
def test_r20s_no_bos_id_works(kind: Any, bos: int | None, tmp_path: Path) -> None:
    metadata = kind(bos_token_id=bos, add_bos_token=True)
    tokenizer = read(tmp_path, metadata)
    assert tokenizer.bos_token is None
    whole = "▁abc" if kind is sentencepiece else "abc"
    assert tokenizer.encode("abc") == [metadata["tokenizer.ggml.tokens"].index(whole)]


def test_r20s_no_ids_and_no_types_at_all_work(tmp_path: Path) -> None:
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id", "token_type"))
    for metadata in (byte_level(**none), sentencepiece(**none)):
        tokenizer = read(tmp_path, metadata)
        assert tokenizer.named_tokens == {}
        assert tokenizer.encode("ab")


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_flags_of_bos_and_eos(kind: Any, bos: bool, eos: bool, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, kind(add_bos_token=bos, add_eos_token=eos))
    assert tokenizer._backend.encode("").ids == [1] * bos + [2] * eos
    assert tokenizer._backend.encode("ab", "ab").ids.count(1) == 2 * bos


def test_tokens_of_users_are_found_in_a_text_but_shown(tmp_path: Path) -> None:
    """And the padding of the embedding, which the format lists as tokens, is nothing that a text can spell."""
    tokens = [*BYTE_TOKENS[:93], "ab", "<tool_call>", "[PAD95]", "[PAD96]"]
    types = [CONTROL] * 5 + [NORMAL] * 89 + [USER_DEFINED, USER_DEFINED, 5]
    tokenizer = read(tmp_path, byte_level(tokens=tokens, token_type=types, merges=["a b"]))
    assert tokenizer.encode("a<tool_call>") == [tokens.index("a"), 94]
    assert tokenizer.decode([94]) == "<tool_call>"
    assert 95 not in tokenizer.encode("[PAD95]")
    assert tokenizer.vocab_size == 95


def test_control_tokens_do_not_come_of_plain_text(tmp_path: Path) -> None:
    """Pieces "<" and "/s>" would merge into "</s>" where everything of the list is merged."""
    tokens = [*PIECES[:92], "<", "/", "s>", "/s>", ">"]
    scores = [*PIECE_SCORES[:92], -1.0, -2.0, -3.0, -4.0, -5.0]
    tokenizer = read(tmp_path, sentencepiece(tokens=tokens, scores=scores))
    assert 2 not in tokenizer.encode_characters("</s>")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (byte_level(pre="superbpe"), "tokenizer.ggml.pre is 'superbpe'; known: command-r"),
        (byte_level(model="t5"), "tokenizer.ggml.model is 't5'; those that can be rebuilt are 'gpt2'"),
        (byte_level(tokens=None, token_type=None, model="none"), "it holds no tokenizer"),
        (byte_level(merges=["a b", "b abc"]), "tokenizer.ggml.merges do not fit its tokens"),
        (byte_level(tokens=[*BYTE_TOKENS[:4], "!", *BYTE_TOKENS[5:]]), "its tokens cannot be rebuilt"),
        (sentencepiece(scores=None), "tokenizer.ggml.scores is missing"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_said_by_whoever_asks_for_it(
    metadata: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The model itself is served: with the original's tokenizer, or by token ids."""
    folder = resolve_checkpoint(str(write(tmp_path, metadata)))
    assert read_model_config(folder).eos_token_ids == (2,)
    for ask in (lambda: resolve_tokenizer(None, folder), lambda: FrontEndTokenizer(folder)):
        with pytest.raises(ConfigError, match=r"the tokenizer of tiny\.gguf cannot be used") as caught:
            ask()
        assert reason in str(caught.value)
        assert "name the original model's tokenizer in the engine argument tokenizer" in str(caught.value)
    original = tmp_path / "original"
    original.mkdir()
    gpt2_original(pre_tokenizers.ByteLevel()).save(str(original / "tokenizer.json"))
    assert resolve_tokenizer(str(original), folder) == original


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(tokens=[*BYTE_TOKENS, "x"], token_type=None), "names 98 tokens, but its embedding has 97 rows"),
        (byte_level(token_type=[1] * 96), "tokenizer.ggml.token_type has 96 entries for 97 tokens"),
        (sentencepiece(scores=[0.0] * 96), "tokenizer.ggml.scores has 96 entries for 97 tokens"),
        (byte_level(eos_token_id="</s>"), "'eos_token_id' must be of type int, found '</s>'"),
    ],
)
def test_vocabularies_that_contradict_themselves_are_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert_refused(write(tmp_path, metadata), "tiny.gguf", message)
