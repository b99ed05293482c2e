"""Harmony, the format of OpenAI's gpt-oss: an answer is several messages, each with a header that names its channel and
whom it is for (openai/harmony, docs/format.md).

Thoughts are in the channel `analysis`, calls in `commentary`, and the answer in `final`. Text in `commentary` that is
for no tool is said to the user before calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import written_after
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
LAST = ("<|call|>", "<|return|>")
"""They end an answer, whatever the model's configuration says."""
MARKS = (START, CHANNEL, *ENDS)
THOUGHTS = "analysis"
BEGIN_THOUGHT, END_THOUGHT = f"{CHANNEL}{THOUGHTS}{MESSAGE}", f"{ENDS[0]}{START}assistant"
"""Texts around a thought that is the first message of an answer."""
MAX_HEADER = 400
MAX_WORDS = 3
"""Words after a tag of a header: "commentary to=functions.weather json"."""
TAG = re.compile(r"<\|\w+\|>")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAMESPACE = "functions."


@dataclass(frozen=True)
class Header:
    """channel: empty if the header names none. tool: the recipient, if it is one of the request's tools."""

    channel: str = ""
    recipient: str = ""
    tool: str = ""


def read_calls(source: Source, tools: Tools) -> Reading[list[Call]]:
    found = yield from read(source, tools)
    if isinstance(found, Header):
        raise NotACall
    return found


def header_of(written: str, tools: Tools) -> Header:
    """written: what is before the message's text, without MESSAGE. It may be malformed in any way."""
    found = RECIPIENT.search(written)
    recipient = found[1] if found and found[1] not in ("assistant", "user") else ""
    name = recipient.removeprefix(NAMESPACE)
    tool = next((each for each in (recipient, name) if each in tools.names), "")
    channel = re.match(r"\s*(\w*)", written.rpartition(CHANNEL)[2]) if CHANNEL in written else None
    return Header(channel[1] if channel else "", recipient, tool)


def has_text(written: str) -> bool:
    """Whether a header has what may be a text of the model, or another message whose tags it has forgotten."""
    if re.search(r'[{}"]|\S\s*\n\s*\S', written) or len({*RECIPIENT.findall(written)}) > 1:
        return True
    return any(len(part.split()) > MAX_WORDS for part in TAG.split(written))


def read(source: Source, tools: Tools) -> Reading[list[Call] | Header]:
    """Reads the header of a message, and the whole message if it is for a tool. Raises NotACall for a header without an
    end or with text in it, and for a message to anything else but a tool."""
    written, mark = yield from source.until(MESSAGE, *ENDS, most=MAX_HEADER)
    header = header_of(written, tools)
    if mark != MESSAGE or (header.recipient and not header.tool) or has_text(written):
        raise NotACall
    if not header.tool:
        return header
    yield from source.space()
    arguments = "{}" if (yield from source.ahead(*ENDS)) else (yield from source.json())
    call = tools.call(header.tool, arguments)
    yield from source.close(*ENDS)
    return [call]


HARMONY = Format(
    name="harmony",
    models="gpt-oss",
    starts=(START, CHANNEL),
    ends=ENDS,
    tokens=(MESSAGE, CONSTRAIN),
    read=read_calls,
    written=written_after(f"{{name}} {CONSTRAIN}json{MESSAGE}", ""),
    begin_call=f"{CHANNEL}commentary to={NAMESPACE}",
    begin_text=f"{CHANNEL}final{MESSAGE}",
    in_template=((CHANNEL, MESSAGE), (START, MESSAGE, "analysis")),
    in_vocabulary=(START, CHANNEL, MESSAGE, "<|call|>", CONSTRAIN),
)
