"""The errors that a user of the server can meet, each with the class the server reports it under.

Nothing here knows the server: `serving` maps `ErrorCode` to its own codes. A message says what was wrong, with
which value, and what to do; it never contains a path, a trace or an internal name.
"""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Error classes, as they travel between processes."""

    INVALID_ARG = 1  # the request is wrong; sending it again will fail again
    UNAVAILABLE = 2  # full queue, engine restarting, draining: the same request may succeed later
    CANCELLED = 3
    INTERNAL = 4
    UNSUPPORTED = 5


class CbError(Exception):
    """Base of every error with a meaning for the user."""

    code = ErrorCode.INTERNAL


class InvalidRequestError(CbError):
    """The request cannot be served as it is: a parameter, a length, a type."""

    code = ErrorCode.INVALID_ARG


class UnavailableError(CbError):
    """The service cannot take or finish the request now."""

    code = ErrorCode.UNAVAILABLE


class ConfigError(CbError):
    """The deployment is wrong: engine arguments, checkpoint, memory. The message names the remedy."""

    code = ErrorCode.INVALID_ARG


class GaveUpError(Exception):
    """The engine cannot go on; its process ends and is started again by a front end."""
