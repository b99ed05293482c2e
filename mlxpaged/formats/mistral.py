"""Mistral's three ways: a list of JSON objects (Nemo, Small 3.1), a name and its arguments (Devstral, Ministral 3,
Magistral), and an id between them (Small 3.2). Their templates accept only ids of nine letters or digits."""

from __future__ import annotations

import hashlib
import re
import secrets
import string

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls, written_after
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools

START, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
MAX_NAME = 256


def new_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


def fit_id(given: str, name: str, number: int) -> str:
    """Returns the same id for the same one."""
    if re.fullmatch(f"[a-zA-Z0-9]{{{ID_LENGTH}}}", given):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode()).digest(), "big")
    return "".join(
        ID_CHARACTERS[number // len(ID_CHARACTERS) ** place % len(ID_CHARACTERS)] for place in range(ID_LENGTH)
    )


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.literal(START)
    yield from source.space()
    if (yield from source.ahead("[{", "[\n", "[ ", "{")):
        return (yield from json_calls(source, tools))
    name, mark = yield from source.until(ARGUMENTS, ID, "{", most=MAX_NAME)
    tools.schema(name.strip())
    call_id = None
    if mark == ID:
        given, _ = yield from source.until(ARGUMENTS, most=MAX_NAME)
        call_id = given.strip()
    elif mark == "{":
        source.at -= 1
    return [tools.call(name.strip(), (yield from source.json()), call_id)]


MISTRAL = Format(
    name="mistral",
    models="Mistral Nemo, Mistral Small, Devstral, Ministral 3, Magistral",
    starts=(START,),
    tokens=(ARGUMENTS, ID),
    read=read,
    in_template=((START,),),
    new_id=new_id,
    fit_id=fit_id,
    written=written_after(f"{{name}}{ARGUMENTS}", ""),
)
