"""Where a server listens: names to addresses, and whether anybody answers there. Starts nothing."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from types import MappingProxyType

from cb_backend.cli.paths import CliError

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def numeric_host(host: str) -> str:
    """The address that a name stands for: the server would listen where nobody is, without a word (24.10).

    Raises `CliError` for a name that nobody knows, and for an address that another machine has.
    """
    try:
        address = str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
        return address
    except (OSError, UnicodeError) as error:
        raise CliError(
            f"--host {host!r} is no address of this machine ({error}); use one, or 0.0.0.0 for all"
        ) from None


def family_of(host: str) -> socket.AddressFamily:
    """Of an address in numbers."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def with_port(host: str, port: int | str) -> str:
    """As URLs have it: an IPv6 address in brackets."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def why_taken(host: str, port: int) -> str | None:
    """Why nobody can listen there now; None if one can."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def check_port(host: str, port: int, flag: str) -> None:
    """Raises `CliError` that names the port and its flag where nobody can listen there now."""
    if not 1 <= port <= 65535:
        raise CliError(f"port {port} cannot be used; {flag} must be between 1 and 65535")
    if (reason := why_taken(host, port)) is not None:
        raise CliError(f"port {port} of {host} cannot be used ({reason}); choose another: {flag}")


def http_status(address: str, path: str, headers: Mapping[str, str] = NO_HEADERS, timeout: float = 5.0) -> int | None:
    """Status of a GET, None if nobody answers, or the address is none of HTTP's (`unix:/a/socket`)."""
    try:
        connection = http.client.HTTPConnection(address, timeout=timeout)
    except http.client.InvalidURL:
        return None
    try:
        connection.request("GET", path, headers=dict(headers))
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def refuse_http(address: str) -> None:
    """For what speaks gRPC alone. Raises `CliError` at a Triton server's other port. What passes gRPC on may speak HTTP
    too, and answers as it likes."""
    if http_status(address, "/v2") == 200:
        raise CliError(
            f"what answers at {address} speaks HTTP; name the server's gRPC port (8001 unless it was told otherwise)"
        )
