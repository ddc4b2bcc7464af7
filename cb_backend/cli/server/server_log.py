"""The server's log: what of it is worth showing, and the one line in it that says why a start failed."""

from __future__ import annotations

import re

_LOG_LINE = re.compile(r"^([IWEF])\d{4} [\d:.]+ \d+ (\S+?):\d+\] (.*)$")
_LOAD_FAILURE = re.compile(r"failed to load '([^']+)' version \d+: [\w ]+: (.*)")
_UNREADABLE = re.compile(r"Poll failed for model directory '([^']+)': (.*?)\"?$")
_PROTO_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (\d+):(\d+): (.*)")
_BAD_ARGUMENT = re.compile(r"unrecognized option '|^Bad option: |^Invalid option value")
_USAGE = ("Usage: tritonserver", "  --", "\t")  # the list of all options, after one that it does not know
# Errors whose text is a sentence for the user; other classes' names say something.
_OWN_ERROR = re.compile(r"^(TritonModelException|ConfigError): ")
# What every machine without a GPU is told at each start; true, and of no use to the reader.
_NOISE = (
    "pinned system memory",
    "CudaDriverHelper",
    "NVML",
    "DCGM",
    "in-flight inferences",
    "unable to create stream for ",  # said of each ensemble
)


def is_worth_showing(line: str) -> bool:
    """Whether a line of the server's output says something to the one who started it: warnings, errors, and what models
    and engines say themselves; not the server's tables and progress."""
    if not line.strip() or line[0] in "+|" or line.startswith(_USAGE) or any(word in line for word in _NOISE):
        return False
    match = _LOG_LINE.match(line)
    if match is None:
        return True
    severity, source, _ = match.groups()
    return severity != "I" or source.endswith(".py")


def failure_reason(lines: list[str], exit_code: int | None) -> str:
    """One line that says why a server did not come up, out of its output."""
    if failures := load_failures(lines):
        return failures[0]
    refused = [line.rpartition("tritonserver: ")[2] for line in lines if _BAD_ARGUMENT.search(line)]
    if refused:
        return f"the server refused its arguments (those after `--` are handed on as they are): {' '.join(refused)}"
    for number, line in enumerate(lines):
        if match := _UNREADABLE.search(line):
            parsed = [found for text in lines[:number] if (found := _PROTO_ERROR.search(text))]
            where = (
                f"; line {parsed[-1].group(1)}, column {parsed[-1].group(2)}: {parsed[-1].group(3)}" if parsed else ""
            )
            return f"model {match.group(1)!r} could not be read: {match.group(2)}{where}"
    for line in reversed(lines):
        if line.startswith(("error:", "Error:", "E", "F")) and is_worth_showing(line):
            match = _LOG_LINE.match(line)
            return f"the server ended before it was ready: {match.group(3) if match else line}"
    last = next((line for line in reversed(lines) if is_worth_showing(line)), "it printed nothing")
    return f"the server ended with exit code {exit_code} before it was ready: {last}"


def load_failures(lines: list[str]) -> list[str]:
    """A sentence for each model that could not be loaded, in the order of the log."""
    failures: dict[str, str] = {}
    for line in lines:
        if match := _LOAD_FAILURE.search(line):
            # The rest of the text is a Python trace, after an escaped end of line.
            text = match.group(2).split("\\n")[0].strip().rstrip('"')
            reason = f"model {match.group(1)!r} could not be loaded: {_OWN_ERROR.sub('', text)}"
            failures.setdefault(match.group(1), reason)
    return list(failures.values())
