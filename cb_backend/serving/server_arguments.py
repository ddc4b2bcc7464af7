"""What a server's command line says: `parse` for one that is to be started, `of_process` for one that runs.

The server takes `--name=value` and `--name value`; the last of a name counts.
"""

from __future__ import annotations

from pathlib import Path

DEFAULT_EXIT_TIMEOUT_S = 30.0
# Each use adds something, so all count; `parse` gives their values as lines of one text.
_RESTRICTIONS = {"http": "http-restricted-api", "grpc": "grpc-restricted-protocol"}
_HEADER_PREFIX = {"http": "", "grpc": "triton-grpc-protocol-"}


def parse(words: list[str]) -> dict[str, str]:
    """Values by name, without the dashes."""
    arguments: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            value = value if is_joined else following
            is_one_more = name in _RESTRICTIONS.values() and name in arguments
            arguments[name] = f"{arguments[name]}\n{value}" if is_one_more else value
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
    return reachable_host((address or "").removeprefix("ipv4:").removeprefix("ipv6:").strip("[]"))


def reachable_host(host: str) -> str:
    """Where this machine reaches what listens on `host`, which may be every interface."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listen_address(host: str, protocol: str) -> str:
    """`host` as the server wants to be told it: an IPv6 address is written in one way for HTTP and metrics, in another
    for gRPC, and means something else, without a word, in any other (24.10)."""
    if ":" not in host:
        return host
    return f"[{host}]" if protocol == "grpc" else f"ipv6:{host}"


def access_headers(arguments: dict[str, str], protocol: str, api: str) -> dict[str, str]:
    """What to send along to an `api` ("health", "model-repository") of the `http` or `grpc` port that the server keeps
    to those who know a key. Names of gRPC are in lower case, as gRPC has them."""
    headers = {}
    for restriction in arguments.get(_RESTRICTIONS[protocol], "").splitlines():
        apis, _, key = restriction.partition(":")
        name, _, value = key.partition("=")
        if api in apis.split(","):
            headers[_HEADER_PREFIX[protocol] + (name.lower() if protocol == "grpc" else name)] = value
    return headers
