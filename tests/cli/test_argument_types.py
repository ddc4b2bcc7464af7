"""Wrong flags are one line, said before anything is loaded: pytest tests/cli/test_argument_types.py"""

from __future__ import annotations

import pytest

from cb_backend.cli import main as cli_main
from cb_backend.support.argument_types import server_address


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("timeline demo --requests -3", "--requests: '-3' is not a whole number of at least 1"),
        ("timeline demo --steps x", "--steps: 'x' is not a whole number of at least 1"),
        ("bench engine --model m --reps 0", "--reps: '0' is not a whole number of at least 1"),
        ("bench engine --model m --scale nan", "--scale: 'nan' is not a number above 0"),
        ("bench engine --model m --run-ahead 1,a", "--run-ahead: '1,a' is not a list of whole numbers, like 64,256"),
        ("bench engine --model m --engine-args [1]", "--engine-args: must be a JSON object, got [1]"),
        ("bench engine --model m --out /no/where/x.jsonl", "--out: /no/where/x.jsonl: there is no folder /no/where"),
        ("study --engine-args {", "--engine-args: not valid JSON: "),
        ("study --max-num-seqs many", "--max-num-seqs: 'many' is not a list of whole numbers, like 64,256"),
        ("bench engine --model m --out /", "--out: /: it is a folder; name a file"),
        ("timeline demo --slots 0", "--slots: '0' is not a whole number of at least 1"),
        ("plan --model m --gpus 0", "--gpus: '0' is not a whole number of at least 1"),
        ("plan --model m --gpus 65", "--gpus: '65' is not a whole number from 1 to 64"),
        ("study --gpus 65", "--gpus: '65' is not a whole number from 1 to 64"),
        ("chat --url http://localhost:8001", "--url: 'http://localhost:8001' is not HOST:PORT, like localhost:8001"),
        ("openai --url localhost", "--url: 'localhost' is not HOST:PORT, like localhost:8001"),
        ("status --url localhost:0", "--url: 'localhost:0' is not HOST:PORT, like localhost:8001"),
        ("status --url a:1 --metrics-url a", "--metrics-url: 'a' is not HOST:PORT, like localhost:8001"),
        ("timeline live --out /no/where/x.html", "--out: /no/where/x.html: there is no folder /no/where"),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(command: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli_main.main(command.split())
    assert ended.value.code == 2
    assert f"error: argument {complaint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("study --input-len 5", "give --trace FILE, or both --input-len and --output-len"),
        ("serve --exit-timeout-secs -3", "--exit-timeout-secs is -3; it must be 0 or more"),
        ("timeline live --runtime-dir /no/where", "No such file or directory: '/no/where'"),
    ],
)
def test_what_argparse_cannot_judge_is_one_line_too(
    command: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(command.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("address", ["h-1.svc.local:8001", "127.0.0.1:1", "[::1]:8001", "dns:///llm:1", "unix:/run/s"])
def test_what_names_a_server_is_taken_as_it_is(address: str) -> None:
    assert server_address(address) == address
