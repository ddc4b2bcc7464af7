"""`cb-backend check FOLDER`: what a checkpoint is, whether it will be served, and how much of a card it takes.

No GPU is needed and no weight is read: config, headers of the files and tokenizer say it all. Exit codes: 0 it will be
served, 1 it is refused, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json

import torch

from cb_backend.cli.check_cards import CARDS, Card, cache_tokens, card_faults, memory_size
from cb_backend.cli.check_findings import Findings, examine
from cb_backend.cli.check_report import CacheFit, as_json, report
from cb_backend.cli.paths import CliError
from cb_backend.cli.server.engine_options import add_engine_options, engine_options
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.kv_cache.layout import layout_of
from cb_backend.kv_cache.storage import resolve_kv_dtype
from cb_backend.support.native_paths import native_path

EXIT_SERVED, EXIT_REFUSED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:

    parser.add_argument("folder", metavar="FOLDER", help="a checkpoint's folder, or a GGUF file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--card", choices=sorted(CARDS), help="whether it fits there; default: a line for each card")
    where.add_argument(
        "--memory", type=memory_size, metavar="SIZE", help="of a card that is not in the list: 141GB, 80GiB"
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:

    if not native_path(args.folder).expanduser().exists():
        args.command_parser.error(f"{args.folder!r} is neither a folder nor a file; nothing is fetched here")
    try:
        config = EngineConfig(model=args.folder, **engine_options(args))
    except CliError as error:
        args.command_parser.error(str(error))
    found = examine(config)
    per_token, fits = _fit(found, config, args)
    if args.json:
        print(json.dumps(as_json(found, per_token, fits), indent=2))
    else:
        print("\n".join(report(found, per_token, fits)))
    return EXIT_REFUSED if found.refusals else EXIT_SERVED


def _fit(found: Findings, config: EngineConfig, args: argparse.Namespace) -> tuple[int | None, list[CacheFit]]:
    """(bytes of cache a token, what each card has left). A card that was named and does not do is a refusal."""

    spec, dtype, weight_bytes = found.spec, found.dtype, found.weight_bytes
    if spec is None or dtype is None:
        return None, []
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, torch.device("cpu"))
    layout = layout_of(spec, config.block_size, kv_dtype.itemsize)
    per_token = layout.bytes_per_token
    if weight_bytes is None:
        return per_token, []
    named = CARDS.get(args.card) if args.card else None
    if args.memory is not None:
        named = Card("the card", args.memory, max(card.capability for card in CARDS.values()))
    fits = []
    for card in [named] if named else CARDS.values():
        faults = card_faults(card, config, found.quantization, dtype)
        num_tokens = None
        try:
            num_tokens = cache_tokens(config, spec, dtype, layout, card, weight_bytes, found.adapter_bytes or 0)
        except ConfigError as error:
            faults.append(str(error))
        fits.append(CacheFit(card.name, card.num_bytes, None if faults else num_tokens, tuple(faults)))
    if named:
        for fault in fits[0].reasons:
            found.refuse(fault)
    return per_token, fits
