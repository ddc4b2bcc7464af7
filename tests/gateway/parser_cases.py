"""Answers of every form, and what they mean."""

from __future__ import annotations

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, Reasoning
from cb_backend.gateway.tool_choice import ToolChoice

TOOL, *OTHERS = (
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "clock", "f")
)
AUTO = ToolChoice("auto", (TOOL, *OTHERS))
NO_TOOLS = ToolChoice()
ARGUMENTS = '{"city": "Lyon } </tool_call> \\" [x]", "days": [1, {"a": 2}], "note": "größer"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
SECOND = '{"name": "clock", "arguments": {}}'
TWO_CALLS = [
    CallStart(0, "weather"),
    CallArguments(0, ARGUMENTS),
    CallStart(1, "clock"),
    CallArguments(1, "{}"),
]
ONE_CALL = [CallStart(0, "clock"), CallArguments(0, "{}")]
SHORT = '{"name": "weather", "arguments": {"a": 1}'  # a brace is missing: a usual slip of small models
SHORT_CALLS = [CallStart(0, "weather"), CallArguments(0, '{"a": 1}'), CallStart(1, "clock"), CallArguments(1, "{}")]

UNKNOWN = '{"name": "other", "arguments": {}}'  # nobody offers it
PERSON = '{"name": "Alice", "age": 3}'

