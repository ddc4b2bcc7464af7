"""What a start asks of a checkpoint's tokenizer: its folder, token ids of plain texts, and its end of a sequence."""

from __future__ import annotations

from pathlib import Path

from cb_backend.contracts.config import EngineConfig
from cb_backend.engine.runner.cuda_warm_up import log
from cb_backend.models.checkpoint import has_tokenizer, resolve_tokenizer
from cb_backend.models.spec_fields import within_vocabulary
from cb_backend.models.tasks import EncodePlain
from cb_backend.support.tokenizer_files import load_tokenizer, token_text


def find_tokenizer(config: EngineConfig, folder: Path) -> Path:
    """The tokenizer's folder; the checkpoint's own when it has none, for whoever works with token ids alone.

    A front end that finds no tokenizer there refuses to start. Raises `ConfigError` for one that cannot be converted.
    """
    if config.tokenizer is None and not has_tokenizer(folder):
        return folder
    return resolve_tokenizer(config.tokenizer, folder)


def plain_encoder(tokenizer_dir: Path) -> EncodePlain | None:
    """What `resolve_tasks` asks token ids of; None where there is no tokenizer."""
    if not (tokenizer_dir / "tokenizer.json").is_file():
        return None
    return lambda text: list(load_tokenizer(tokenizer_dir)[0].encode(text, add_special_tokens=False).ids)


def read_tokenizer_eos_ids(tokenizer_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`: fine-tuned models end their turns with it, whatever their
    generation_config.json kept of the base model. Warns of ids that the tokenizer has and the model lacks.

    Raises `ConfigError` for a tokenizer that cannot be read.
    """
    if not (tokenizer_dir / "tokenizer.json").is_file():
        return ()
    backend, settings = load_tokenizer(tokenizer_dir)
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        log(
            f"the tokenizer's ids go up to {highest}, the model's vocabulary ends at {vocab_size - 1}: prompts that"
            " need the others are refused"
        )
    eos_token = token_text(settings.get("eos_token"))
    eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
    return () if eos_token_id is None else within_vocabulary([eos_token_id], vocab_size, "the tokenizer's eos_token")
