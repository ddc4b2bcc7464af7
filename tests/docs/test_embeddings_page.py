"""The page about embeddings: each request of it is asked of a model that has been started for it."""

from __future__ import annotations

import json
import re
import subprocess

from cb_backend.cli import main as cli_main
from cb_backend.cli.server.engine_options import engine_options
from tests.docs.checks import ROOT


def test_the_reranker_that_is_asked_is_the_one_that_is_shown() -> None:
    page = (ROOT / "docs" / "guide" / "embeddings.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (shown,) = (each for each in blocks if each.startswith("{\n"))
    (block,) = (each for each in blocks if "curl -s localhost:9000/v1/rerank" in each)
    assert "cb-backend serve" in block, "nothing says how to start what is asked"
    command = block[: block.index("curl")].removeprefix("cb-backend")
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    args = cli_main._parse("serve", words)
    wanted = json.loads(shown)
    assert args.checkpoint == wanted.pop("model")
    assert json.loads(json.dumps(engine_options(args))) == wanted  # tuples are lists there
