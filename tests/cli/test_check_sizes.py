"""`cb-backend check`: numbers that size memory and take too much of it are named, with what would fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.test_check import run

TOO_MUCH = 99_999_999_999
SIZES = {  # integers that size memory, and what is said to lower
    "--max-num-seqs": "Lower max_num_seqs; at most ([0-9]+) would fit",
    "--max-num-batched-tokens": "Lower max_num_batched_tokens; at most ([0-9]+) would fit",
    "--block-size": "Lower block_size; at most ([0-9]+) would fit, and 16 is usual",
    "--num-gpu-blocks-override": r"Lower num_gpu_blocks_override \(at most ([0-9]+) would fit\)",
    "--kv-cache-memory-bytes": r"Lower kv_cache_memory_bytes \(at most ([0-9]+) would fit\)",
    "--max-loras": "lower one of them, max_loras to ([0-9]+) at most",
    "--max-model-len": "the checkpoint's positions end at ([0-9]+); lower it",
}


@pytest.mark.parametrize("value", [TOO_MUCH, 10**15])
@pytest.mark.parametrize(("flag", "remedy"), SIZES.items())
def test_a_number_that_takes_too_much_is_named_with_what_would_fit(
    flag: str, remedy: str, value: int, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--card", "l4", "--json", *["--enable-lora"] * (flag == "--max-loras"))
    code, text = run(capsys, str(plain), flag, str(value), *more)
    (fault,) = json.loads(text)["refusals"]
    name = flag.removeprefix("--").replace("-", "_")
    assert code == 1
    assert re.search(f"{name} is {value}|{name} asks for", fault), fault
    assert not re.search(r"(?<![0-9a-z])-[0-9]", fault), fault
    fits = re.search(remedy, fault)
    assert fits, fault
    code, text = run(capsys, str(plain), flag, fits[1], *more)
    assert code == 0, text


def test_two_numbers_that_take_too_much_are_named_one_after_the_other(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ("--max-num-seqs", str(TOO_MUCH), "--max-num-batched-tokens", str(TOO_MUCH), "--memory", "24GB")
    code, text = run(capsys, str(plain), *both)
    assert code == 1
    assert "are free on the cuda device and steps need" in text
    assert "lower max_num_batched_tokens or max_num_seqs" in text
    assert " -" not in text.split("Refused")[1].replace("  - ", "")
