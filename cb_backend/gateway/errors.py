"""What goes wrong with a request, as OpenAI's clients expect to be told: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
from collections.abc import Set

import grpc

# What the server's streams tell is a text alone. These stand in those of our backend that ask to try again (a full
# queue, an engine that starts, a server that drains); releases from 26.04 on tell the code as well.
_AGAIN = ("again later", "send the request again", "send it again", "to another server", "timed out after")
# The request's own time is over. In the queue it may be the server's own limit, and another try may find it empty.
_OWN_LIMIT = re.compile(r"timed out after \d+ ms \(timeout_ms\)")
_FULL = ("queue is full", "queue holds")
# Of a prompt that the model's length or the cache has no room for: ours, and vLLM's.
_TOO_LONG = ("(max_model_len", "max_model_len=", "but the whole KV cache holds", "maximum context length")
# The field with which what the model refuses begins: `max_tokens must be ...`, `unknown sampling parameter "x"`.
_FIELD = re.compile(r"(?:unknown sampling parameter )?[\"']?([a-zA-Z_]\w*)")
_SENT_AS = {"max_tokens": "max_completion_tokens"}  # OpenAI's newer names of what the model has under another
TOO_LONG_CODE = "context_length_exceeded"  # OpenAI's: clients shorten the conversation then

STATUS_OF = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPE_OF = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer with an HTTP status of 400 and more. `param`: the field of the body that is wrong. `is_final`: OpenAI's
    clients, which send again what has failed at the server, are told not to."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.is_final = is_final

    def find_param(self, names: Set[str]) -> None:
        """Sets `param` where the message begins with one of `names`, the fields that the client has sent."""
        field = _FIELD.match(self.message)
        if self.status == 400 and self.param is None and field is not None:
            self.param = next((name for name in (field[1], _SENT_AS.get(field[1])) if name in names), None)

    def body(self) -> dict[str, object]:
        kind = _TYPE_OF.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.is_final:
            return {"x-should-retry": "false"}
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def from_stream(message: str) -> ApiError:
    """Of an error that came in a stream of responses: a text, for which a status has to be found."""
    if _OWN_LIMIT.match(message):
        return _out_of_time(message)
    if any(text in message for text in _FULL):
        return ApiError(429, message)
    if any(text in message for text in _AGAIN):
        return ApiError(503, message)
    if "log says why" in message or "log has the reason" in message:
        return ApiError(500, message)
    return _refused(400, message)


def from_rpc(error: grpc.RpcError, url: str) -> ApiError:
    """Of a call to the server that failed as a whole."""
    code, text = error.code(), error.details() or str(error)
    if code is grpc.StatusCode.UNAVAILABLE and ("connect" in text.lower() or "Socket closed" in text):
        return ApiError(503, f"no Triton server answers at {url}: {text}")
    if _OWN_LIMIT.match(text):
        return _out_of_time(text)
    return _refused(STATUS_OF.get(code, 500), text)


def _out_of_time(message: str) -> ApiError:
    """Of a request whose `timeout_ms` is over: sent again it would cost as much, and its client wants it no more."""
    return ApiError(504, message, is_final=True)


def _refused(status: int, message: str) -> ApiError:
    is_too_long = status == 400 and any(text in message for text in _TOO_LONG)
    return ApiError(status, message, code=TOO_LONG_CODE if is_too_long else None)
