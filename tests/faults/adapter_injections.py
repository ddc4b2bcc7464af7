"""The fault of adapters, F14: files and lists go wrong or change under load, and only who named them may see it.

The load asks for the model as it is and compares every text, so its windows allow no error at all. Each injection asks
for adapters beside it: good ones must give the text of their merged weights, spoiled ones an error that names the file.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cb_backend.support.adapter_files import LIST_NAME, WEIGHTS_NAME
from tests.faults.injections import Fault, window
from tests.faults.world import World
from tests.server.adapted_server import delete, poison, truncate
from tests.server.raw_stream import RawStream
from tests.server.tiny_adapters import MergedReference, write_adapter

PROMPT, NUM_TOKENS = "seven wizards", 12
GOOD = ("doll", "sheep", "wolf")  # one more than there are places for
NUM_CHANGES = 200  # of a list, in one injection: a thousand are --times 30
SETTLE_S = 1.5  # longer than a file must not have changed


class _Adapters:
    """Of a world's server."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.version = world.folder / "repository" / "llm" / "1"
        self.checkpoint = Path(json.loads((self.version / "model.json").read_text())["model"])

    def folder(self, name: str) -> Path:
        return self.version / "adapters" / name

    def write(self, name: str, seed: int) -> None:
        write_adapter(self.folder(name), self.checkpoint, seed)

    def expected(self, name: str) -> str:
        return MergedReference(self.checkpoint, self.folder(name)).greedy_text(PROMPT, NUM_TOKENS)

    def list(self, *more: str) -> None:
        _write_list(self.version, (*GOOD, *more))

    def ask(self, name: str) -> tuple[str, str]:
        sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "lora_name": name}
        stream = RawStream(self._world.server.url, PROMPT, sampling).wait()
        stream.close()
        return stream.text, "; ".join(stream.errors)

    def check_good(self) -> None:
        for name in GOOD:
            if (found := self.ask(name)) != (self.expected(name), ""):
                self._world.notes.append(f"adapter {name} gave {found}")


def _write_list(version: Path, names: tuple[str, ...]) -> None:
    new = version / "list.new"
    new.write_text(json.dumps({name: f"adapters/{name.partition('@')[0]}" for name in names}))
    new.rename(version / LIST_NAME)


def add_adapters(repository: Path) -> None:
    version = repository / "llm" / "1"
    checkpoint = Path(json.loads((version / "model.json").read_text())["model"])
    for seed, name in enumerate(GOOD):
        write_adapter(version / "adapters" / name, checkpoint, seed)
    _write_list(version, GOOD)


def spoiled(spoil: Callable[[Path], None]) -> Callable[[World, _Adapters, int], None]:
    """An adapter that was never read is spoiled, and asked for by several at once."""

    def inject(world: World, adapters: _Adapters, number: int) -> None:
        name = f"spoiled{number}"
        adapters.write(name, number)
        spoil(adapters.folder(name) / WEIGHTS_NAME)
        adapters.list(name)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(adapters.ask, [name] * 4))
        world.notes += [
            f"a spoiled adapter gave {text!r}, {error!r}" for text, error in found if text or WEIGHTS_NAME not in error
        ]
        adapters.list()
        shutil.rmtree(adapters.folder(name))

    return inject


def swapped(world: World, adapters: _Adapters, number: int) -> None:
    """The files of an adapter become another's while it is asked for: answers are the one's or the other's."""
    name = f"swapped{number}"
    adapters.write(name, number)
    adapters.list(name)
    texts, found = [adapters.expected(name)], [adapters.ask(name)]
    adapters.write(name, number + 1000)
    texts.append(adapters.expected(name))
    deadline = time.monotonic() + 30.0
    while found[-1][0] != texts[-1] and time.monotonic() < deadline:
        found.append(adapters.ask(name))
    if found[-1][0] != texts[-1] or any(error or text not in texts for text, error in found):
        world.notes.append(f"a swapped adapter gave {found[-3:]}, expected {texts}")
    adapters.list()
    shutil.rmtree(adapters.folder(name))


def half_written(world: World, adapters: _Adapters, number: int) -> None:
    whole = (adapters.version / LIST_NAME).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (adapters.version / LIST_NAME).write_bytes(whole[:length])
        time.sleep(SETTLE_S / 4)
        adapters.check_good()
    adapters.list()


def many_changes(world: World, adapters: _Adapters, number: int) -> None:
    """Each adds a name and takes the last one away, and the new one is asked for."""
    expected = adapters.expected(GOOD[0])
    for change in range(NUM_CHANGES):
        name = f"{GOOD[0]}@{number}-{change}"
        adapters.list(name)
        if (found := adapters.ask(name)) != (expected, ""):
            world.notes.append(f"a name that was added gave {found}")
    adapters.list()


KINDS = (
    many_changes, spoiled(truncate), spoiled(poison), spoiled(delete), swapped, half_written,
)  # fmt: skip


def change_adapters(world: World, number: int) -> None:
    """F14."""
    adapters, begin = _Adapters(world), time.monotonic()
    KINDS[number % len(KINDS)](world, adapters, number)
    adapters.check_good()
    window(world, begin, recovery_limit_s=5.0)


SERVER: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "prepare": add_adapters}
FAULTS = (Fault("F14", "adapters spoiled, swapped, listed anew", change_adapters, server=SERVER, recovery_s=5.0),)
