"""What a request's output must look like: a JSON schema, a regular expression, a list of choices or a grammar.

Plain data with limits that are checked before anything is compiled. What such a text means, and which token may come
next, is `engine.grammar.grammar_compiler`'s and `engine.grammar.guide`'s work; reading the many spellings of clients is
`front_end.wire.structured_json`'s.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cb_backend.contracts.errors import InvalidRequestError

GrammarKind = Literal["json", "regex", "choice", "grammar"]

MAX_GRAMMAR_BYTES = 64 * 1024  # of the schema, expression, list of choices or grammar, as UTF-8
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 4096
MAX_NESTING = 64  # of a JSON schema's objects and lists

ANY_JSON_OBJECT = '{"type":"object"}'


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One grammar as a client gave it. Equal ones are compiled once, so it serves as a key."""

    kind: GrammarKind
    text: str  # json: the schema; choice: a JSON list of strings; grammar: Lark, or GBNF where it has "::="
    is_compact: bool = False  # json: no white space between tokens

    def check(self) -> None:
        """Raise `InvalidRequestError` for a text that is empty or too large. Costs next to nothing."""
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if not self.text.strip():
            raise InvalidRequestError(f"structured output: the {self.kind} is empty; leave it out")
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"structured output: the {self.kind} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
            )
