"""Chat templates' ends and marks in the shapes that families publish: what tells calls and reasoning apart.

Written after the templates, not copied: each has the marks of its family, in its family's place.
"""

from __future__ import annotations

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_HERMES_TOOLS = (
    "{% if tools %}For each call, return JSON within <tool_call></tool_call>:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{{ tools | tojson }}{% endif %}'
)
QWEN2 = _HERMES_TOOLS + _TURNS + _OPEN
QWEN3 = (
    _HERMES_TOOLS + _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN3_THINKING = (
    _HERMES_TOOLS + _TURNS + "{% if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Open unless it is told otherwise.
SWITCHED = (
    _HERMES_TOOLS + _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
QWEN3_CODER = (
    "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    "{% endif %}" + _TURNS + _OPEN
)  # fmt: skip
GLM4_5 = (
    "{% if tools %}<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    "{% endif %}" + _TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA3_1 = (
    "{% if tools is not none %}Environment: ipython\n{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}<|python_tag|>"
    "{% endif %}{{ m.content }}<|eot_id|>{% endfor %}"
)
LLAMA3_2 = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
    "value}.{{ tools | tojson }}{% endif %}" + _TURNS + _OPEN
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | tojson }}"
    "{% elif m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}namespace functions { {{ tools | tojson }} }{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.tool_calls %}<\uff5ctool\u2581calls\u2581begin\uff5c>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n{% endif %}"
)
PLAIN = _TURNS + _OPEN