# title: (tools, reasoning, choice, text, what it means; "content": that it is content, to the last character)
CASES: dict[str, tuple[str, str, ToolChoice, str, list[Event] | str]] = {
    "plain": ("auto", "think", NO_TOOLS, "Hello <tool_call> {", [Content("Hello <tool_call> {")]),
    "hermes": (
        "hermes", "think", AUTO, f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{SECOND}</tool_call>",
        [Content("Let me look."), *TWO_CALLS],
    ),
    "hermes, found": ("auto", "think", AUTO, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{SECOND}", TWO_CALLS),
    "hermes, text after": (
        "hermes", "none", AUTO, f"<tool_call>{SECOND}</tool_call> and so on",
        [CallStart(0, "clock"), CallArguments(0, "{}"), Content("and so on")],
    ),
    "hermes, no call": ("hermes", "none", AUTO, "a < b <tool <tool_call>no", [Content("a < b <tool <tool_call>no")]),
    "hermes, no name": ("hermes", "none", AUTO, 'x <tool_call>{"a": 1}', [Content('x <tool_call>{"a": 1}')]),
    "hermes, arguments first": (
        "hermes", "none", AUTO, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        [CallStart(0, "f"), CallArguments(0, '{"a": 1}')],
    ),
    "hermes, arguments as text": (
        "hermes", "none", AUTO, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [CallStart(0, "f"), CallArguments(0, '{"a": 1}')],
    ),
    "hermes, no arguments": (
        "hermes", "none", AUTO, '<tool_call>{"name": "f", "arguments": null }', [CallStart(0, "f")],
    ),
    "hermes, odd arguments": (
        "hermes", "none", AUTO, '<tool_call>{"arguments": 12, "name": "f"}',
        [CallStart(0, "f"), CallArguments(0, "12")],
    ),
    "hermes, a brace too few": (
        "hermes", "none", AUTO, f"<tool_call>{SHORT}</tool_call>\n<tool_call>{SECOND}</tool_call> and so on",
        [*SHORT_CALLS, Content("and so on")],
    ),
    "hermes, a brace and the mark too few": (
        "hermes", "none", AUTO, f"<tool_call>{SHORT}\n<tool_call>{SECOND}", SHORT_CALLS,
    ),
    "hermes, a brace too many": (
        "hermes", "none", AUTO, f"<tool_call>{SHORT}}}}} \n}} </tool_call> <tool_call>{SECOND}}}", SHORT_CALLS,
    ),
    "hermes, a brace too many and a mark too few": (
        "hermes", "none", AUTO, f"<tool_call>{SHORT}}}}}\n<tool_call>{SECOND}}}</tool_call>", SHORT_CALLS,
    ),
    "hermes, a brace after a call": (
        "hermes", "none", AUTO, f"<tool_call>{SECOND} }} is it", [*ONE_CALL, Content("} is it")],
    ),
    "hermes, unfinished arguments": (
        "hermes", "none", AUTO, '<tool_call>{"name": "weather", "arguments": {"a": [1 < 2</tool_call>then',
        [CallStart(0, "weather"), CallArguments(0, '{"a": [1 < 2'), Content("then")],
    ),
    "hermes, a mark in a text": (
        "hermes", "none", AUTO,
        '<tool_call>{"name": "weather", "arguments": {"a": "</tool_call><tool_call>"}</tool_call>.',
        [CallStart(0, "weather"), CallArguments(0, '{"a": "</tool_call><tool_call>"}'), Content(".")],
    ),
    "hermes, a name and a brace too few": (
        "hermes", "none", AUTO, '<tool_call>{"name": "weather"</tool_call>.', [CallStart(0, "weather"), Content(".")],
    ),
    "hermes, arguments as text and a brace too few": (
        "hermes", "none", AUTO, '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"</tool_call>.',
        [*SHORT_CALLS[:2], Content(".")],
    ),
    "hermes, arguments as text and nothing after": (
        "hermes", "none", AUTO, '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"', SHORT_CALLS[:2],
    ),
    "hermes, arguments twice": (
        "hermes", "none", AUTO, f'<tool_call>{SHORT}, "parameters": {{"b": 2}}, "arguments": "c"}}', SHORT_CALLS[:2],
    ),
    "llama3": (
        "llama3", "think", AUTO, CALL.replace("arguments", "parameters") + "; " + SECOND.replace("arg", "arg"),
        TWO_CALLS,
    ),
    "llama3, tagged": (
        "auto", "think", AUTO, "<|python_tag|>" + SECOND, [CallStart(0, "clock"), CallArguments(0, "{}")],
    ),
    "llama3, an object of the answer": ("auto", "think", AUTO, '{"a": 1} is it', [Content('{"a": 1} is it')]),
    "hermes, a tool that was not offered": (
        "hermes", "none", AUTO, f"<tool_call>{UNKNOWN}</tool_call>", [CallStart(0, "other"), CallArguments(0, "{}")],
    ),
    "hermes, no call in the marks": (
        "hermes", "none", AUTO, f"Is\n<tool_call> {PERSON}\n</tool_call>\n{PERSON} ?", "content",
    ),
    "hermes, no call and then one": (
        "hermes", "none", AUTO, f'<tool_call>{{"name": "other"}}</tool_call> <tool_call>{SECOND}</tool_call>',
        [Content('<tool_call>{"name": "other"}</tool_call>'), *ONE_CALL],
    ),
    "hermes, no mark": ("hermes", "none", AUTO, SECOND, "content"),
    "auto, an object": ("auto", "think", AUTO, f" {PERSON}\n", "content"),
    "auto, an object in Hermes' marks": (
        "auto", "think", AUTO, f"<tool_call>{PERSON}</tool_call>", "content",
    ),
    "llama3, an object": ("llama3", "none", AUTO, f"{PERSON} is {SECOND}", "content"),
    "llama3, an object with a name at its end": ("llama3", "none", AUTO, '{"age": {"a": 1}, "name": "Ann"}', "content"),
    "llama3, a tool that was not offered": ("llama3", "none", AUTO, f"{UNKNOWN} {SECOND}", "content"),
    "llama3, a tool alone": ("llama3", "none", AUTO, '{"name": "weather", "age": 3} ', "content"),
    "llama3, a cut call": ("llama3", "none", AUTO, '{"name": "weather", "param', "content"),
    "llama3, not offered but tagged": (
        "llama3", "none", AUTO, f"<|python_tag|>{UNKNOWN}; {UNKNOWN}",
        [CallStart(0, "other"), CallArguments(0, "{}"), CallStart(1, "other"), CallArguments(1, "{}")],
    ),
    "llama3, no call but tagged": ("llama3", "none", AUTO, f"<|python_tag|> {PERSON}", "content"),
    "llama3, arguments first": (
        "llama3", "none", AUTO, '{"type": "function", "parameters": {"a": 1}, "name": "f"}',
        [CallStart(0, "f"), CallArguments(0, '{"a": 1}')],
    ),
    "llama3, text after": ("llama3", "none", AUTO, f"{SECOND};\n and so on;", [*ONE_CALL, Content("and so on;")]),
    "llama3, an object after": (
        "llama3", "none", AUTO, f"{SECOND}; {PERSON} {SECOND}", [*ONE_CALL, Content(f"{PERSON} {SECOND}")],
    ),
    "llama3, a brace too many": ("llama3", "none", AUTO, f"{SHORT}}}}}; {SECOND}}}", SHORT_CALLS),
    "llama3, a brace too few": ("llama3", "none", AUTO, f"{SHORT}; {SECOND}", SHORT_CALLS),
    "llama3, two objects of the answer": (
        "llama3", "none", AUTO, f'{{"a": 1}}{SECOND}', [Content(f'{{"a": 1}}{SECOND}')],
    ),
    "llama3, text": ("llama3", "none", AUTO, "<|python is", [Content("<|python is")]),
    "mistral, a list": (
        "mistral", "think", AUTO, f"Yes.\n[TOOL_CALLS] [{CALL}, {SECOND}]", [Content("Yes."), *TWO_CALLS],
    ),
    "mistral, a list, a brace too few": ("mistral", "none", AUTO, f"[TOOL_CALLS][{SHORT}, {SECOND}]", SHORT_CALLS),
    "mistral, newer": (
        "mistral", "think", AUTO, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock{{}}", TWO_CALLS,
    ),
    "mistral, with ids of calls": (
        "mistral", "none", AUTO,
        f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ARGUMENTS}[TOOL_CALLS] clock [CALL_ID] a1b [ARGS] {{}}",
        TWO_CALLS,
    ),
    "mistral, an object without a list": (
        "mistral", "none", AUTO, f"[TOOL_CALLS] {CALL}\n[TOOL_CALLS]{SECOND}", TWO_CALLS,
    ),
    "mistral, a tool that was not offered": (
        "mistral", "none", AUTO, f"[TOOL_CALLS]other{{}}[TOOL_CALLS] [{UNKNOWN}]",
        [CallStart(0, "other"), CallArguments(0, "{}"), CallStart(1, "other"), CallArguments(1, "{}")],
    ),
    "mistral, no call": ("mistral", "none", AUTO, "[TOOL_CALLS] I cannot do it", [Content("I cannot do it")]),
    "mistral, no call after text": (
        "mistral", "none", AUTO, "Well.\n[TOOL_CALLS] I cannot {do} it ", [Content("Well.\n I cannot {do} it ")],
    ),
    "mistral, one word": ("mistral", "none", AUTO, "[TOOL_CALLS] Sorry", [Content("Sorry")]),
    "mistral, no call in a list": (
        "mistral", "none", AUTO, f"[TOOL_CALLS] [{PERSON}, {SECOND}] it is", [Content(f"[{PERSON}, {SECOND}] it is")],
    ),
    "mistral, a list of something else": (
        "mistral", "none", AUTO, "[TOOL_CALLS] [1] and see [2] {3}", [Content("[1] and see [2] {3}")],
    ),
    "mistral, a name and something else": (
        "mistral", "none", AUTO, "[TOOL_CALLS]see [1] {2}", [Content("see [1] {2}")],
    ),
    "mistral, no call and then one": (
        "mistral", "none", AUTO, "[TOOL_CALLS]Not so. [TOOL_CALLS]clock{} then",
        [Content("Not so."), *ONE_CALL, Content("then")],
    ),
    "mistral, text after a list": (
        "mistral", "none", AUTO, f"[TOOL_CALLS] [{CALL}, {SECOND}]\nand {{so}} on [TOOL_CALLS",
        [*TWO_CALLS, Content("and {so} on [TOOL_CALLS")],
    ),
    "mistral, text in a list": (
        "mistral", "none", AUTO, f"[TOOL_CALLS] [{SECOND}, and so on]", [*ONE_CALL, Content("and so on]")],
    ),
    "mistral, an object in a list": (
        "mistral", "none", AUTO, f"[TOOL_CALLS] [{SECOND}, {PERSON}]", [*ONE_CALL, Content(f"{PERSON}]")],
    ),
    "mistral, text after a call": (
        "mistral", "none", AUTO, "[TOOL_CALLS]clock[ARGS]{} \nand so on", [*ONE_CALL, Content("and so on")],
    ),
    "mistral, a brace too few": (
        "mistral", "none", AUTO, '[TOOL_CALLS]weather[ARGS]{"a": ["[TOOL_CALLS]", [[1][TOOL_CALLS]clock[ARGS]{}',
        [CallStart(0, "weather"), CallArguments(0, '{"a": ["[TOOL_CALLS]", [[1]'), *SHORT_CALLS[2:]],
    ),
    "mistral, a list, a brace and a bracket too few": (
        "mistral", "none", AUTO, f"[TOOL_CALLS][{SHORT}[TOOL_CALLS][{SECOND}", SHORT_CALLS,
    ),
    "mistral, a brace too many": (
        "mistral", "none", AUTO, '[TOOL_CALLS]weather{"a": 1}}[TOOL_CALLS][{"name": "clock", "arguments": {}}}]',
        SHORT_CALLS,
    ),
    "mistral, cut": ("mistral", "none", AUTO, "Yes [TOOL_CALLS][{\"na", [Content("Yes [{\"na")]),
    "mistral, a brace too few, and cut in a mark": (
        "mistral", "none", AUTO, f"[TOOL_CALLS][{SHORT}[TOOL", SHORT_CALLS[:2],
    ),
    "mistral, text": ("mistral", "none", AUTO, "see [1] and [TOOL", [Content("see [1] and [TOOL")]),
    "named": ("auto", "think", ToolChoice("named", (TOOL,), "weather"), ARGUMENTS, TWO_CALLS[:2]),
    "required": (
        "auto", "think", ToolChoice("required", (TOOL,)),
        f"[{CALL.replace('arguments', 'parameters')},\n {SECOND.replace('arguments', 'parameters')}]", TWO_CALLS,
    ),
    "required, a brace too few": (
        "auto", "think", ToolChoice("required", (TOOL,)), f"[{SHORT} , {SHORT}]",
        [*SHORT_CALLS[:2], CallStart(1, "weather"), CallArguments(1, '{"a": 1}')],
    ),
    "reasoning": (
        "auto", "think", NO_TOOLS, "\n<think>\nWell < </thin. \n</think>\n\nYes. ",
        [Reasoning("Well < </thin."), Content("Yes. ")],
    ),
    "reasoning, opened by the template": (
        "auto", "think-open", NO_TOOLS, "Well. </think> Yes.", [Reasoning("Well."), Content("Yes.")],
    ),
    "reasoning, cut": ("auto", "think", NO_TOOLS, "<think> Well </th", [Reasoning("Well </th")]),
    "reasoning, empty": ("auto", "think", NO_TOOLS, "<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
    "reasoning, none": ("auto", "think", NO_TOOLS, " <thin ice", [Content(" <thin ice")]),
    "reasoning, then a call": (
        "hermes", "think", AUTO, f"<think>I must ask.</think>\n<tool_call>{SECOND}</tool_call>",
        [Reasoning("I must ask."), CallStart(0, "clock"), CallArguments(0, "{}")],
    ),
    "gpt-oss": (
        "gpt-oss", "gpt-oss", AUTO,
        "<|channel|>analysis<|message|>Need a tool.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        [Reasoning("Need a tool."), *TWO_CALLS[:2]],
    ),
    "gpt-oss, recipient first": (
        "gpt-oss", "gpt-oss", AUTO,
        "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
        [CallStart(0, "clock"), CallArguments(0, "{}")],
    ),
    "gpt-oss, recipient first, after the prompt's own beginning": (
        "gpt-oss", "gpt-oss", AUTO, f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        TWO_CALLS[:2],
    ),
    "gpt-oss, no recipient": ("gpt-oss", "gpt-oss", NO_TOOLS, "to=them it is new", [Content("to=them it is new")]),
    "hermes, words after a brace too few": (
        "hermes", "none", AUTO, f"<tool_call>{SHORT}\n\nI have asked, and wait.</tool_call>",
        [CallStart(0, "weather"), CallArguments(0, '{"a": 1}'), Content("I have asked, and wait.</tool_call>")],
    ),
    "llama3, words after a brace too few": (
        "llama3", "none", AUTO, f"{SHORT}\n\nI have asked, and wait.",
        [CallStart(0, "weather"), CallArguments(0, '{"a": 1}'), Content("I have asked, and wait.")],
    ),
    "required, an object that is no call": (
        "auto", "think", ToolChoice("required", (TOOL,)), f"[{{{CALL}]", TWO_CALLS[:2],
    ),
    "gpt-oss, an answer": (
        "gpt-oss", "gpt-oss", NO_TOOLS,
        "<|channel|>analysis<|message|>2 < 3<|end|><|start|>assistant<|channel|>final<|message|>Yes <|b.<|return|>",
        [Reasoning("2 < 3"), Content("Yes <|b.")],
    ),
    "gpt-oss, no markup": ("gpt-oss", "gpt-oss", NO_TOOLS, "Yes.", [Content("Yes.")]),
}  # fmt: skip
