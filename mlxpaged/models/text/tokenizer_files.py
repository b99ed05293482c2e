"""Makes the tokenizer of a model's directory: of its tokenizer.json, with the rules of that file.

transformers 5 builds many of its classes (GPT2Tokenizer, Qwen2Tokenizer, LlamaTokenizer, BertTokenizer and others) from
the file's vocabulary and merges alone, with the rules of the class (findings/tokenizer_rules.sh). So its classes are
only used for a directory without a tokenizer.json. tokenizer_config.json and special_tokens_map.json name the special
tokens and have the chat template and other settings.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer as FastTokenizer
from transformers import CodeLlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.generation_config import end_tokens_of
from mlxpaged.models.files.json_files import CONFIG, model_config, read_object
from mlxpaged.models.files.weight_names import known_classes
from mlxpaged.models.panics import guarded
from mlxpaged.models.text.control_tokens import encoded
from mlxpaged.models.text.tekken import TEKKEN, own_template, tekken_tokenizer
from mlxpaged.models.text.tokenizer import SAMPLE, Tokenizer
from mlxpaged.models.text.tokenizer_limits import NAME, check_tokenizer_file

logger = logging.getLogger(__name__)

SETTINGS, NAMES = "tokenizer_config.json", "special_tokens_map.json"

TELLING = (
    "hello\n 1  12",
    "Don't YOU'LL the 3rd 1234567",
    "  two  spaces\r\n\n\tand tabs\t ",
    "na\u00efve cafe\u0301 Stra\u00dfe \ufb01 \u00c5",
    "\u65e5\u672c\u8a9e\u306e 2\u6587\u5b57 \ud55c\uad6d\uc5b4 \U0001f642",
    "x_y = f(a.b, 'c')!!  # [1, 2]",
)
"""Texts of which other rules make other tokens: how they treat numbers, line feeds, spaces, case, accents, letters of
other scripts and marks."""

CHANGE_TEXTS = (CodeLlamaTokenizer, NewlineTokenizer)
"""Classes that change a text before the file's rules do: they are kept, with the file's rules."""

HEED = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer"}
"""Classes by which transformers 4 put `add_bos_token` and `add_eos_token` above the file; transformers 5 writes no such
settings. DeepSeek V3 is published with a file that adds no begin token, and the setting that does."""


def tokenizer_in(
    path: Path, tool_parser: str | None, end_tokens: Sequence[int], chat_template: Path | None = None
) -> Tokenizer:
    """The tokenizer of a model's directory. end_tokens: of its generation_config.json. chat_template: a file that
    replaces the model's own. Raises any exception."""
    growth = check_tokenizer_file(path)
    # Not those that mlx-lm finds: it takes them from generation_config.json without checking it.
    ends = end_tokens or end_tokens_of(CONFIG, model_config(path)) or None
    more = processor_template(path) if chat_template is None else {"chat_template": read_template(chat_template)}
    return guarded(lambda: Tokenizer(wrapped_tokenizer(path, more, ends), tool_parser, growth))()


def read_template(path: Path) -> str:
    """Raises UnsupportedModelError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"the chat template {path} cannot be read: {error}") from error


def processor_template(path: Path) -> dict[str, Any]:
    """The setting of a tokenizer that has no chat template of its own: that of the processor, which transformers 4
    wrote into another file. Mistral Small 3.1 has it there only. Raises UnsupportedModelError."""
    own = read_object(path / SETTINGS, missing_is_empty=True).get("chat_template")
    if own or (path / "chat_template.jinja").exists():
        return {}
    found = read_object(path / "chat_template.json", missing_is_empty=True).get("chat_template")
    return {"chat_template": found} if isinstance(found, str) else {}


def wrapped_tokenizer(path: Path, more: Mapping[str, Any], end_tokens: Sequence[int] | None) -> TokenizerWrapper:
    """more: settings above those of the directory. Raises any exception."""
    settings, config = read_object(path / SETTINGS, missing_is_empty=True), model_config(path)
    if (path / NAME).is_file():
        plain = file_tokenizer(path, settings, config, more)
    elif (path / TEKKEN).is_file():
        plain = tekken_tokenizer(path, settings, more)
    else:
        by_class: TokenizerWrapper = load_tokenizer(path, dict(more), eos_token_ids=end_tokens)
        return by_class
    if plain.chat_template is None:
        plain.chat_template = own_template(path)
    # mlx-lm's `load` does this too, and always makes the tokenizer by the class.
    defaults = mlx_lm_defaults(config)
    named = plain.init_kwargs.get("chat_template_type")
    kind = named or (defaults.get("chat_template_type") if plain.chat_template is None else None)
    code = importlib.import_module(f"mlx_lm.chat_templates.{kind}").apply_chat_template if kind else None
    ends = defaults.get("eos_token_ids") if end_tokens is None else end_tokens
    return TokenizerWrapper(plain, NoDetokenizer, eos_token_ids=ends, chat_template=code)


class NoDetokenizer:
    """Stands for mlx-lm's detokenizers, which are not used: they keep the texts of all tokens."""

    def __init__(self, tokenizer: Any) -> None:
        pass


def mlx_lm_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that mlx-lm's module of a model has for its tokenizer."""
    try:
        model, _ = known_classes(dict(config))
    except (KeyError, ValueError):  # it has no such module
        return {}
    found: Mapping[str, Any] = getattr(importlib.import_module(model.__module__), "TOKENIZER_DEFAULTS", {})
    return found


