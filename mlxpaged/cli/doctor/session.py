"""`mlxpaged doctor --session FILE`: what would be lost of a session of another service that goes on here. The server's
own models read it, so that it says what they do."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from mlxpaged.api.anthropic.schema import Message as ClaudeMessage
from mlxpaged.api.anthropic.schema import MessagesRequest, ToolsBlock, blocks_of
from mlxpaged.api.errors import ApiError, from_validation
from mlxpaged.api.fields.kinds import Handling
from mlxpaged.api.media import MediaPart, OtherPart
from mlxpaged.api.openai.responses.schema import (
    REFERENCE,
    InputItem,
    ItemReference,
    MessageItem,
    OtherItem,
    ReasoningItem,
    ResponseRequest,
    ResultItem,
    ToolsItem,
)
from mlxpaged.api.reading import Reading
from mlxpaged.cli.doctor.session_file import CODEX, Entry, SessionError, read
from mlxpaged.cli.visible import visible

ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)
MESSAGE: TypeAdapter[Any] = TypeAdapter(ClaudeMessage)
MOST_REFUSED = 20
"""Refusals that are shown."""
WORDS = {
    Handling.READ: "read",
    Handling.OFFERED: "tools that can be called",
    Handling.SHOWN: "shown as text",
    Handling.LEFT_OUT: "left out",
    Handling.MEDIA: "shown if the model takes it, else left out",
    Handling.REFUSED: "refused",
}


@dataclass(frozen=True)
class Finding:
    """What happens to an item or a part. because: why it is refused."""

    place: str
    kind: str
    handling: Handling
    because: str = ""


def run(args: argparse.Namespace) -> int:
    """Returns exit status 1 if the file cannot be read or something in it would be refused, else 0."""
    try:
        session = read(Path(args.session))
    except SessionError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    judge = of_item if session.client == CODEX else of_message
    found = [finding for entry in session.entries for finding in judged(entry, judge)]
    print(json.dumps(as_json(session.client, found), indent=1) if args.json else as_lines(session.client, found))
    return int(any(finding.handling is Handling.REFUSED for finding in found))


def judged(entry: Entry, judge: Any) -> Iterator[Finding]:
    try:
        yield from [Finding(entry.place, *each) for each in judge(entry.value)]
    except (ApiError, ValidationError) as error:
        because = from_validation(error) if isinstance(error, ValidationError) else error
        kind = entry.value.get("type") or entry.value.get("role")
        yield Finding(entry.place, str(kind)[:40], Handling.REFUSED, because.message)


Judgement = tuple[str, Handling]


def of_item(value: dict[str, Any]) -> Iterator[Judgement]:
    """Yields what happens to an item of the responses API. Raises ApiError and ValidationError."""
    item = ITEM.validate_python(value, context=Reading(ResponseRequest, strict=False))
    match item:
        case OtherItem():
            yield item.type, Handling.LEFT_OUT if item.text is None else Handling.SHOWN
        case ToolsItem():
            yield item.type, Handling.OFFERED
        case ReasoningItem() if item.encrypted_content and not item.content:
            yield "reasoning (encrypted)", Handling.SHOWN if item.text else Handling.LEFT_OUT
        case ItemReference():  # to an item of the server where the session began
            yield REFERENCE, Handling.LEFT_OUT
        case _:
            yield item.type, Handling.READ
            content = item.content if isinstance(item, MessageItem) else getattr(item, "output", None)
            if isinstance(item, MessageItem | ResultItem):
                yield from of_parts(content)


def of_message(value: dict[str, Any]) -> Iterator[Judgement]:
    """Yields what happens to the parts of a message. Raises ApiError and ValidationError."""
    message = MESSAGE.validate_python(value, context=Reading(MessagesRequest, strict=False))
    if isinstance(message.content, str):
        yield "text", Handling.READ
    for block in blocks_of(message):
        yield from of_parts([block])
        if isinstance(inner := getattr(block, "content", None), list):
            yield from of_parts(inner)


def of_parts(parts: Any) -> Iterator[Judgement]:
    for part in parts if isinstance(parts, list) else ():
        yield str(part.type), handling_of(part)


def handling_of(part: BaseModel) -> Handling:
    if isinstance(part, OtherPart) and part.shown_text is not None:
        return Handling.READ if part.type in ("document", "search_result") else Handling.SHOWN
    if isinstance(part, MediaPart):
        return Handling.LEFT_OUT if isinstance(part, OtherPart) and not part.is_media else Handling.MEDIA
    return Handling.OFFERED if isinstance(part, ToolsBlock) else Handling.READ


def counts(found: list[Finding], handling: Handling) -> Counter[str]:
    return Counter(each.kind for each in found if each.handling is handling)


def as_json(client: str, found: list[Finding]) -> dict[str, Any]:
    refused = [each for each in found if each.handling is Handling.REFUSED]
    return {
        "client": client,
        **{handling.name.lower(): dict(counts(found, handling)) for handling in WORDS},
        "refusals": [{"place": each.place, "type": each.kind, "because": each.because} for each in refused],
    }


def as_lines(client: str, found: list[Finding]) -> str:
    lines = [f"a session of {client}"]
    width = max(map(len, WORDS.values()))
    for handling, words in WORDS.items():
        kinds = counts(found, handling)
        named = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        if kinds:
            lines.append(f"{words:{width}} {kinds.total():5}  {named}")
    refused = [each for each in found if each.handling is Handling.REFUSED]
    lines += [f"  {each.place}: {each.because}" for each in refused[:MOST_REFUSED]]
    if len(refused) > MOST_REFUSED:
        lines.append(f"  and {len(refused) - MOST_REFUSED} more")
    lost = sum(each.handling is Handling.LEFT_OUT for each in found)
    ends = "it cannot go on here as it is" if refused else "it goes on here"
    lines.append(f"{ends}; {lost or 'nothing'} of {len(found)} would be left out")
    return visible("\n".join(lines))
