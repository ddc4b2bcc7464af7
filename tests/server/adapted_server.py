"""A server whose `llm` takes adapters, what it should answer for each, and what spoils an adapter's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cb_backend.support.adapter_files import LIST_NAME
from tests.server.conftest import RunningServer
from tests.server.raw_stream import RawStream
from tests.server.tiny_adapters import MergedReference, write_adapter
from tests.server.tiny_checkpoint import Reference

PROMPT = "the quick brown fox"
NUM_TOKENS = 24
NAMES = ("doll", "sheep", "wolf")
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS}


class Adapted:
    """A server whose `llm` takes adapters, and what they are."""

    def __init__(self, server: RunningServer, checkpoint: Path, version: Path) -> None:
        self.server = server
        self.checkpoint = checkpoint
        self.version = version
        self.list = version / LIST_NAME
        self._references: dict[str, Reference] = {"": Reference(checkpoint)}

    def folder(self, name: str) -> Path:
        return self.version / "adapters" / name

    def add(self, name: str, seed: int, **values: Any) -> None:
        write_adapter(self.folder(name), self.checkpoint, seed, **values)
        self._references[name] = MergedReference(self.checkpoint, self.folder(name))

    def expected(self, name: str, prompt: str = PROMPT) -> str:
        return self._references[name].greedy_text(prompt, NUM_TOKENS)

    def write_list(self, names: tuple[str, ...] = NAMES) -> None:
        """As an editor does it that knows of readers: renamed into its place."""
        new = self.list.with_suffix(".new")
        new.write_text(json.dumps({name: f"adapters/{name}" for name in names}))
        new.rename(self.list)

    def send(self, name: str, prompt: str = PROMPT, **sampling: Any) -> RawStream:
        adapter = {"lora_name": name} if name else {}
        return RawStream(self.server.url, prompt, {**GREEDY, **adapter, **sampling})

    def ask(self, name: str, prompt: str = PROMPT, **sampling: Any) -> tuple[str, str]:
        """(text, error) of a request."""
        stream = self.send(name, prompt, **sampling).wait()
        stream.close()
        return stream.text, "; ".join(stream.errors)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def poison(path: Path) -> None:
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, path)


def delete(path: Path) -> None:
    path.unlink()


def of_another_model(path: Path) -> None:
    save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 7)}, path)