def file_tokenizer(path: Path, settings: Mapping[str, Any], config: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """That of a tokenizer.json. settings, config: tokenizer_config.json and config.json."""
    file, name = path / NAME, class_name(settings, config)
    alone = FastTokenizer.from_file(str(file))
    stated = stated_names(path)
    names = default_names(name) | (stated if "added_tokens_decoder" in settings else {})
    read = settings if "added_tokens_decoder" in settings else {**stated, **settings}  # by transformers itself
    named = {key: text for key, text in names.items() if key not in read and alone.token_to_id(text) is not None}
    # transformers alarms without this setting, for all models of more than 100,000 tokens that it takes for Mistral's.
    given = {"tokenizer_file": str(file), "fix_mistral_regex": settings.get("fix_mistral_regex") is True}
    plain = file_class(name).from_pretrained(path, **given, **named, **more)
    fast: FastTokenizer = plain.backend_tokenizer
    for each in (fast, alone):  # the file may have those of a training
        each.no_truncation()
        each.no_padding()
    put_around(plain, settings, name)
    report_differences(plain, alone, settings)
    return plain


def class_name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The class that transformers 4 would make, without "Fast"; empty if it is not known."""
    by_type = TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
    found = settings.get("tokenizer_class") or config.get("tokenizer_class") or by_type
    return found.removesuffix("Fast") if isinstance(found, str) else ""


def file_class(name: str) -> Any:
    """A class of this name that has the file's rules. transformers does not read them for a class that has a
    constructor of its own."""
    kept = next((each for each in CHANGE_TEXTS if each.__name__ == name), PreTrainedTokenizerFast)
    return type(name, (kept,), {}) if name.isidentifier() else kept


def default_names(name: str) -> dict[str, str]:
    """The special tokens that a class has if no file names them, by their names. BERT and GPT-2 are published so."""
    found: Any = None
    try:
        found = tokenizer_class_from_name(name)
    except Exception:  # transformers imports what a file names, and may lack what that needs
        return {}
    if not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
        return {}
    parameters = inspect.signature(found).parameters
    known = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    values = {key: parameters[key].default for key in known if key in parameters}
    return {key: value for key, value in values.items() if isinstance(value, str)}


def stated_names(path: Path) -> dict[str, str]:
    """The special tokens of special_tokens_map.json. transformers does not read it beside `added_tokens_decoder`."""
    found = read_object(path / NAMES, missing_is_empty=True)
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    known = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    return {key: text for key, text in texts.items() if key in known and isinstance(text, str)}


def put_around(plain: Any, settings: Mapping[str, Any], name: str) -> None:
    """Puts begin and end tokens around texts as the settings say, if the class heeded them. name: of the class."""
    found = tokens_around(plain)
    asked = {key: settings[key] for key in found if isinstance(settings.get(key), bool)}
    if (not name or name in HEED) and found != (wanted := found | asked):
        plain.add_bos_token, plain.add_eos_token = wanted["add_bos_token"], wanted["add_eos_token"]
        logger.info("what its tokenizer_config.json says of begin and end tokens counts, not its tokenizer.json")


def tokens_around(plain: Any) -> dict[str, bool]:
    """Whether the rules put a begin and an end token around a text, by the names of the settings."""
    fast: FastTokenizer = plain.backend_tokenizer
    alone, whole = (fast.encode(SAMPLE, add_special_tokens=special).ids for special in (False, True))
    begins = plain.bos_token_id is not None and whole[:1] == [plain.bos_token_id] != alone[:1]
    ends = plain.eos_token_id is not None and whole[-1:] == [plain.eos_token_id] != alone[-1:]
    return {"add_bos_token": begins, "add_eos_token": ends}


def report_differences(plain: Any, alone: FastTokenizer, settings: Mapping[str, Any]) -> None:
    """Logs what is not as a file says. alone: the tokenizer of the tokenizer.json alone."""
    fast: FastTokenizer = plain.backend_tokenizer
    bare = partial(encoded, add_special_tokens=False)
    if (text := next((text for text in TELLING if bare(fast, text) != bare(alone, text)), None)) is not None:
        logger.warning("the model's tokenizer makes other tokens of %r than its tokenizer.json", text)
    if contradicted := contradicted_settings(plain, settings):
        logger.warning("the rules of its tokenizer.json count, not %s in its tokenizer_config.json", contradicted)
    listed = settings.get("added_tokens_decoder")
    for number, token in listed.items() if isinstance(listed, dict) else ():
        text = token.get("content") if isinstance(token, dict) else None
        if isinstance(text, str) and (given := fast.token_to_id(text)) != int(number):
            logger.warning(
                "its token %r has the number %s, not %s as in its tokenizer_config.json", text, given, number
            )
            return


def contradicted_settings(plain: Any, settings: Mapping[str, Any]) -> str:
    """Settings that classes heeded and the rules of the file do not."""
    fast: FastTokenizer = plain.backend_tokenizer
    names = {"bos": plain.bos_token_id, "eos": plain.eos_token_id}
    rules = {key: value for key, value in tokens_around(plain).items() if names[key[4:7]] is not None}
    for part, field, setting in (
        (fast.normalizer, "lowercase", "do_lower_case"),
        (fast.pre_tokenizer, "add_prefix_space", "add_prefix_space"),
    ):
        state = json.loads(part.__getstate__()) if part is not None else {}
        rules |= {setting: state[field]} if field in state else {}
    asked = {key: settings.get(key) for key in rules}
    return " and ".join(key for key, value in asked.items() if isinstance(value, bool) and value != rules[key])
