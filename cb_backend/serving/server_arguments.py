"""What a server's command line says: `parse` for one that is to be started, `of_process` for one that runs.

The server takes `--name=value` and `--name value`; the last of a name counts.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT_EXIT_TIMEOUT_S = 30.0


def parse(words: list[str]) -> dict[str, str]:
    """Values by name, without the dashes."""
    arguments: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            arguments[name] = value if is_joined else following
    return arguments


def of_process(pid: int) -> dict[str, str]:
    """Those of a running server; empty where they cannot be read or the server is embedded."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return parse(words)


def is_on(arguments: dict[str, str], name: str, default: str = "true") -> bool:
    """A yes-or-no argument of the server."""
    return arguments.get(name, default).lower() in ("true", "1", "t", "")


def exit_timeout_s(arguments: dict[str, str]) -> float:
    """How long the server waits for open requests when it stops."""
    return float(arguments.get("exit-timeout-secs", DEFAULT_EXIT_TIMEOUT_S))


def client_host(arguments: dict[str, str], protocol: str) -> str:
    """Where this machine reaches the server's `http`, `grpc` or `metrics` port. Metrics are, unless they are told
    otherwise, where HTTP is."""
    address = arguments.get(f"{protocol}-address")
    if address is None and protocol == "metrics":
        return client_host(arguments, "http")
    return "127.0.0.1" if address in (None, "0.0.0.0", "::", "") else address
