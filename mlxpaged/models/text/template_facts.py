"""Says what the chat templates and the vocabulary of a model tell before it is loaded: whether it chats, thinks, is
told of tools, and fills in the middle of a text."""

from __future__ import annotations

import functools
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlxpaged.formats import FORMATS, HARMONY, HERMES, format_of, thought_tags
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.files import TEMPLATES, check_file
from mlxpaged.models.files.json_files import read_object
from mlxpaged.models.sources.gguf.file import LENGTH, MAX_HEADER_BYTES, GgufFile
from mlxpaged.models.text.infill import family_in
from mlxpaged.models.text.tekken import own_template
from mlxpaged.models.text.template_form import Messages, takes_tools
from mlxpaged.models.text.templates.renderer import TemplateError, TemplateLimitError, render, variables_of
from mlxpaged.models.text.tokenizer_files import SETTINGS, processor_template, read_template
from mlxpaged.models.text.tokenizer_limits import NAME

ADDED = (SETTINGS, "special_tokens_map.json", "added_tokens.json")
"""Files that add tokens to a vocabulary."""
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of templates."""
PROBES = "probe 0", "probe 1"


@dataclass(frozen=True)
class ChatFacts:
    """template: the text of all chat templates. chats: whether it has one. parser: the format of its calls. shown_by:
    what tells the model of tools; None if it does not chat. infills: whether the vocabulary marks the middle of a
    text."""

    template: str = ""
    chats: bool = False
    thinks: bool = False
    parser: str = HERMES.name
    shown_by: str | None = None
    infills: bool = False


NO_CHAT = ChatFacts()


def templates_in(path: Path) -> dict[str, str]:
    """The chat templates of a directory by their names, as transformers finds them. Raises UnsupportedModelError."""
    own = [(DEFAULT, path / "chat_template.jinja"), *((each.stem, each) for each in (path / TEMPLATES).glob("*.jinja"))]
    for _, each in own:
        check_file(each)
    if found := {name: read_template(each) for name, each in own if each.is_file()}:
        return found
    stated = read_object(path / SETTINGS, missing_is_empty=True).get("chat_template")
    if isinstance(stated, list):
        return {str(each["name"]): str(each["template"]) for each in stated}
    text = stated or processor_template(path).get("chat_template") or own_template(path)
    return {DEFAULT: text} if isinstance(text, str) else {}


def chat_facts(
    templates: Mapping[str, str], is_code: bool, vocabulary: Container[str], tool_parser: str | None = None
) -> ChatFacts:
    """What `Tokenizer` finds in a loaded model. is_code: whether mlx-lm has the template in Python. tool_parser: as
    `Tokenizer` has it."""
    text = "\n".join(templates.values())
    form = FORMATS[tool_parser] if tool_parser else format_of(text, vocabulary)
    try:
        names = variables_of(text) if text else frozenset({"tools"})
    except (TemplateError, TemplateLimitError, OSError):
        names = frozenset()
    used = partial(rendered, templates.get(FOR_TOOLS) or templates.get(DEFAULT, text))
    shows = form is not None and "tools" in names and (not text or takes_tools(used))
    may_show_calls = form is not None and form.shown is not None and (not text or "tool_calls" in text)
    tools = form if form is not None and (shows or may_show_calls or form is HARMONY) else HERMES
    chats = bool(text) or is_code
    told = "system_message" if not text or takes_system(templates.get(DEFAULT, text)) else "user_message"
    thinks = bool(thought_tags(vocabulary)) or tools is HARMONY
    shown_by = "chat_template" if shows else told if chats else None
    return ChatFacts(text, chats, thinks, tools.name, shown_by, family_in(vocabulary) is not None)


def takes_system(template: str) -> bool:
    """Whether a chat template shows a system message."""
    said = [{"role": role, "content": text} for role, text in zip(("system", "user"), PROBES, strict=True)]
    return PROBES[0] in (rendered(template, said) or "")


def rendered(template: str, messages: Messages, **variables: Any) -> str | None:
    """None if a chat template refuses the messages, or exceeds a limit."""
    names = {"messages": messages, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
    try:
        return render(template, names | variables)
    except (TemplateError, TemplateLimitError, OSError):
        return None


class FileVocabulary:
    """Tells which control tokens the files of a directory name. Only added tokens are searched in a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        whole = (self._path / NAME).is_file()
        names = (NAME, *ADDED) if whole else (*ADDED, "tekken.json", "vocab.json")
        return [named_tokens(self._path / name) for name in names]

    def __contains__(self, token: object) -> bool:
        written = {json.dumps(token, ensure_ascii=ascii).encode() for ascii in (False, True)}
        return any(each in text for text in self._texts for each in written)


def named_tokens(path: Path) -> bytes:
    """A file that names tokens; of a tokenizer.json, what comes before its vocabulary. Empty if it cannot be read."""
    try:
        check_file(path)
        data = path.read_bytes()
    except (OSError, UnsupportedModelError):
        return b""
    before, _, _ = data.partition(b'"model"')
    return before if path.name == NAME and b'"added_tokens"' in before else data


class GgufVocabulary:
    """Tells which tokens the header of a GGUF file has, by their bytes: to make strings of all takes long."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    @functools.cached_property
    def _header(self) -> bytes:
        end = min(tensor.offset for tensor in self._file.tensors.values() if tensor.path == self._file.path)
        with self._file.path.open("rb") as file:
            return file.read(min(end, MAX_HEADER_BYTES))

    def __contains__(self, token: object) -> bool:
        text = str(token).encode()
        return LENGTH.pack(len(text)) + text in self._header
