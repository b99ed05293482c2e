"""The demo model's tokenizer: a byte-level BPE trained on the tasks' own text, and its files.

Spaces are tokens of their own and digits stand alone, so that a word has the same tokens wherever it is in a
text.  That makes copying a text a matter of copying tokens, which a model this small learns for any text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model import tasks

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, IM_START, IM_END)  # in the order of their ids, from 0

# Words, single digits, single white space characters, single other characters.
_PRE_TOKEN = r"\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def text_of_tasks(seed: int, size: int = 6000) -> Iterator[str]:
    """Generated examples."""
    rng = random.Random(f"tokenizer {seed}")
    names = list(tasks.TASKS)
    for _ in range(size):
        example = tasks.training_example(rng, tasks.TASKS[rng.choice(names)])
        yield f"user\n{example.messages[-1]['content']}"
        yield f"assistant\n{example.answer}"
        yield "system\nYou are a helpful assistant."


def train_tokenizer(
    vocab_size: int, corpus: Iterator[str], special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """Train the BPE on a text; with all 256 bytes in its alphabet it encodes any other."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer,
    out: Path,
    max_length: int,
    template: str = CHAT_TEMPLATE,
    additional: Sequence[str] = (IM_START,),
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers reads them.

    additional: special tokens beside those that pad and end.
    """
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": PAD,
        "eos_token": IM_END,
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(additional),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
