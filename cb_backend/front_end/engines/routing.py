"""Which of several engines a request goes to: the one whose cache is likely to hold its prefix, unless that is busy.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018) over rendezvous hashing (Thaler,
Ravishankar, 1998): the prompt's beginning ranks the engines, and the first of them wins that has no more than
`LOAD_FACTOR` times its share of the open requests. Nothing is remembered, so all front ends send equal beginnings to
the same engine without talking to one another, and an engine that is away moves its own prefixes only. What very many
requests share outgrows its first engine's bound and is then cached on the second too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from cb_backend.contracts.adapters import AdapterSource

TOKEN_BYTES = 4  # of AddRequest.prompt_token_ids
# The key is as long as the prompt allows: 64 tokens tell applications apart, 256 and 1024 conversations and documents.
KEY_LENGTHS = (1024, 256, 64)
LOAD_FACTOR = 1.25


def prefix_key(prompt_token_ids: bytes, cache_salt: str = "", adapter: AdapterSource | None = None) -> bytes | None:
    """What stands for a prompt's beginning; None if it is too short for a cached prefix to matter.

    An adapter computes prefixes of its own. Its content is known to engines alone; here its name and time stand for it.
    """
    for length in KEY_LENGTHS:
        if len(prompt_token_ids) >= length * TOKEN_BYTES:
            salt = cache_salt if adapter is None else f"{adapter.mtime_ns}\0{adapter.name}\0{cache_salt}"
            digest = blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()
            return blake2b(prompt_token_ids[: length * TOKEN_BYTES], digest_size=16, key=digest).digest()
    return None


def choose_engine(key: bytes | None, loads: Sequence[int | None]) -> int | None:
    """The engine to take, by its index; None if there is none. `loads`: open requests, None for one that is away."""
    present = [engine for engine, load in enumerate(loads) if load is not None]
    if not present:
        return None

    def load_of(engine: int) -> int:
        return loads[engine] or 0

    if key is None:
        return min(present, key=load_of)
    bound = math.ceil(LOAD_FACTOR * (sum(map(load_of, present)) + 1) / len(present))
    ranked = sorted(present, key=lambda engine: _weight(key, engine), reverse=True)
    return next(engine for engine in ranked if load_of(engine) < bound)


def _weight(key: bytes, engine: int) -> bytes:
    return blake2b(engine.to_bytes(4, "little"), key=key, digest_size=8).digest()
