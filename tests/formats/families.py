"""The families of models in docs/models.md: what each of them is proven to do over HTTP.

A scripted model writes a family's calls and thoughts. Its chat template is a short one of our own with the family's
marks; those of the makers, which are not part of this repository, are downloaded by `makers` and tried too.

    make families                                           writes the table into docs/models.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxpaged.api.generation.deltas import Text, ToolCall, joined
from mlxpaged.core.text.answer_parser import AnswerParser, HarmonyParser, TagParser
from mlxpaged.formats import FORMATS, harmony
from tests.api.helpers import raw, stream_events
from tests.formats.written import WRITTEN
from tests.scripted import follow, scripted_server
from tests.support import RunningServer

DOCS = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- families: make families -->", "<!-- end of families -->"
CHAT = "/v1/chat/completions"
OK = "ok"

STRING = {"type": "string"}
LIMITED = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
EDIT = {
    "type": "object",
    "properties": {"path": STRING, "text": STRING, "line": {"type": "integer"}},
    "required": ["path", "text"],
}


def tool(name: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    described = {"name": name, "description": f"The tool {name}.", "parameters": parameters}
    return {"type": "function", "function": described | fields}


WEATHER = tool("weather", {"type": "object", "properties": {"city": STRING}, "required": ["city"]})
TOOLS = [WEATHER, tool("edit", EDIT)]
ROME = ("weather", {"city": "Rome"})
EDITED = ("edit", {"path": "a.py", "text": '    if a < b and c == "d":\n\t\treturn "\\\\n"\n', "line": 7})

QUESTION, TALK, RESULT, THOUGHT = "What about Rome?", "Only talk!", "21 degrees", "I should look at Rome."


@dataclass(frozen=True)
class Turns:
    """Marks of a conversation: begin, with the role in it as {role}, and end."""

    begin: str
    end: str


CHATML = Turns("<|im_start|>{role}\n", "<|im_end|>")
LLAMA = Turns("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
LLAMA_4 = Turns("<|header_start|>{role}<|header_end|>\n\n", "<|eot|>")


@dataclass(frozen=True)
class Family:
    """thoughts: the tags around them; None for a model that does not think. has_switch: the thinking can be turned off.
    theirs: names of the makers' templates, as the packages in `makers` have them. shows_tools: the template does; if
    not, the server's text does. shows_ids: the template shows the ids of calls."""

    name: str
    form: str
    thoughts: tuple[str, str] | None = None
    has_switch: bool = False
    turns: Turns = CHATML
    theirs: tuple[str, ...] = ()
    shows_tools: bool = True
    shows_ids: bool = False

    @property
    def thinks_by(self) -> dict[str, Any]:
        return {"chat_template_kwargs": {"enable_thinking": True}} if self.has_switch else {}


THINK = ("<think>", "</think>")
DEEPSEEK = Turns("<｜{role}｜>", "<｜end▁of▁sentence｜>")
BRACKETS = Turns("[{role}]", "</s>")
HARMONY = Turns("<|start|>{role}<|message|>", "<|end|>")

