"""`cb-backend bench accuracy`: its measures on tensors worked out by hand, its logits against transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.cli.benchmarks.accuracy import accuracy, answers_of, logits_along
from cb_backend.cli.main import main
from cb_backend.engine.llm_engine import create_engine
from tests.engine.drive import config
from tests.models.tiny_checkpoints import load_reference, random_tokens, reference_logits, write_checkpoint
from tests.server.tiny_checkpoint import write_tiny_checkpoint


def test_measures_of_equal_and_of_shifted_logits() -> None:
    logits = [torch.randn(3, 11), torch.randn(5, 11)]
    same = accuracy(logits, logits, [3, 5], 5)
    assert (same.max_error, same.mean_error, same.relative_error, same.divergence) == (0, 0, 0, 0)
    assert (same.same_top, same.same_answers, same.mean_prefix) == (1.0, 1, 4.0)
    shifted = accuracy(logits, [part + 2.0 for part in logits], [0, 0], 5)
    assert shifted.mean_error == pytest.approx(2.0)
    assert shifted.relative_error < 1e-6  # a constant changes no probability
    assert shifted.divergence == pytest.approx(0.0, abs=1e-6)


def test_divergence_and_top_token() -> None:
    wanted, found = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, float(torch.log(torch.tensor(3.0)))]])
    measured = accuracy([wanted], [found], [0], 4)
    # 1/2 log((1/2) / (1/4)) + 1/2 log((1/2) / (3/4))
    assert measured.divergence == pytest.approx(0.14384, abs=1e-5)
    assert measured.same_top == 0.0
    assert measured.max_error == pytest.approx(1.09861, abs=1e-5)


@torch.inference_mode()
def test_logits_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3", tmp_path)
    engine = create_engine(config(str(folder), block_size=4, num_gpu_blocks_override=40, max_model_len=64))
    prompts = [random_tokens(9, 1), random_tokens(14, 2)]
    answers = answers_of(engine, prompts, 6)
    for prompt, answer in zip(prompts, answers, strict=True):
        along = logits_along(engine, [*prompt, *answer])
        torch.testing.assert_close(along, reference_logits(folder, [*prompt, *answer], []), atol=1e-4, rtol=0)
        model, tokens = load_reference(folder), list(prompt)
        for _ in answer:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert tokens[len(prompt) :] == answer


@pytest.mark.parametrize("options", [["--formats", "int4"], ["--prompts", "0"], ["--tokens", "0"], ["--prompts", "99"]])
def test_arguments_that_mean_nothing_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accuracy", *options]) != 0
    assert "--formats must be of bf16, fp8-kv, fp8-weights, fp8-both" in capsys.readouterr().err


def test_every_format_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command as it is given, on a small checkpoint: narrower formats are further from the reference."""
    options = ["--model", str(write_tiny_checkpoint(tmp_path)), "--prompts", "3", "--tokens", "5", "--device", "cpu"]
    assert main(["bench", "accuracy", *options]) == 0
    about, _, *lines = capsys.readouterr().out.splitlines()
    assert "reference float32; 3 prompts x 5 tokens" in about
    errors = {line.split()[0]: float(line.split()[2]) for line in lines}
    assert [*errors] == ["bf16", "fp8-kv", "fp8-weights", "fp8-both"]
    assert 0 < errors["bf16"] < errors["fp8-weights"]
    assert 0 < errors["fp8-kv"] < errors["fp8-both"]
