"""Reads what other providers' services have put into a conversation, and tools that only they run. The table of
`fields/kinds.py` says what happens to each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BeforeValidator, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields.kinds import UNKNOWN, Handling, Kind
from mlxpaged.api.reading import UNSAFE, Reading
from mlxpaged.api.schema import MAX_TOOLS, Body

MAX_TYPE = 40
HIDDEN = {
    *("id", "signature", "fingerprint", "cache_control", "annotations", "citations", "logprobs"),
    *("data", "file_data", "image_url", "screenshot"),
}
"""Fields that are no text for a model, in what is shown. So are those that begin with "encrypted"."""
NOT_RUN = "the server runs no tools itself; define a function, which your program runs"


SHOWN = "only its text is shown to the model"
UNREADABLE = "the model is not shown it: no text in it can be read here"


def type_name(kind: str) -> str:
    """Returns the name of a type that a client sent, for headers, logs and prompts."""
    return UNSAFE.sub("?", kind[:MAX_TYPE]) or "?"


def text_shown(kind: str, value: Mapping[str, Any], table: Mapping[str, Kind]) -> str | None:
    """Returns the text that the model is shown of an item or part; None if it is left out."""
    row = table.get(kind, UNKNOWN)
    texts = [as_text(value.get(name)) for name in row.fields]
    shown = "\n".join(filter(None, texts))
    return f"[{type_name(kind)}]\n{shown}" if shown else None


def as_text(value: Any) -> str:
    """Returns what can be read of a value: a text as it is, a list in lines, and other values as JSON."""
    if isinstance(value, list):
        return "\n".join(filter(None, map(as_text, value)))
    readable = without_hidden(value)
    if readable in (None, {}, []):
        return ""
    return readable if isinstance(readable, str) else json.dumps(readable, ensure_ascii=False)


def without_hidden(value: Any) -> Any:
    """Returns a value without what is no text. A part that is a text, or a document of text, becomes this text."""
    if isinstance(value, list):
        return [each for each in map(without_hidden, value) if each not in (None, "", {}, [])]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("text"), str) and set(value) - HIDDEN <= {"type", "text"}:
        return value["text"]
    if (document := text_of_document(value)) is not None:
        return document
    kept = {
        name: without_hidden(each)
        for name, each in value.items()
        if name not in HIDDEN and not name.startswith("encrypted")
    }
    found = {name: each for name, each in kept.items() if each not in (None, "", {}, [])}
    return found if found.keys() - {"type"} else None


def text_of_document(part: Mapping[str, Any]) -> str | None:
    """Returns what the model is shown of a document or a search result of Anthropic's API: the title, the context or
    source, and the text, in lines of their own. None if its source is no text."""
    source, content, head = part.get("source"), part.get("content"), part.get("context")
    if part.get("type") == "search_result":
        head = source
    elif part.get("type") == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        content = source.get("data" if source["type"] == "text" else "content")
    else:
        return None
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or any(not isinstance(each, dict) or each.get("type") != "text" for each in blocks):
        return None
    pieces = [part.get("title"), head, *(each.get("text") for each in blocks)]
    return "\n".join(each for each in pieces if isinstance(each, str) and each)


class OtherTool(Body):
    """A tool that only another provider's service runs. The model does not see it."""

    type: Literal["other"]


def known_tools(kinds: Mapping[str, Kind], given: str, default: str | None = None) -> BeforeValidator:
    """Returns a validator of tools. Those that the server would have to run are ignored by name beside others, because
    agents send them to every server. Raises ApiError if there are no others.

    kinds: the API's table. given: the place of the tools. default: the type of a tool that names none."""

    def check(tools: Any, info: ValidationInfo) -> Any:
        if not isinstance(tools, list) or len(tools) > MAX_TOOLS:  # which is refused for its length
            return tools
        types = [tool.get("type") or default if isinstance(tool, dict) else None for tool in tools]
        others: dict[int, str] = {}
        for i, kind in enumerate(types):
            handling = kinds.get(kind, Kind(Handling.IGNORED)).handling if isinstance(kind, str) else Handling.READ
            if handling is Handling.REFUSED:
                message = "custom tools are not supported by this API; use /v1/responses, or define a function"
                raise bad_parameter(f"{given}.{i}.type", message)
            if handling is Handling.IGNORED:
                others[i] = str(kind)
        if others and len(others) == len(tools) and given == "tools":
            first, kind = next(iter(others.items()))
            raise bad_parameter(f"{given}.{first}.type", f"{type_name(kind)!r} tools are not supported: {NOT_RUN}")
        for kind in others.values():
            leave_out(info, f"{given}.{type_name(kind)}", NOT_RUN)
        return [{"type": "other"} if i in others else tool for i, tool in enumerate(tools)]

    return BeforeValidator(check)


def hint(field: str) -> WrapValidator:
    """Returns a validator of a field that chooses among words and asks for no other answer: a word that the server does
    not know, as a later version of an API may have it, is ignored by name.

    field: its path. "*" stands for the field that has the conversation."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError:
            if not isinstance(value, str):
                raise
            leave_out(info, field.replace("*", conversation_of(info)), "this value is not known")
            return None

    return WrapValidator(check)


def conversation_of(info: ValidationInfo) -> str:
    """Returns the field of the body that has the conversation."""
    return info.context.conversation if isinstance(info.context, Reading) else "messages"


def leave_out(info: ValidationInfo, field: str, reason: str) -> None:
    """Notes that a value of a body is not used. Raises ApiError if the server is strict. Without a `Reading`, a stored
    item is read, which its own request has named."""
    if isinstance(info.context, Reading):
        info.context.leave_out(field, reason)
