"""`cb-backend bench accuracy`: what narrow formats cost in accuracy, against the checkpoint in float32 or bfloat16.

The reference answers every prompt greedily. Each format is then asked twice: for the logits along the reference's
answers (their error, the divergence of the distributions, how often the most likely token is the same), and for
answers of its own (how far they are the reference's). Quantised checkpoints of the same model are measured in the same
way. Runs in process, on a CPU by the kernels' twins.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cb_backend.cli.demo_model import ensure_demo_model
from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.study.machine import conditions

HELP = "logit error and greedy agreement of fp8, and of quantised checkpoints beside the model itself"
# Beside the reference; each is a set of engine arguments.
FORMATS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
    "fp8-weights": {"quantization": "fp8"},
    "fp8-both": {"kv_cache_dtype": "fp8", "quantization": "fp8"},
}
PROMPTS = (
    "The capital of France is", "Once upon a time, a fox and a crow", "To bake bread you need", "Water boils at",
    "The three laws of motion say that", "A good password is one that", "In the year 1969, people first",
    "The difference between a virus and a bacterium is", "def fibonacci(n):", "My favourite season is autumn because",
    "The recipe asks for two eggs, a cup of flour and", "Light travels faster than sound, so", "Dear Sir or Madam,",
    "The square root of two cannot be", "Cats sleep for most of the day because", "An engine that idles too fast",
    "The river rose after three days of rain, and", "Photosynthesis is the process by which",
    "SELECT name, price FROM", "If all birds could talk, they would", "The train to the coast leaves at",
    "A triangle has three sides, and the sum of", "She opened the letter and read:", "The moon looks larger near",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """One format against the reference; the first five over all positions of the reference's answers."""

    max_error: float  # of a logit
    mean_error: float
    relative_error: float  # ||error|| / ||reference||, each position's logits without their mean
    divergence: float  # mean KL(reference || format) in nats
    same_top: float  # share of positions whose most likely token is the same
    same_answers: int  # greedy answers equal to the reference's
    mean_prefix: float  # tokens of an answer before the first that differs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.add_argument("--model", help="folder, GGUF file or hub id; default: the demo's SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), metavar="N", help=f"1 to {len(PROMPTS)}")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="length of an answer")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated, of the default's; empty: none")
    parser.add_argument(
        "--beside", action="append", default=[], metavar="MODEL", help="a quantised checkpoint of it; may be repeated"
    )
    parser.add_argument("--reference-dtype", default=None, help="default: float32, on a GPU bfloat16")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit code. Raises `ConfigError` for arguments that mean nothing."""
    formats = args.formats.split(",") if args.formats else []
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not 1 <= args.prompts <= len(PROMPTS) or args.tokens < 1:
        raise ConfigError(
            f"--formats must be of {', '.join(FORMATS)}, --prompts 1 to {len(PROMPTS)}, --tokens at least 1; got "
            f"{args.formats!r}, {args.prompts} and {args.tokens}"
        )
    import torch

    is_cuda = args.device != "cpu" and torch.cuda.is_available()
    dtype = args.reference_dtype or ("bfloat16" if is_cuda else "float32")
    model = args.model or str(ensure_demo_model(print))
    common = {"model": model, "device": args.device, "dtype": dtype, "max_num_seqs": args.prompts}
    common |= {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 64 + args.tokens, "enforce_eager": True}
    bench = Bench(common, args.prompts, args.tokens)
    about = conditions("cuda" if is_cuda else "cpu")
    print(
        f"{Path(model).name}, {about['card']}, torch {about['torch']}, cb_backend {about['commit']}; reference {dtype};"
        f" {args.prompts} prompts x {args.tokens} tokens; the reference's most likely token leads by"
        f" {bench.median_lead:.2f} (median)\n{_HEADER}",
        flush=True,
    )
    others = {name: FORMATS[name] for name in formats} | {Path(name).name: {"model": name} for name in args.beside}
    for name, changes in others.items():
        if common | changes == common:
            continue  # the reference itself
        print(_line(name, bench.measure(changes)), flush=True)
    return 0


class Bench:
    """The reference's answers and logits, and how to measure a format against them."""

    def __init__(self, common: dict[str, Any], num_prompts: int, num_tokens: int) -> None:
        self.common, self.num_tokens = common, num_tokens
        engine = create_engine(engine_config_from_dict(common))
        self.prompts = _encode(engine.info.tokenizer_dir, PROMPTS[:num_prompts])
        self.answers = answers_of(engine, self.prompts, num_tokens)
        self.logits = self._logits(engine)
        self.vocab_size = engine.info.vocab_size
        engine.close()
        leads = [logits.topk(2).values for logits in self.logits]
        self.median_lead = float(np.median(np.concatenate([(top[:, 0] - top[:, 1]).numpy() for top in leads])))

    def measure(self, changes: dict[str, Any]) -> Accuracy:
        engine = create_engine(engine_config_from_dict({**self.common, **changes}))
        if engine.info.vocab_size != self.vocab_size:
            raise ConfigError(
                f"{changes['model']} has {engine.info.vocab_size} tokens, the reference {self.vocab_size}; name a"
                " checkpoint of the same model"
            )
        answers, all_logits = answers_of(engine, self.prompts, self.num_tokens), self._logits(engine)
        engine.close()
        prefixes = [_common_prefix(one, other) for one, other in zip(answers, self.answers, strict=True)]
        return accuracy(self.logits, all_logits, prefixes, self.num_tokens)

    def _logits(self, engine: LLMEngine) -> list[Any]:
        """A prompt each: the logits from which the tokens of the reference's answer follow, float32 on the CPU."""
        return [
            logits_along(engine, [*prompt, *answer[:-1]])[len(prompt) - 1 :].float().cpu()
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
        ]


