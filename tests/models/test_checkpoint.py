"""Where a checkpoint comes from: folders, GGUF files, the cache, the hub; and its tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from cb_backend.contracts.errors import ConfigError
from cb_backend.models import checkpoint
from cb_backend.models.checkpoint import resolve_checkpoint, resolve_tokenizer
from tests.models.gguf_files import tiny_gguf
from tests.models.paged_model import PagedModel
from tests.models.tiny_checkpoints import random_tokens, reference_logits

# A byte-level BPE of 97 tokens: printable bytes, two merges, and an end-of-sequence token.
ALPHABET = sorted(ByteLevel.alphabet())[:94]
MERGES = ["a b", "ab c"]
TOKENS = [*ALPHABET, "ab", "abc", "<eos>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_gguf_is_converted_once_and_computes_the_same(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = tiny_gguf("qwen2-bias", tmp_path / "source")
    path = file.write(tmp_path / "tiny.gguf")
    folder = resolve_checkpoint(str(path))
    assert folder.parent == cache / "models"
    assert [entry for entry in folder.parent.iterdir() if entry != folder] == []  # nothing half done is left
    prompt = random_tokens(40, seed=1)
    paged = PagedModel(folder)
    paged.start(0, 40)
    torch.testing.assert_close(paged.prefill(0, prompt), reference_logits(source, prompt, []), atol=1e-4, rtol=0)
    assert paged.config.eos_token_ids == (2,)
    tokenizer = Tokenizer.from_file(str(resolve_tokenizer(None, folder) / "tokenizer.json"))
    assert tokenizer.encode("abcab").tokens == ["abc", "ab"]

    def fail(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(checkpoint, "_convert_gguf", fail)
    assert resolve_checkpoint(str(path)) == folder


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04 not gguf", r"broken\.gguf is not a GGUF file"),
        (b"GGUF\x03\0\0\0", r"broken\.gguf cannot be converted"),
    ],
)
def test_damaged_gguf_leaves_nothing_behind(tmp_path: Path, cache: Path, data: bytes, message: str) -> None:
    (tmp_path / "broken.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        resolve_checkpoint(str(tmp_path / "broken.gguf"))
    assert list((cache / "models").iterdir()) == []


def test_local_folder_and_cached_hub_name(tmp_path: Path, cache: Path) -> None:
    local, cached = tmp_path / "local", cache / "models" / "org--name"
    for folder in (local, cached):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert resolve_checkpoint(str(local)) == local
    assert resolve_checkpoint("org/name") == cached


@pytest.mark.parametrize("model", ["models/tiny", "tiny", "a/b/c", "größe"])
def test_r63b_a_relative_model_is_told_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, model: str
) -> None:
    """It is not beside the model.json that names it: the server's folder counts."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"it was looked for at {tmp_path / model}") + "$"):
        resolve_checkpoint(model)
    (tmp_path / model).mkdir(parents=True)
    (tmp_path / model / "config.json").write_text("{}")
    assert resolve_checkpoint(model) == Path(model)


def test_r63b_an_absolute_model_is_where_it_says() -> None:
    with pytest.raises(ConfigError, match=r"nor a hub id like org/name$"):
        resolve_checkpoint("/no/such/folder")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/absent", r"'org/absent' is not a local folder and could not be fetched from the hub.*local copy"),
        ("/no/such/folder", r"'/no/such/folder' is neither a folder, a \.gguf file nor a hub id"),
        ("{tmp}/file.bin", r"is a file, but not a \.gguf"),
        ("{tmp}/empty", r"holds no config\.json"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, model: str, message: str) -> None:
    (tmp_path / "file.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_checkpoint(model.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


def write_old_tokenizer(folder: Path) -> Path:
    """vocab.json and merges.txt, as before tokenizer.json."""
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(TOKENS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_old_tokenizer_is_converted_into_the_cache(tmp_path: Path, cache: Path) -> None:
    folder = write_old_tokenizer(tmp_path / "old")
    before = sorted(folder.iterdir())
    converted = resolve_tokenizer(None, folder)
    assert converted.parent == cache / "tokenizers"
    assert sorted(folder.iterdir()) == before
    ids = Tokenizer.from_file(str(converted / "tokenizer.json")).encode("abcab").ids
    assert ids == [TOKENS.index("abc"), TOKENS.index("ab")]
    assert resolve_tokenizer(None, folder) == converted
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")  # other content, other conversion
    assert resolve_tokenizer(None, folder) != converted


def test_a_tokenizer_of_its_own_is_preferred(tmp_path: Path) -> None:
    for name in ("model", "tokenizer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(None, tmp_path / "model") == tmp_path / "model"
    assert resolve_tokenizer(str(tmp_path / "tokenizer"), tmp_path / "model") == tmp_path / "tokenizer"


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer in the checkpoint's folder; set the engine argument tokenizer"):
        resolve_tokenizer(None, tmp_path)


def test_a_full_disk_is_said_with_the_folder_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsaved:
        def save_pretrained(self, target: Path) -> None:
            (target / "half").write_text("x")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: Unsaved())
    message = r"cannot be written to .*tokenizers \(.*No space left.*; \d+ MiB are free\).*CB_BACKEND_CACHE"
    with pytest.raises(ConfigError, match=message):
        resolve_tokenizer(None, tmp_path)
    assert not any((cache / "tokenizers").iterdir())


def test_another_fault_of_a_writer_is_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty:
        def save_pretrained(self, target: Path) -> None:
            raise TypeError("Object of type set is not JSON serializable")

    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: Faulty())
    with pytest.raises(ConfigError, match=r"cannot be converted \(TypeError: Object of type set") as caught:
        resolve_tokenizer(None, tmp_path)
    assert "room" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tiny.gguf"])
def test_a_file_is_no_tokenizer(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"is a file; name the folder that holds tokenizer\.json"):
        resolve_tokenizer(str(tmp_path / name), tmp_path)
