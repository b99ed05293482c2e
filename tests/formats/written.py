"""How models of each format write a call, by the documentation and chat templates of their makers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]
GEMMA_QUOTE = '<|"|>'


def raw(value: Any) -> str:
    """A value without quotes: a string as it is, anything else in JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(name: str, arguments: Arguments, key: str = "arguments") -> str:
    return as_json({"name": name, key: arguments})


def qwen3_coder(name: str, arguments: Arguments) -> str:
    inside = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name: str, arguments: Arguments, space: str = "") -> str:
    """space: the namespace of the tags."""
    pairs = (
        f"<{space}arg_key>{key}</{space}arg_key>\n<{space}arg_value>{raw(value)}</{space}arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<{space}tool_call>{name}\n{''.join(pairs)}</{space}tool_call>"


def longcat(name: str, arguments: Arguments) -> str:
    return glm(name, arguments, "longcat_")


def hunyuan(name: str, arguments: Arguments, s: str = "") -> str:
    """s: the suffix of the tags."""
    pairs = (
        f"<arg_key{s}>{key}</arg_key{s}>\n<arg_value{s}>{raw(value)}</arg_value{s}>\n"
        for key, value in arguments.items()
    )
    return f"<tool_calls{s}>\n<tool_call{s}>{name}<tool_sep{s}>\n{''.join(pairs)}</tool_call{s}>\n</tool_calls{s}>"


def hunyuan3(name: str, arguments: Arguments) -> str:
    return hunyuan(name, arguments, ":opensource")


def minimax_m2(name: str, arguments: Arguments) -> str:
    inside = "".join(f'<parameter name="{key}">{raw(value)}</parameter>\n' for key, value in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inside}</invoke>\n</minimax:tool_call>'


def minimax_m3(name: str, arguments: Arguments) -> str:
    mark = "]<]minimax[>["
    inside = "".join(f"{mark}<{key}>{raw(value)}{mark}</{key}>" for key, value in arguments.items())
    return f'{mark}<tool_call>\n{mark}<invoke name="{name}">{inside}\n{mark}</invoke>\n{mark}</tool_call>'


def muse_spark(name: str, arguments: Arguments) -> str:
    inside = "".join(f'<atem:parameter name="{k}">{raw(v)}</atem:parameter>\n' for k, v in arguments.items())
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inside}</atem:invoke>\n</atem:function_calls>'


def minicpm5(name: str, arguments: Arguments) -> str:
    inside = "".join(f'<param name="{key}"><![CDATA[{raw(value)}]]></param>' for key, value in arguments.items())
    return f'<function name="{name}">{inside}</function>'


