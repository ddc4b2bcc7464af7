"""What a gateway runs with, in a form that worker processes can be given."""

from __future__ import annotations

import hmac
import json
import logging
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.gateway.adapters import DEFAULT_SEPARATOR
from cb_backend.gateway.parsers import REASONING_NAMES, TOOL_NAMES, Reading

ENVIRONMENT_VARIABLE = "CB_BACKEND_GATEWAY"
DEFAULT_BODY_MIB = 4
_COMMENT = re.compile(r"(^|\s)#.*")  # a key may hold the sign

logger = logging.getLogger("cb_backend.gateway")


@dataclass(frozen=True, slots=True)
class Settings:
    """`tool_parsers`, `reasoning_parsers`: by the model's name, "" for every other."""

    url: str
    api_key_file: str | None = None
    max_body_bytes: int = DEFAULT_BODY_MIB << 20
    allow_origins: tuple[str, ...] = ()
    tool_parsers: dict[str, str] = field(default_factory=dict)
    reasoning_parsers: dict[str, str] = field(default_factory=dict)
    lora_separator: str = DEFAULT_SEPARATOR  # between a model's name and an adapter's; empty: no adapters
    model_repository: str | None = None  # the server's, where names of adapters can be looked up

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "allow_origins": tuple(values["allow_origins"])})

    def reading(self, model: str) -> Reading:
        """How this model's answers are read."""
        tools = self.tool_parsers.get(model) or self.tool_parsers.get("") or "auto"
        reasoning = self.reasoning_parsers.get(model) or self.reasoning_parsers.get("") or "auto"
        return Reading(tools, reasoning)

    def api_keys(self) -> ApiKeys | None:
        return None if self.api_key_file is None else ApiKeys(Path(self.api_key_file))


class ApiKeys:
    """Keys of a file, one a line; `#` at a line's beginning or after white space begins a comment.

    A changed file counts from the next request on.
    """

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` where the file cannot be read or has no key."""
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._keys: list[bytes] = []
        self._is_told = False  # that the file is wrong now
        self._read()

    def _read(self) -> None:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            lines = [_COMMENT.sub("", line).strip() for line in self._path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API keys' file {self._path} cannot be read: {error}") from None
        keys = [line.encode() for line in lines if line]
        if not keys:
            raise ConfigError(f"the API keys' file {self._path} has no key: write one a line")
        self._stamp, self._keys = stamp, keys

    def are_right(self, authorization: bytes) -> bool:
        """Whether the header `Authorization` names one of them. A file that has become unreadable keeps its keys."""
        try:
            self._read()
            self._is_told = False
        except ConfigError as error:
            if not self._is_told:
                logger.warning("%s; the keys that it had stay valid", error)
            self._is_told = True
        kind, _, key = authorization.strip().partition(b" ")
        given = key.strip() if kind.lower() == b"bearer" else b""
        matches = [hmac.compare_digest(given, own) for own in self._keys]  # all of them: no time tells which
        return any(matches)


def read_names(option: str, values: list[str]) -> dict[str, str]:
    """Of `NAME` or `MODEL=NAME`, each. Raises `ConfigError` for a name that is not known."""
    known = TOOL_NAMES if option == "--tool-parser" else REASONING_NAMES
    result = {}
    for value in values:
        model, _, name = value.rpartition("=")
        if name not in known:
            raise ConfigError(f"{option} {value!r}: {name!r} is none of {', '.join(known)}")
        result[model] = name
    return result
