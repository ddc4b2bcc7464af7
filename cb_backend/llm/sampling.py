"""What a caller asks of the answers to a prompt: the served request's parameters, by the same names.

Nothing is checked or defaulted here: what is set goes through the reader of served requests, so that a value means, and
is refused as, what it would be there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.wire.parameters import GivenParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(GivenParameters):
    """Sampling and stopping rules of one prompt, with vLLM's names and meanings. None: left out, so the default counts.

    The parameters and their defaults stand in the reference of requests (docs/guide/requests.md).
    """

    structured_outputs: dict[str, Any] | None = None  # {"json": schema}, {"regex": ...}, {"choice": [...]}, ...

    def to_json(self) -> str:
        """The parameters that are set, as the JSON text of a served request's.

        Raises `InvalidRequestError` for a value that JSON cannot hold.
        """
        given = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None:
                given[name] = list(value) if isinstance(value, (tuple, set, frozenset)) else value
        for name, value in given.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"{name} is {value!r:.80}, which cannot be written as JSON: {error}"
                ) from None
        return json.dumps(given)
