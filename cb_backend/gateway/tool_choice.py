"""Which tools a request offers, whether one must be called, and how its calls will be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cb_backend.gateway.bodies import Body
from cb_backend.gateway.errors import bad_request
from cb_backend.gateway.schemas import moved_schema

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode`: none, auto, required, or named (`name` says which)."""

    mode: str = "none"
    tools: tuple[dict[str, Any], ...] = ()
    name: str = ""
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def names(self) -> frozenset[str]:
        """Of the functions that are offered."""
        return frozenset(map(_name, self.tools))

    def schema(self) -> dict[str, Any]:
        """JSON schema of an answer that is forced: arguments of the named function, or a list of calls."""
        if self.mode == "named":
            return _parameters(next(tool for tool in self.tools if _name(tool) == self.name))
        places = [f"/items/anyOf/{index}" for index in range(len(self.tools))] if len(self.tools) > 1 else ["/items"]
        calls = [_call_schema(tool, place) for tool, place in zip(self.tools, places, strict=True)]
        schema = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        return schema if self.is_parallel else {**schema, "maxItems": 1}


def take_tools(body: Body) -> ToolChoice:
    """Raises `ApiError` for tools or a choice that mean nothing."""
    body.refuse("functions", "it is OpenAI's older form; send 'tools'", ([],))
    body.refuse("function_call", "it is OpenAI's older form; send 'tool_choice'", ("none",))
    tools, is_parallel = body.take("tools", list) or [], body.take("parallel_tool_calls", bool)
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise bad_request(f"'tools[{index}]' must be {{'type': 'function', 'function': {{...}}}}", "tools")
        if not isinstance(tool["function"].get("name"), str) or not tool["function"]["name"]:
            raise bad_request(f"'tools[{index}].function.name' is missing", "tools")
        if not isinstance(tool["function"].get("parameters") or {}, dict):
            raise bad_request(f"'tools[{index}].function.parameters' must be an object", "tools")
    choice = body.left.pop("tool_choice", None) or ("auto" if tools else "none")
    mode, name = _read_choice(choice)
    if mode != "none" and not tools:
        raise bad_request("'tool_choice' needs 'tools'", "tool_choice")
    if mode == "named" and name not in {_name(tool) for tool in tools}:
        raise bad_request(f"'tool_choice' names {name!r}, which is not among the tools", "tool_choice")
    if mode == "none":
        return ToolChoice()
    if mode == "required" and len(tools) == 1 and is_parallel is False:  # nothing is left to say but the arguments
        mode, name = "named", _name(tools[0])
    return ToolChoice(mode, tuple(tools), name, is_parallel is not False)


def _read_choice(choice: Any) -> tuple[str, str]:
    if choice in ("none", "auto", "required"):
        return str(choice), ""
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if isinstance(name, str):
            return "named", name
    raise bad_request(
        f"'tool_choice' is {choice!r}; it must be none, auto, required, or "
        "{'type': 'function', 'function': {'name': ...}}",
        "tool_choice",
    )


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or _ANY_OBJECT


def _call_schema(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """`place`: where it will stand in the whole schema, as a JSON pointer."""
    parameters = moved_schema(_parameters(tool), f"{place}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"enum": [_name(tool)]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
