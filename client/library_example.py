"""A model as a library, without a server: whole answers, then one that is streamed.

python client/library_example.py ./llama-3.2-1b-instruct "The capital of France is" "def fibonacci(n):"
"""

from __future__ import annotations

import argparse
import sys

from cb_backend import LLM, SamplingParams
from cb_backend.contracts.errors import CbError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, GGUF file or hub id of the checkpoint")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024)
    options = parser.parse_args(arguments)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    try:
        with LLM(options.model, max_model_len=options.max_model_len) as llm:
            for result in llm.generate(options.prompts, params):
                print(f"{result.prompt!r} -> {result.outputs[0].text!r} ({result.outputs[0].finish_reason})")
            for chunk in llm.stream(options.prompts[0], params):
                print(chunk.output.text, end="", flush=True)
            print()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except CbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
