"""`cb-backend check FOLDER`: what a checkpoint is, whether it will be served, and how much of a card it takes.

No GPU is needed and no weight is read: config, headers of the files and tokenizer say it all. Exit codes: 0 it will be
served, 1 it is refused, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json

from cb_backend.cli.check_cards import CARDS, Card, memory_size
from cb_backend.cli.check_findings import Findings, examine
from cb_backend.cli.check_report import CacheFit, as_json, report
from cb_backend.cli.device_share import device_share, room_beside
from cb_backend.cli.server.engine_options import add_engine_options, options_for
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError

EXIT_SERVED, EXIT_REFUSED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s FOLDER [--card NAME | --memory SIZE] [options]"
    parser.add_argument("folder", metavar="FOLDER", help="a checkpoint's folder, or a GGUF file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--card", choices=sorted(CARDS), help="whether it fits there; default: a line for each card")
    where.add_argument(
        "--memory", type=memory_size, metavar="SIZE", help="of a card that is not in the list: 141GB, 80GiB"
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    config = EngineConfig(model=args.folder, **options_for(args, args.folder))
    found = examine(config)
    per_token, fits = _fit(found, config, args)
    if args.json:
        print(json.dumps(as_json(found, per_token, fits), indent=2))
    else:
        print("\n".join(report(found, per_token, fits)))
    return EXIT_REFUSED if found.refusals else EXIT_SERVED


def _fit(found: Findings, config: EngineConfig, args: argparse.Namespace) -> tuple[int | None, list[CacheFit]]:
    """(bytes of cache a token, what each card has left). A card that was named and does not do is a refusal."""
    if found.spec is None or found.dtype is None:
        return None, []
    try:
        share = device_share(found, config)
    except ConfigError as error:
        found.refuse(str(error))
        return None, []
    if found.weight_bytes is None:
        return share.layout.bytes_per_token, []
    named = CARDS.get(args.card) if args.card else None
    if args.memory is not None:
        named = Card("the card", args.memory, max(card.capability for card in CARDS.values()))
    fits = []
    for card in [named] if named else CARDS.values():
        room, faults = room_beside(share, found, config, card, found.max_model_len or 0)
        if faults or room is None:
            fits.append(CacheFit(card.name, card.num_bytes, None, None, tuple(faults)))
        else:
            fits.append(CacheFit(card.name, card.num_bytes, room.num_tokens, room.longest_request))
    if named:
        for fault in fits[0].reasons:
            found.refuse(fault)
    return share.layout.bytes_per_token, fits
