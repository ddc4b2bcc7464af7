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

    Raises `CliError` for a name that nobody knows.
    """
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise CliError(
            f"--host {host!r} is no address of this machine ({error}); use one, or 0.0.0.0 for all"
        ) from None


def http_status(address: str, path: str, headers: Mapping[str, str] = NO_HEADERS, timeout: float = 5.0) -> int | None:
    """Status of a GET, None if nobody answers."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", path, headers=dict(headers))
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
