"""The tokenizer of the demo model that sees: the other demo's kind, with tokens and a template for pictures."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import Tokenizer

from demo_model.tokenizer import SPECIAL_TOKENS, train_tokenizer
from demo_model.vision import tasks

IMAGE, ROW_END, IMAGE_END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
OF_PICTURES = (IMAGE, ROW_END, IMAGE_END)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- else -%}
{{- '[IMG]' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _corpus(seed: int, size: int = 6000) -> Iterator[str]:
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(size):
        turn = tasks.turn(rng, lambda: rng.randint(0, 999), [], 2)
        yield from (each for message in turn.asked for each in message.content if isinstance(each, str))
        yield f"assistant\n{turn.answer}"
        yield "user\ntool\nsystem\nYou are a helpful assistant."


def trained(vocab_size: int, seed: int) -> Tokenizer:
    return train_tokenizer(vocab_size, _corpus(seed), (*SPECIAL_TOKENS, *OF_PICTURES))
