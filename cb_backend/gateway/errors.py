"""What goes wrong with a request, as OpenAI's clients expect to be told: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import grpc

# What the server's streams tell is a text alone. These stand in those of our backend that ask to try again (a full
# queue, an engine that starts, a server that drains); releases from 26.04 on tell the code as well.
_AGAIN = ("again later", "send the request again", "send it again", "to another server", "timed out after")
_FULL = ("queue is full", "queue holds")

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
    """An answer with an HTTP status of 400 and more. `param`: the field of the body that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        kind = _TYPE_OF.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def from_stream(message: str) -> ApiError:
    """Of an error that came in a stream of responses: a text, for which a status has to be found."""
    if any(text in message for text in _FULL):
        return ApiError(429, message)
    if any(text in message for text in _AGAIN):
        return ApiError(503, message)
    if "log says why" in message or "log has the reason" in message:
        return ApiError(500, message)
    return bad_request(message)


def from_rpc(error: grpc.RpcError, url: str) -> ApiError:
    """Of a call to the server that failed as a whole."""
    code, text = error.code(), error.details() or str(error)
    if code is grpc.StatusCode.UNAVAILABLE and ("connect" in text.lower() or "Socket closed" in text):
        return ApiError(503, f"no Triton server answers at {url}: {text}")
    return ApiError(STATUS_OF.get(code, 500), text)
