"""A program that loads a model over two GPUs, looks at its answers and ends. Each check in a process of its own, since
one process can share memory of its GPU with others once, and since what it leaves behind must not keep it from ending.

    python -m tests.llm.two_gpus CHECK FOLDER peers|nccl
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cb_backend import LLM, SamplingParams
from cb_backend.engine.runner.ranks import RankedRunner
from cb_backend.parallel.peer_group import PeerGroup
from tests.llm.conftest import ARGUMENTS
from tests.llm.test_llm import GREEDY, PROMPTS
from tests.llm.test_ranks import RULES, figures, params, pids, tokens

EXACT = {**ARGUMENTS, "dtype": "float32"}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
NAMES = [name for name in RULES if name != "structured" or importlib.util.find_spec("llguidance")]


class Program:
    """The checkpoint on one GPU, which says what is right, and on two of them."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder = str(folder)
        self.way = way

    def one(self) -> LLM:
        return LLM(self.folder, **EXACT)

    def two(self, is_first: bool = True, **settings: Any) -> LLM:
        """Which add up as they should: is_first: of the process."""
        exact = {**EXACT, "disable_custom_all_reduce": self.way == "nccl", **settings}
        ranked = LLM(self.folder, tensor_parallel_size=2, **exact)
        assert is_peers(ranked) is (self.way == "peers" and is_first)
        return ranked

    def answers(self, **settings: Any) -> None:
        with self.one() as one, self.two(**settings) as ranked:
            for name in NAMES:
                assert tokens(ranked, params(name)) == tokens(one, params(name)), name
            for mine, other in zip(figures(one), figures(ranked), strict=True):
                assert other == pytest.approx(mine, abs=1e-3)

    def eager(self) -> None:
        self.answers(enforce_eager=True)

    def pressed(self) -> None:
        """Preemption, swapped blocks, chunks of prompts."""
        settings = {"num_gpu_blocks_override": 10, "swap_space": 0.01, "max_num_batched_tokens": 8}
        long = SamplingParams(temperature=0, max_tokens=50)
        with self.one() as one, self.two(**settings, admission_reserve=-10) as pressed:
            assert tokens(pressed, long) == tokens(one, long)
            assert pressed._engine.stats().num_preemptions > 0

    def again(self) -> None:
        """A second model in the process, whose ranks are new."""
        found = []
        for is_first in (True, False):
            with self.two(is_first) as ranked:
                found.append(tokens(ranked, LONG))
        assert found[0] == found[1]

    def stopped(self) -> None:
        with self.one() as one, self.two() as ranked:
            (pid,) = pids(ranked).values()
            os.kill(pid, signal.SIGSTOP)
            waker = os.fork()
            if not waker:
                try:
                    time.sleep(5)
                    os.kill(pid, signal.SIGCONT)
                finally:
                    os._exit(0)
            got = tokens(ranked)
            os.waitpid(waker, 0)
            assert got == tokens(one)

    def killed(self) -> None:
        """Rank 0's device may wait for what will not come; answers before that are right."""
        with self.two() as killed:
            expected = tokens(killed, LONG)[0]
            (pid,) = pids(killed).values()
            stream = killed.stream(PROMPTS[0], LONG)
            got = list(next(stream).output.token_ids)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(Exception, match=rf"rank 1 \(process {pid}\) has ended by signal 9 \(SIGKILL\)"):
                got.extend(token for chunk in stream for token in chunk.output.token_ids)
            assert got == expected[: len(got)]
            (again,) = killed.generate(PROMPTS[0], GREEDY)
            assert "SIGKILL" in str(again.error)


CHECKS = ("answers", "eager", "pressed", "again", "stopped", "killed")


def is_peers(llm: LLM) -> bool:
    runner = llm._engine.runner
    assert isinstance(runner, RankedRunner)
    return isinstance(runner.runner.model.group, PeerGroup)


def main() -> None:
    check, folder, way = sys.argv[1:]
    begin = time.monotonic()
    getattr(Program(Path(folder), way), check)()
    print(f"{check} {way}: {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
