"""Makes the tokenizer of a tekken.json, Mistral's own format, with or without the package mistral-common.

transformers prefers a class of its own where mistral-common is installed. That class is in Python: it can neither
encode control tokens as text nor encode on several threads.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from transformers import PreTrainedTokenizerFast

from mlxpaged.models.errors import UnsupportedModelError, in_one_line
from mlxpaged.models.files.files import check_file
from mlxpaged.models.text.tokenizer_limits import MAX_ADDED_TOKENS, MAX_ENTRIES

logger = logging.getLogger(__name__)

TEKKEN = "tekken.json"
MAX_BYTES = 256
"""Bytes of a token; Mistral's have up to 78. The time to find what is merged grows with their square."""
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens of all such files (mistral_common/tokens/tokenizers/base.py, SpecialTokens)."""
PACKAGE = "mistral_common"


def tekken_tokenizer(path: Path, settings: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """That of a directory. settings: tokenizer_config.json. more: settings above it. Raises any exception."""
    file = path / TEKKEN
    check_tekken_file(file)
    names = {key: text for key, text in NAMES.items() if not settings.get(key)}
    # transformers' conversion puts no begin token before a text, and mistral-common does.
    given = {"vocab_file": str(file), "add_bos_token": True, "fix_mistral_regex": False}
    return PreTrainedTokenizerFast.from_pretrained(path, **given, **names, **more)


def check_tekken_file(file: Path) -> None:
    """Raises UnsupportedModelError for a file that could take all memory or time, or that only mistral-common knows the
    control tokens of."""
    check_file(file)
    try:
        data = file.read_bytes()
        if (count := data.count(b'":') + data.count(b'" :')) > MAX_ENTRIES:
            raise UnsupportedModelError(f"its {TEKKEN} has {count:,} entries; the limit is {MAX_ENTRIES:,}")
        found = from_json(data, cache_strings="none")
        longest = max((len(base64.b64decode(token["token_bytes"])) for token in found["vocab"]), default=0)
        stated = int(found["config"].get("default_num_special_tokens") or 0)
        num_special = max(stated, len(found.get("special_tokens") or ()))
        if not isinstance(found["config"]["pattern"], str):
            raise TypeError("its pattern is no text")
    except OSError as error:
        raise UnsupportedModelError(f"its {TEKKEN} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"its {TEKKEN} is no vocabulary of Mistral's: {in_one_line(error)}") from error
    if longest > MAX_BYTES:
        raise UnsupportedModelError(f"its {TEKKEN} has a token of {longest:,} bytes; the limit is {MAX_BYTES}")
    if num_special > MAX_ADDED_TOKENS:
        raise UnsupportedModelError(f"its {TEKKEN} adds {num_special:,} tokens; the limit is {MAX_ADDED_TOKENS:,}")
    if "special_tokens" not in found and importlib.util.find_spec(PACKAGE) is None:
        raise UnsupportedModelError(
            f"its {TEKKEN} does not name its control tokens, which only mistral-common knows: `pip install "
            "mistral-common`, or take a repository with a tokenizer.json"
        )


def own_template(path: Path) -> str | None:
    """The chat template that mistral-common makes of a directory's file; None if there is no such file, or it is not
    installed, or makes none."""
    file = path / TEKKEN
    if not file.is_file() or importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        check_tekken_file(file)
        made = importlib.import_module(f"{PACKAGE}.integrations.chat_templates.chat_templates")
        return str(made.convert_tokenizer_to_chat_template(str(file)))
    except Exception as error:  # it raises any type for a file that it does not know
        logger.warning("mistral-common makes no chat template of its %s: %s", TEKKEN, in_one_line(error))
        return None