def accuracy(wanted: Sequence[Any], found: Sequence[Any], prefixes: Sequence[int], num_tokens: int) -> Accuracy:
    """wanted, found: float tensors [num_tokens, vocab_size] a prompt; prefixes: equal tokens at an answer's start."""
    import torch

    reference, other = torch.cat(list(wanted)), torch.cat(list(found))
    error = other - reference
    centred = reference - reference.mean(-1, keepdim=True)
    log_p, log_q = reference.log_softmax(-1), other.log_softmax(-1)
    return Accuracy(
        max_error=float(error.abs().max()),
        mean_error=float(error.abs().mean()),
        relative_error=float((error - error.mean(-1, keepdim=True)).norm() / centred.norm()),
        divergence=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        same_top=float((reference.argmax(-1) == other.argmax(-1)).float().mean()),
        same_answers=sum(prefix == num_tokens for prefix in prefixes),
        mean_prefix=float(np.mean(prefixes)),
    )


def answers_of(engine: LLMEngine, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy answers of `num_tokens` tokens each, all prompts in one batch."""
    for index, prompt in enumerate(prompts):
        params = TokenRules(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
        engine.add_request(engine.make_request(index, np.asarray(prompt, np.int32), params))
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished():
        output = engine.step()
        if output is not None:
            for request_id, token_id in zip(output.request_ids.tolist(), output.token_ids.tolist(), strict=True):
                answers[request_id] += [token_id] if token_id >= 0 else []
    if any(len(answer) != num_tokens for answer in answers):
        raise RuntimeError("an answer ended before its length: its logits were not finite, or the cache was too small")
    return answers


def logits_along(engine: LLMEngine, token_ids: list[int]) -> Any:
    """Logits [len(token_ids), vocab_size] after each of the tokens, computed as one prompt. No request may run."""
    import torch

    from cb_backend.layers.step_metadata import StepMetadata

    runner: Any = engine.runner
    num_tokens, block_size, device = len(token_ids), engine.info.block_size, runner.device
    num_blocks = -(-num_tokens // block_size)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    nothing = positions[:0]
    firsts = [1 + group * num_blocks for group in range(len(engine.info.kv_windows))]  # each group's blocks in a row
    if firsts[-1] + num_blocks > engine.info.num_blocks + 1:
        raise RuntimeError(f"{num_tokens} tokens do not fit a cache of {engine.info.num_blocks} blocks; give it more")
    step = StepMetadata(
        ropes=runner.model.ropes.rows(positions, torch.full_like(positions, num_tokens)),
        slot_mapping=tuple(positions + first * block_size for first in firsts),
        block_tables=tuple(
            torch.arange(first, first + num_blocks, dtype=torch.int32, device=device).unsqueeze(0) for first in firsts
        ),
        num_decode_rows=0,
        decode_slots=nothing,
        decode_seq_lens=nothing,
        prefill_slots=torch.zeros(1, dtype=torch.int32, device=device),
        prefill_query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        prefill_seq_lens=torch.full((1,), num_tokens, dtype=torch.int32, device=device),
        max_query_len=num_tokens,
    )
    with torch.inference_mode():
        tokens = torch.tensor(token_ids, dtype=torch.int32, device=device)
        return runner.model.compute_logits(runner.model(tokens, step, runner.storage.layers))


def _encode(folder: str, texts: Sequence[str]) -> list[list[int]]:
    from cb_backend.front_end.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    return [tokenizer.encode(text) for text in texts]


def _common_prefix(one: list[int], other: list[int]) -> int:
    return next((index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


_HEADER = (
    f"{'format':24} {'max error':>10} {'mean error':>11} {'relative':>9} {'KL, nats':>9} {'same top':>9}"
    f" {'same answers':>13} {'tokens before a difference':>27}"
)


def _line(name: str, found: Accuracy) -> str:
    return (
        f"{name:24} {found.max_error:10.3f} {found.mean_error:11.4f} {found.relative_error:9.2%}"
        f" {found.divergence:9.5f} {found.same_top:9.1%} {found.same_answers:13d} {found.mean_prefix:27.1f}"
    )