FAMILIES = (
    Family("Qwen3", "json_tools", THINK, True, theirs=("Qwen-Qwen3-0.6B",)),
    Family("Qwen2.5", "json_tools", theirs=("Qwen-Qwen2.5-7B-Instruct",)),
    Family("QwQ", "json_tools", THINK, theirs=("Qwen-QwQ-32B",)),
    Family("Qwen3-Coder", "qwen3_coder", theirs=("Qwen3-Coder", "tool_chat_template_qwen3coder")),
    Family("Qwen3.5, Qwen3.6", "qwen3_coder", THINK, True, theirs=("Qwen3.5-4B",)),
    Family("Step 3.5", "qwen3_coder", THINK, theirs=("StepFun3.5-Flash",)),
    Family("Nemotron 3", "qwen3_coder", THINK, True, theirs=("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",)),
    Family("Nemotron Nano v2", "nemotron_nano", THINK, theirs=("NVIDIA-Nemotron-Nano-v2",)),
    Family("GLM-4.5, GLM-4.6", "glm47", THINK, True, theirs=("GLM-4.6",)),
    Family("GLM-4.7", "glm47", THINK, True, theirs=("GLM-4.7-Flash",)),
    Family(
        "Laguna",
        "glm47",
        THINK,
        True,
        theirs=("poolside-Laguna-XS.2", "poolside-Laguna-XS-2.1", "poolside-Laguna-S-2.1"),
    ),
    Family("Ling 3", "glm47", THINK, True, theirs=("inclusionai-ling-3.0-flash",)),
    Family("LongCat", "longcat", ("<longcat_think>", "</longcat_think>"), True),
    Family("MiniMax M2", "minimax_m2", THINK, theirs=("MiniMax-M2",)),
    Family("MiniMax M3", "minimax_m3", ("<mm:think>", "</mm:think>"), True, theirs=("MiniMax-M3",)),
    Family("Kimi K2", "kimi_k2", theirs=("moonshotai-Kimi-K2",), shows_ids=True),
    Family("Kimi K2 Thinking", "kimi_k2", THINK, shows_ids=True),
    Family("Kimi K3", "kimi_k3", ("<|open|>think<|sep|>", "<|close|>think<|sep|>"), True, theirs=("Kimi-K3",)),
    Family(
        "Gemma 4",
        "gemma4",
        ("<|channel>thought\n", "<channel|>"),
        True,
        theirs=("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    ),
    Family("FunctionGemma", "function_gemma", theirs=("tool_chat_template_functiongemma",)),
    Family("Gemma 3", "json_tools", shows_tools=False),
    Family(
        *("Mistral Nemo", "mistral", None, False, BRACKETS, ("mistralai-Mistral-Nemo-Instruct-2407",)), shows_ids=True
    ),
    Family(
        *("Mistral Small 3.2", "mistral", None, False, BRACKETS, ("Mistral-Small-3.2-24B-Instruct-2506",)),
        shows_ids=True,
    ),
    Family("Devstral", "mistral", turns=BRACKETS, theirs=("unsloth-mistral-Devstral-Small-2507",)),
    Family(
        *("Magistral, Ministral 3 Reasoning", "mistral", ("[THINK]", "[/THINK]"), False, BRACKETS),
        theirs=("mistralai-Ministral-3-14B-Reasoning-2512",),
    ),
    Family("LFM2", "pythonic", theirs=("LFM2-8B-A1B",)),
    Family("LFM2.5", "pythonic", THINK, theirs=("LFM2.5-8B-A1B", "LFM2.5-Instruct")),
    Family(
        "Llama 3.1, Llama 3.3",
        "llama3",
        turns=LLAMA,
        theirs=("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    ),
    Family("Llama 3.2", "llama3", turns=LLAMA, theirs=("meta-llama-Llama-3.2-3B-Instruct",)),
    Family("Llama 4", "llama4_json", turns=LLAMA_4, theirs=("tool_chat_template_llama4_json",)),
    Family("Llama 4, asked for Python", "llama4", turns=LLAMA_4, theirs=("tool_chat_template_llama4_pythonic",)),
    Family(
        "DeepSeek V3, R1",
        "deepseek_v3",
        THINK,
        turns=DEEPSEEK,
        theirs=("tool_chat_template_deepseekv3", "tool_chat_template_deepseekr1"),
    ),
    Family(
        "DeepSeek V3.1",
        "deepseek_v3",
        THINK,
        True,
        DEEPSEEK,
        ("deepseek-ai-DeepSeek-V3.1", "tool_chat_template_deepseekv31"),
        False,
    ),
    Family(
        *("DeepSeek's distills of R1", "deepseek_v3", THINK, False, DEEPSEEK),
        theirs=("deepseek-ai-DeepSeek-R1-Distill-Llama-8B",),
        shows_tools=False,
    ),
    Family("DeepSeek V3.2", "deepseek_v32", THINK, True, DEEPSEEK, ("deepseek-ai-DeepSeek-V3.2",)),
    Family(
        "DeepSeek V4",
        "deepseek_v32",
        THINK,
        True,
        DEEPSEEK,
        ("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    ),
    Family("gpt-oss", "harmony", ("", ""), turns=HARMONY, theirs=("openai-gpt-oss-120b",)),
    Family("Seed-OSS", "seed_oss", ("<seed:think>", "</seed:think>"), True, theirs=("ByteDance-Seed-OSS",)),
    Family("Hunyuan A13B", "hunyuan", THINK, True, theirs=("tool_chat_template_hunyuan_a13b",)),
    Family(
        *("Hunyuan Hy3", "hunyuan3", ("<think:opensource>", "</think:opensource>"), True),
        theirs=("tencent-Hy3",),
    ),
    Family("Command R7B", "command_r", theirs=("CohereForAI-c4ai-command-r7b-12-2024-tool_use",)),
    Family(
        "Command A, Cohere 2 MoE", "command_r", ("<|START_THINKING|>", "<|END_THINKING|>"), True, theirs=("Cohere2MoE",)
    ),
    Family("Apertus", "apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), True, theirs=("Apertus-8B-Instruct",)),
    Family("Phi-4-mini", "phi4_mini", turns=Turns("<|{role}|>", "<|end|>")),
    Family("Granite 3", "granite3", theirs=("ibm-granite-granite-3.3-2B-Instruct",)),
    Family("Granite 4", "json_tools", theirs=("ibm-granite-granite-4.0", "ibm-granite-granite-4.1")),
    Family("ERNIE 4.5", "json_tools", THINK),
    Family("SmolLM3", "json_tools", THINK, True, theirs=("HuggingFaceTB-SmolLM3-3B",), shows_tools=False),
    Family(
        "Hermes 2 Pro, Hermes 3",
        "json_tools",
        theirs=("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"),
    ),
    Family("MiniCPM5", "minicpm5", THINK, True, theirs=("openbmb-MiniCPM5-1B",)),
    Family("Muse Spark", "muse_spark"),
    Family("MiniMax M1", "hunyuan", THINK, theirs=("MiniMax-M1",)),
    Family("MiMo-VL", "json_tools", THINK, theirs=("MiMo-VL",)),
    Family("Bielik 3", "json_tools", theirs=("Bielik-11B-v3.0-Instruct",)),
    Family("Reka Edge", "json_tools", THINK, theirs=("Reka-Edge",)),
    Family("Spark X2.5", "glm47", THINK, theirs=("Spark2.5",)),
    Family("Apriel 1.5, Apriel 1.6", "hunyuan", theirs=("unsloth-Apriel-1.5", "Apriel-1.6-15b-Thinker-fixed")),
)

# -- our own templates -------------------------------------------------------------------------------------------------

NAMED = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
EACH = "{% for k, v in c.arguments.items() %}"
RAW = "{{ v if v is string else v | tojson }}"
PYTHON = (
    f"{{{{ c.name }}}}({EACH}{{{{ k }}}}={{{{ v | tojson }}}}{{{{ ', ' if not loop.last else '' }}}}{{% endfor %}})"
)
PAIRS = f"<S_arg_key>{{{{ k }}}}</S_arg_key>\n<S_arg_value>{RAW}</S_arg_value>\n{{% endfor %}}".replace("S_", "{s}")
HUNYUAN = (
    "<tool_calls{s}>\n<tool_call{s}>{{ c.name }}<tool_sep{s}>\n"
    + f"{EACH}<arg_key{{s}}>{{{{ k }}}}</arg_key{{s}}>\n<arg_value{{s}}>{RAW}</arg_value{{s}}>\n{{% endfor %}}"
    + "</tool_call{s}>\n</tool_calls{s}>"
)
M3 = "]<]minimax[>["
QUOTED = "{% if v is string %}Q{{ v }}Q{% else %}{{ v | tojson }}{% endif %}{{ ',' if not loop.last else '' }}"


def gemma(start: str, end: str, quote: str) -> str:
    inside = f"{EACH}{{{{ k }}}}:{QUOTED.replace('Q', quote)}{{% endfor %}}"
    return f"{start}call:{{{{ c.name }}}}{{{{ '{{' }}}}{inside}{{{{ '}}' }}}}{end}"


CALLS = {
    "json_tools": f"<tool_call>\n{NAMED}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ c.name }}>\n"
    + f"{EACH}<parameter={{{{ k }}}}>\n{RAW}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>",
    "glm47": f"<tool_call>{{{{ c.name }}}}\n{EACH}{PAIRS.replace('{s}', '')}</tool_call>",
    "longcat": "<longcat_tool_call>{{ c.name }}\n" + f"{EACH}{PAIRS.replace('{s}', 'longcat_')}</longcat_tool_call>",
    "hunyuan": HUNYUAN.replace("{s}", ""),
    "hunyuan3": HUNYUAN.replace("{s}", ":opensource"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ c.name }}">\n'
    + f'{EACH}<parameter name="{{{{ k }}}}">{RAW}</parameter>\n{{% endfor %}}</invoke>\n</minimax:tool_call>',
    "minimax_m3": f'{M3}<tool_call>\n{M3}<invoke name="{{{{ c.name }}}}">'
    + f"{EACH}{M3}<{{{{ k }}}}>{RAW}{M3}</{{{{ k }}}}>{{% endfor %}}\n{M3}</invoke>\n{M3}</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ c.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="{{ c.name }}" index="1"<|sep|>'
    + EACH
    + """<|open|>argument key="{{ k }}" type="{{ 'string' if v is string else 'integer' }}"<|sep|>"""
    + f"{RAW}<|close|>argument<|sep|>{{% endfor %}}<|close|>call<|sep|><|close|>tools<|sep|>",
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "mistral": "[TOOL_CALLS]{{ c.name }}ID[ARGS]{{ c.arguments | tojson }}",
    "pythonic": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "llama3": '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{# <|python_tag|> #}',
    "llama4_json": '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
    "llama4": f"<|python_start|>[{PYTHON}]<|python_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ c.name }}">\n'
    + f'{EACH}<｜DSML｜parameter name="{{{{ k }}}}" string="{{{{ (v is string) | tojson }}}}">'
    + f"{RAW}</｜DSML｜parameter>\n{{% endfor %}}"
    + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "harmony": "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
    "{{ c.arguments | tojson }}<|call|>",
    "seed_oss": "<seed:tool_call>\n<function={{ c.name }}>\n"
    + f"{EACH}<parameter={{{{ k }}}}>{RAW}</parameter>\n{{% endfor %}}</function>\n</seed:tool_call>",
    "command_r": '<|START_ACTION|>[\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
    '"parameters": {{ c.arguments | tojson }}}\n]<|END_ACTION|>',
    "apertus": '<|tools_prefix|>[{"{{ c.name }}": {{ c.arguments | tojson }}}]<|tools_suffix|>',
    "phi4_mini": f"<|tool_call|>[{NAMED}]<|/tool_call|>",
    "granite3": f"<|tool_call|>[{NAMED}]",
    "nemotron_nano": f"<TOOLCALL>[{NAMED}]</TOOLCALL>",
    "minicpm5": '<function name="{{ c.name }}">'
    + f'{EACH}<param name="{{{{ k }}}}"><![CDATA[{RAW}]]></param>{{% endfor %}}</function>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="{{ c.name }}">\n'
    + f'{EACH}<atem:parameter name="{{{{ k }}}}">{RAW}</atem:parameter>\n{{% endfor %}}'
    + "</atem:invoke>\n</atem:function_calls>",
}
"""How our templates write a call, by format."""


def own_template(family: Family) -> str:
    """A template with the family's marks that shows tools, calls, results and all thoughts."""
    begin = family.turns.begin.replace("{role}", "{{ m.role }}")
    opening = family.turns.begin.replace("{role}", "assistant")
    start, end = (f"{family.thoughts[0]}\n", f"\n{family.thoughts[1]}\n\n") if family.thoughts else ("", "")
    listed = begin.replace("{{ m.role }}", "system") + "{{ tools | tojson }}" + family.turns.end
    tools = f"{{% if tools %}}{listed}{{% endif %}}"
    call = CALLS[family.form].replace("ID[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]" if family.shows_ids else "[ARGS]")
    if family.form == "harmony":
        start, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        opening = "<|start|>assistant"
        said = begin + "{{ m.content }}<|end|>"
        answer = (
            f"<|start|>assistant{{% if m.thinking %}}{start}{{{{ m.thinking }}}}{end}{{% endif %}}"
            f"{{% for call in m.tool_calls or [] %}}{{% set c = call.function %}}{CALLS['harmony']}{{% endfor %}}"
            "{% if m.content %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
        )
    else:
        said = f"{begin}{{{{ m.content }}}}{family.turns.end}"
        thought = f"{{% if m.reasoning_content %}}{start}{{{{ m.reasoning_content }}}}{end}{{% endif %}}"
        calls = f"{{% for call in m.tool_calls or [] %}}{{% set c = call.function %}}{call}{{% endfor %}}"
        calls = calls if family.shows_tools or family.form != "json_tools" else ""
        answer = f"{opening}{thought if family.thoughts else ''}{{{{ m.content }}}}{calls}{family.turns.end}"
    ident = " {{ m.tool_call_id }}" if family.shows_ids else ""
    result = said.replace("{{ m.content }}", f"{{{{ m.content }}}}{ident}")
    switch = f"{{% if enable_thinking is false %}}{start}{end}{{% endif %}}" if family.has_switch else ""
    return (
        f"{tools if family.shows_tools else ''}{{% for m in messages %}}"
        f"{{% if m.role == 'assistant' %}}{answer}{{% elif m.role == 'tool' %}}{result}{{% else %}}{said}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{opening}{switch}{{% endif %}}"
    )


@contextlib.contextmanager
def family_server(family: Family, template: str, context_length: int = 16384) -> Iterator[RunningServer]:
    """A scripted model whose vocabulary has the family's tags and the control tokens of the template."""
    form = FORMATS[family.form]
    texts = {text for tag in ("<[|｜][^<>|｜{}%]+[|｜]>", r"\[/?[A-Z_]+\]") for text in re.findall(tag, template)}
    thoughts = family.thoughts or ("", "")
    tags = [tag for tag in (*(tag.strip() for tag in thoughts), *form.tags, *form.in_vocabulary) if tag]
    if form.name == "gemma4":
        tags = [tag.removesuffix("thought") for tag in tags]
    more = (*tags, *sorted(texts), *(["<s>"] if "bos_token" in template else []))
    with (
        tempfile.TemporaryDirectory() as directory,
        scripted_server(Path(directory), family.form, {}, context_length, (), more, template) as server,
    ):
        yield server


def watched_prompts(server: RunningServer) -> list[str]:
    """The prompts of all requests from now on."""
    prompts: list[str] = []
    requests, decode = server.core.requests, server.core.served.tokenizer.text_with_specials
    add = requests.add

    def watched(request: Any) -> Any:
        prompts.append(decode(request.prompt_token_ids))
        return add(request)

    requests.add = watched  # type: ignore[method-assign]
    return prompts


# -- what is proven ----------------------------------------------------------------------------------------------------


class Failure(Exception):
    """What a family does not do."""


class Prover:
    """Asks the server of one family's model."""

    def __init__(self, family: Family, template: str) -> None:
        self.family, self.template = family, template
        self.form = FORMATS[family.form]
        self.prompts: list[str] = []

    def cells(self) -> dict[str, str]:
        """What is proven, or why it is not, by column."""
        with family_server(self.family, self.template) as server:
            self.server = server
            self.prompts = watched_prompts(server)
            columns = {"calls": self.calls, "thinking": self.thinking, "enforced": self.enforced, "round": self.round}
            served = server.core.served.tokenizer
            self.form = served.tags.tools
            found = f"`{self.form.name}`" + ("" if served.shows_tools else ", told in the system message")
            return {"form": found} | {name: attempt(column) for name, column in columns.items()}

    def write(self, *calls: tuple[str, Any], thought: str = "") -> str:
        """An answer, as the family writes it."""
        written = [WRITTEN[self.form.name](*call) for call in calls]
        if self.form.name == "harmony":
            written = [text.replace("<|call|>", "<|end|>") for text in written[:-1]] + written[-1:]
            text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
            return text + "<|start|>assistant".join(written)
        if self.form.name == "llama3":
            return "; ".join(written)
        start, end = self.family.thoughts or ("", "")
        return (f"{start}\n{thought}\n{end}\n\n" if thought else "") + "\n".join(written)

    def ask(self, answer: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
        """The message of the chat API, put together from its stream."""
        follow(self.server, lambda prompt: self._after(prompt, answer))
        body = self._body(messages, **fields)
        whole = self._whole(body)
        pieces: list[dict[str, Any]] = []
        said = {"content": "", "reasoning_content": ""}
        for event in stream_events(self.server, CHAT, body):
            for choice in event["choices"] if event != "[DONE]" else ():
                for key in said:
                    said[key] += choice["delta"].get(key) or ""
                for call in choice["delta"].get("tool_calls") or ():
                    if call["index"] == len(pieces):
                        pieces.append(call)
                    else:
                        pieces[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        streamed = [(call["function"]["name"], call["function"]["arguments"]) for call in pieces]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in whole.get("tool_calls") or ()]
        if (streamed, *said.values()) != (calls, whole.get("content") or "", whole.get("reasoning_content") or ""):
            raise Failure(f"streamed {streamed} {said}, whole {whole}")
        return whole

    def _body(self, messages: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
        user = [{"role": "user", "content": QUESTION}]
        return {"model": "scripted", "messages": messages or user, "tools": TOOLS, "temperature": 0} | fields

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        with raw(self.server) as client:
            response = client.post(CHAT, json=body)
        if response.status_code != 200:
            raise Failure(f"{response.status_code}: {response.json()['error']['message'][:120]}")
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    def _after(self, prompt: str, answer: str) -> str:
        """What the model writes if the prompt has already opened its thoughts."""
        start, end = (tag.strip() for tag in self.family.thoughts or ("", ""))
        if not start or not prompt.rstrip().endswith(start):
            return answer
        return answer.removeprefix(start) if answer.startswith(start) else f"\n{end}\n\n{answer}"

    # -- the columns

    def calls(self) -> str:
        expect(calls_of(self.ask(self.write(ROME))), [ROME])
        expect(calls_of(self.ask(self.write(EDITED))), [EDITED])
        message = self.ask(self.write(ROME, EDITED))
        expect(calls_of(message), [ROME, EDITED])
        expect((message.get("content") or "").strip(), "")
        expect(len({call["id"] for call in message["tool_calls"]}), 2)
        return OK

    def thinking(self) -> str:
        if self.family.thoughts is None:
            return "-"
        message = self.ask(self.write(ROME, thought=THOUGHT), **self.family.thinks_by)
        expect((message.get("reasoning_content"), calls_of(message)), (THOUGHT, [ROME]))
        expect((message.get("content") or "").strip(), "")
        if not self.family.has_switch:
            return OK
        message = self.ask(self.write(ROME), reasoning_effort="none")
        expect((message.get("reasoning_content"), calls_of(message)), (None, [ROME]))
        return f"{OK}, can be off"

    def enforced(self) -> str:
        must = {"parallel_tool_calls": False, "max_tokens": 300}
        if self.family.thoughts is not None:
            must |= {"thinking_budget": 8}
        tools = [tool("weather", LIMITED, strict=True), tool("edit", EDIT)]
        named = {"type": "function", "function": {"name": "weather"}}
        for fields in ({"tool_choice": "required"}, {"tool_choice": named}):
            found = calls_of(self.ask(TALK, tools=tools[:1], **must, **fields))
            if len(found) != 1 or found[0][0] != "weather" or found[0][1].get("city") not in ("Rome", "Oslo"):
                raise Failure(f"{fields['tool_choice']}: {found}")
        found = calls_of(self.ask(self.write(("weather", {"city": "Bonn"})), tools=tools, **must))
        if found and found[0][1].get("city") not in ("Rome", "Oslo"):
            raise Failure(f"strict: {found}")
        return OK

    def round(self) -> str:
        """The second turn: its prompt begins with the first one and the answer, as the template itself writes it."""
        thought = THOUGHT if self.family.thoughts else ""
        written = self.write(ROME, thought=thought)
        first, second = self._two_turns(written)
        if RESULT not in second or second.count("Rome") <= first.count("Rome"):
            raise Failure(f"the call or its result is not in the prompt: {second[-300:]!r}")
        if thought and thought not in second:
            return f"{OK}, without the thoughts"
        if not second.startswith(first):
            return f"{OK}, the template changes earlier turns"
        own = self._answer_in(first, second.removeprefix(first))
        first, second = self._two_turns(own, as_written=False)
        if not second.startswith(first + own):
            raise Failure(f"the prompt changes: {first + own!r} {second!r}")
        return OK

    def _two_turns(self, answer: str, as_written: bool = True) -> tuple[str, str]:
        """The prompts of two turns. answer: what the model writes after the first. as_written: it has all tags."""
        follow(self.server, lambda prompt: self._after(prompt, answer) if as_written else answer)
        message = self._whole(self._body(**self.family.thinks_by))
        first = self.prompts[-1]
        expect(calls_of(message), [ROME])
        [call] = message["tool_calls"]
        kept = {key: value for key, value in message.items() if value and key in ("reasoning_content", "tool_calls")}
        self._whole(
            self._body(
                [
                    {"role": "user", "content": QUESTION},
                    {"role": "assistant", "content": message["content"] or ""} | kept,
                    {"role": "tool", "tool_call_id": call["id"], "content": RESULT},
                ],
                **self.family.thinks_by,
            )
        )
        second = self.prompts[-1]
        if self.family.shows_ids and call["id"] not in second:
            raise Failure(f"the id {call['id']} is not in the prompt")
        return first, second

    def _answer_in(self, first: str, rest: str) -> str:
        """The longest beginning of what comes after the first prompt that is read as the thought and the call."""
        served = self.server.core.served.tokenizer
        before = rest[: rest.index(RESULT)]
        opened = first.rstrip().endswith(served.tags.think_start) if served.tags.think_start else False
        for cut in range(len(before), 0, -1):
            tags = served.tags
            parser: AnswerParser = (
                HarmonyParser(TOOLS, False) if tags.tools is harmony.HARMONY else TagParser(tags, opened, TOOLS, False)
            )
            deltas = parser.feed(before[:cut]) + parser.finish()
            calls = [
                (part.kind.name, json.loads(part.text)) for part in joined(deltas) if isinstance(part.kind, ToolCall)
            ]
            said = "".join(part.text for part in joined(deltas) if part.kind is Text)
            if calls == [ROME] and not said.strip():
                return before[:cut]
        raise Failure(f"the answer is not in the prompt as it is read: {before!r}")


def attempt(column: Callable[[], str]) -> str:
    try:
        return column()
    except Failure as failure:
        return f"fails: {failure}"


def expect(found: Any, wanted: Any) -> None:
    if found != wanted:
        raise Failure(f"{found!r} instead of {wanted!r}")


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls") or ()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


# -- the table ---------------------------------------------------------------------------------------------------------

HEAD = "| Family | Format | Calls | Thinking | Required, named, strict | Round trip | With the maker's template |"
TABLE = re.compile(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)


def with_own_template(family: Family) -> tuple[str, ...]:
    """The cells of a row, without the last one."""
    found = Prover(family, own_template(family)).cells()
    return (family.name, found["form"], found["calls"], found["thinking"], found["enforced"], found["round"])


def with_their_templates(family: Family, directory: Path, own: tuple[str, ...]) -> str:
    """The last cell of a row: what differs from the others."""
    said = []
    for name in family.theirs:
        found = Prover(family, (directory / f"{name}.jinja").read_text(encoding="utf-8")).cells()
        names = ("format", "calls", "thinking", "enforced", "round trip")
        pairs = zip(names, found.values(), own[1:], strict=True)
        other = [f"{column}: {value}" for column, value, mine in pairs if value != mine]
        said.append("; ".join(other) or OK)
    return "; ".join(dict.fromkeys(said)) or "not tried"


def documented() -> dict[str, tuple[str, ...]]:
    """The rows of the documentation, by family."""
    found = TABLE.search(DOCS.read_text(encoding="utf-8"))
    assert found is not None, f"{DOCS} has no {BEGIN}"
    rows = [tuple(line.strip("| ").split(" | ")) for line in found[0].splitlines()[2:]]
    return {row[0]: row for row in rows}


def table(templates: Path | None) -> str:
    """templates: of the makers. Without them, the last cell stays as it is documented."""
    lines, known = [HEAD, "|---" * 7 + "|"], documented()
    for family in FAMILIES:
        own = with_own_template(family)
        last = known[family.name][-1] if family.name in known else "not tried"
        cells = (*own, last if templates is None else with_their_templates(family, templates, own))
        print("|", " | ".join(cells), "|", file=sys.stderr)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of families in docs/models.md.")
    parser.add_argument("--write", action="store_true", help="write it instead of printing it")
    parser.add_argument("--templates", type=Path, help="directory with the makers' templates, as *.jinja")
    args = parser.parse_args()
    text = table(args.templates)
    if args.write:
        DOCS.write_text(TABLE.sub(lambda _: text, DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
