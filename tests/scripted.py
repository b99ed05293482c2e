"""A server whose model says what a script tells it to: thinking and tool calls that really go through all of it, from
the chat template to the client, although no model was trained for them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxpaged.engine_config import EngineConfig
from mlxpaged.formats import FORMATS
from mlxpaged.models.loader import DEMO_PATH
from tests.formats.written import TEMPLATES
from tests.support import SMALL, RunningServer, running_server

END = "<|im_end|>"
SPECIAL = (END, "<|im_start|>", "[TOOL_CALLS]", "[ARGS]", "<start_function_call>", "<end_function_call>", "<escape>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own that count as text, as in Qwen's vocabulary."""

SPELLED = "\0"
"""In a script, inside of a tag: the model spells it, character by character, instead of writing its token."""

ENDS = ('"', "</think>")
"""Where the script does not get its way, the model rather writes these than other random text, so that strings and
thoughts are short."""

CALLS = {
    "json_tools": """<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>""",
    "mistral": "[TOOL_CALLS]{{ tool_call.name }}[ARGS]{{ tool_call.arguments | tojson }}",
    "function_gemma": "<start_function_call>call:{{ tool_call.name }}{}<end_function_call>",
    "qwen3_coder": "<tool_call>\n<function={{ tool_call.name }}>\n</function>\n</tool_call>",
}
"""What a chat template writes calls like, by format. That of another format only has its tags, in a comment."""

CALL = "{{ tool_call | tojson }}"

TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}CALL{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- elif always_think %}{{ '<think>\\n' }}{% endif %}{% endif %}"""


def make_scripted_model(
    directory: Path,
    tool_format: str,
    context_length: int = 8192,
    plain: Sequence[str] = PLAIN,
    more: Sequence[str] = (),
    template: str | None = None,
    padding: int = 0,
) -> Path:
    """A tiny model with a token for every byte and for every tag; its chat template writes calls in `tool_format`.
    plain: tags that count as text. Without those of thoughts, it does not think. more: further special tokens.
    template: the chat template; None for one of ours. padding: rows of the head without a token."""
    special = [tag for tag in FORMATS[tool_format].tags if tag.startswith(("<|", "[", "<｜"))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in dict.fromkeys((*SPECIAL, *special, *more))]
    )
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    if "<s>" in more:
        settings["bos_token"] = "<s>"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    call = CALLS.get(tool_format) or f"{{# {TEMPLATES.get(tool_format, tool_format)} #}}{CALL}"
    (directory / "chat_template.jinja").write_text(template or TEMPLATE.replace("CALL", call))
    sizes = {"vocab_size": tokenizer.get_vocab_size() + padding, "max_position_embeddings": context_length}
    sizes["num_hidden_layers"] = 1  # what the model computes hardly matters
    config = {"model_type": "llama", "eos_token_id": tokenizer.token_to_id(END)} | SMALL | sizes
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def demo_with_tools(directory: Path) -> Path:
    """The demo model, as if it were trained for calls; it writes their tags in several tokens, letter by letter."""
    shutil.copytree(DEMO_PATH, directory, dirs_exist_ok=True)
    calls = "{%- for tool_call in messages[0].tool_calls or [] %}" + CALLS["json_tools"] + "{% endfor %}"
    template = directory / "chat_template.jinja"
    template.write_text("{%- if tools %}{% endif %}" + calls + template.read_text())
    return directory


@contextlib.contextmanager
def scripted_server(
    directory: Path,
    tool_format: str,
    script: Mapping[str, str],
    context_length: int = 8192,
    plain: Sequence[str] = PLAIN,
    more: Sequence[str] = (),
    template: str | None = None,
    padding: int = 0,
    **options: Any,
) -> Iterator[RunningServer]:
    """script: what is answered, by a text in the prompt; of several, the one that comes last there counts."""
    model = make_scripted_model(directory, tool_format, context_length, plain, more, template, padding)
    options = {"served_model_name": "scripted", "kv_cache_bytes": 16_000_000, "speculative": "off"} | options
    config = EngineConfig(model=str(model), **options)
    with running_server(config) as server:
        follow(server, script)
        yield server


def follow(server: RunningServer, script: Mapping[str, str] | Callable[[str], str]) -> None:
    """From now on, the script decides instead of the model, which does not run: it would take most of a step's time. So
    nothing is written to KV blocks, and what the prefix cache has of them is of no use for the model. script: as for
    `scripted_server`, or a function of the prompt."""
    served = server.core.served
    tokenizer = served.tokenizer.reader

    answers: dict[int, list[int]] = {}  # by sequence
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in ENDS)
    ends = [tokens[0] for tokens in encoded if len(tokens) == 1]

    def answer_to(sequence: Any) -> list[int]:
        if sequence.sequence_id not in answers:
            prompt = tokenizer.decode(sequence.token_ids[: sequence.num_prompt_tokens])
            answer = script(prompt) if callable(script) else script[max(script, key=prompt.rfind)]
            pieces = (answer + END).split(SPELLED)
            tokens = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
            answers[sequence.sequence_id] = tokens
        return answers[sequence.sequence_id]

    def scripted(batch: Any, *args: Any) -> mx.array:
        rows = [row for row in batch.rows if row.samples]
        num_logits = max(1, len(rows)) + sum(len(row.prompt_logprobs) for row in batch.rows)
        logits = np.zeros((num_logits, served.vocab_size), dtype=np.float32)
        logits[:, ends] = 4.0
        for i, row in enumerate(rows):
            sequence = server.core.scheduler.sequences[row.sequence_id]
            tokens, position = answer_to(sequence), row.context_len - sequence.num_prompt_tokens
            logits[i, tokens[min(position, len(tokens) - 1)]] = 100.0
        return mx.array(logits)

    server.core.runner.forward = scripted  # type: ignore[method-assign]
