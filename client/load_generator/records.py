"""What happened to one request, and its line in the history file. Times are seconds after the start of the run."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Status(str, Enum):
    """How a request ended. Every request that was sent has exactly one."""

    OK = "ok"  # the final response came, without an error
    REFUSED = "refused"  # the server said it cannot take it now
    ERROR = "error"  # any other error, of the server or of the connection
    CANCELLED = "cancelled"  # by this client, as planned
    UNFINISHED = "unfinished"  # still open when the run was ended


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One sent request. Filled by `wire.exchange` while it runs, constant afterwards. Compared by identity."""

    request_id: int
    process: int
    scheduled_s: float  # closed loop: when its stream was free to send it
    num_prompt_tokens: int  # as planned
    num_output_tokens_wanted: int
    sent_s: float = 0.0  # when this client began to send it
    written_s: float = 0.0  # when it had left this client: until then nothing but the client itself is waited for
    end_s: float = 0.0  # final response, error or cancellation
    # Arrays, not lists of pairs: a million chunks are 12 MB, and pickling them between processes is a copy.
    chunk_times: array[float] = field(default_factory=lambda: array("d"))  # arrival of each response with tokens
    chunk_tokens: array[int] = field(default_factory=lambda: array("I"))  # its number of tokens
    num_output_tokens: int = 0  # sum of chunk_tokens, kept so that live progress need not add them up
    num_responses: int = 0  # all of them, those without tokens included
    finish_reason: str | None = None
    status: Status = Status.UNFINISHED
    error: str | None = None
    is_final: bool = False  # a response marked final arrived

    def to_json(self) -> dict[str, Any]:
        """The history line as a dictionary."""
        return {
            "id": self.request_id,
            "process": self.process,
            "scheduled_s": round(self.scheduled_s, 6),
            "sent_s": round(self.sent_s, 6),
            "written_s": round(self.written_s, 6),
            "end_s": round(self.end_s, 6),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens_wanted": self.num_output_tokens_wanted,
            "chunks": [[round(t, 6), n] for t, n in zip(self.chunk_times, self.chunk_tokens, strict=True)],
            "num_responses": self.num_responses,
            "finish_reason": self.finish_reason,
            "status": self.status.value,
            "error": self.error,
            "is_final": self.is_final,
        }


def write_history(path: Path, run_label: str, records: Iterable[RequestRecord]) -> None:
    """Append one JSON line a request to `path`."""
    with path.open("a", encoding="utf-8") as lines:
        for record in records:
            lines.write(json.dumps({"run": run_label, **record.to_json()}) + "\n")