def seed_oss(name: str, arguments: Arguments) -> str:
    inside = "".join(f"<parameter={key}>{raw(value)}</parameter>\n" for key, value in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{inside}</function>\n</seed:tool_call>"


def deepseek_v32(name: str, arguments: Arguments) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{as_json(isinstance(value, str))}">{raw(value)}</｜DSML｜parameter>\n'
        for key, value in arguments.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"


def deepseek_v3(name: str, arguments: Arguments) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def kimi_k2(name: str, arguments: Arguments) -> str:
    call = f"functions.{name}:0<|tool_call_argument_begin|>{as_json(arguments)}"
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


def kimi_k3(name: str, arguments: Arguments) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    inside = "".join(
        f'<|open|>argument key="{key}" type="{kinds.get(type(value), "null")}"<|sep|>'
        f"{raw(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    call = f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{gemma_value(each, quote)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(each, quote) for each in value)}]"
    return as_json(value)


def gemma4(name: str, arguments: Arguments) -> str:
    return f"<|tool_call>call:{name}{gemma_value(arguments, GEMMA_QUOTE)}<tool_call|>"


def function_gemma(name: str, arguments: Arguments) -> str:
    return f"<start_function_call>call:{name}{gemma_value(arguments, '<escape>')}<end_function_call>"


def python_call(name: str, arguments: Arguments) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def harmony(name: str, arguments: Arguments) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{header}{as_json(arguments)}<|call|>"


WRITTEN: dict[str, Callable[[str, Arguments], str]] = {
    "json_tools": lambda name, arguments: f"<tool_call>\n{named(name, arguments)}\n</tool_call>",
    "mistral": lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{as_json(arguments)}",
    "phi4_mini": lambda name, arguments: f"<|tool_call|>[{named(name, arguments)}]<|/tool_call|>",
    "granite3": lambda name, arguments: f"<|tool_call|>[{named(name, arguments)}]",
    "nemotron_nano": lambda name, arguments: f"<TOOLCALL>[{named(name, arguments)}]</TOOLCALL>",
    "command_r": lambda name, arguments: (
        "<|START_ACTION|>[\n    "
        + as_json({"tool_call_id": "0", "tool_name": name, "parameters": arguments})
        + "\n]<|END_ACTION|>"
    ),
    "apertus": lambda name, arguments: f"<|tools_prefix|>[{as_json({name: arguments})}]<|tools_suffix|>",
    "llama3": lambda name, arguments: named(name, arguments, "parameters"),
    "llama4_json": lambda name, arguments: f"<|python_start|>{named(name, arguments, 'parameters')}<|python_end|>",
    "llama4": lambda name, arguments: f"<|python_start|>{python_call(name, arguments)}<|python_end|>",
    "pythonic": lambda name, arguments: f"<|tool_call_start|>{python_call(name, arguments)}<|tool_call_end|>",
    **{
        writer.__name__: writer
        for writer in (
            *(qwen3_coder, longcat, hunyuan, hunyuan3, minimax_m2, minimax_m3, muse_spark, minicpm5, seed_oss),
            *(deepseek_v32, deepseek_v3, kimi_k2, kimi_k3, gemma4, function_gemma, harmony),
        )
    },
    "glm47": glm,
}
"""By format."""

TEMPLATES = {
    "json_tools": "{% if tools %}<tool_call>\\n{{ tool_call | tojson }}\\n</tool_call>{% endif %}",
    "qwen3_coder": "<tool_call>\\n<function={{ name }}>\\n<parameter={{ key }}>",
    "glm47": "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key><arg_value>",
    "hunyuan": "<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>",
    "hunyuan3": "{% set s = ':opensource' %}{{ '<tool_calls{}>'.format(s) }}",
    "minimax_m2": '<minimax:tool_call>\\n<invoke name=\\"',
    "minimax_m3": "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]",
    "gemma4": "<|tool_call>call:{{ name }}<tool_call|>",
    "function_gemma": "<start_function_call>call:{{ name }}<end_function_call>",
    "pythonic": "<|tool_list_start|>{{ tools }}<|tool_list_end|>",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "phi4_mini": "<|tool_call|>{{ calls }}<|/tool_call|>",
    "granite3": "<|tool_call|>{{ calls }}",
    "nemotron_nano": "<TOOLCALL>[{{ calls }}]</TOOLCALL>",
    "command_r": "<|START_ACTION|>{{ calls }}<|END_ACTION|>",
    "apertus": "<|tools_prefix|>[{{ calls }}]<|tools_suffix|>",
    "llama3": "<|start_header_id|>ipython {{ '<|python_tag|>' + call }}",
    "llama4_json": '<|header_start|>assistant<|python_start|>{"name": {{ name }}, "parameters": {{ arguments }}}',
    "llama4": "<|header_start|>assistant<|python_start|>{{ calls }}<|python_end|>",
    "seed_oss": "<seed:tool_call>\\n<function=name>",
    "longcat": "<longcat_tool_call>{{ name }}",
    "minicpm5": '<function name="{{ name }}"><param name="{{ key }}">',
    "muse_spark": "<atem:function_calls>",
}
"""By format: what its chat templates have."""
