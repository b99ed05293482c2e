"""The tools of a request, and their calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxpaged.formats.schemas import Schema, fits, loads, member
from mlxpaged.formats.source import NotACall
from mlxpaged.formats.values import json_of


@dataclass(frozen=True)
class Call:
    """arguments: a JSON object, as the model wrote it if it wrote JSON. id: the model's own, if it writes one."""

    name: str
    arguments: str
    id: str | None = None


class Tools:
    """tools: in OpenAI's form."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._schemas: dict[str, Any] = {each["name"]: each.get("parameters") for each in functions}
        self.names = tuple(self._schemas)

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def schema(self, name: str) -> Schema:
        """Raises NotACall if there is no such tool."""
        if name not in self._schemas:
            raise NotACall
        schema = self._schemas[name]
        return schema if isinstance(schema, Mapping) else {}

    def call(self, name: str, arguments: str, call_id: str | None = None) -> Call:
        """arguments: JSON as the model wrote it. Nothing and `null` are no arguments; an object may be written as a
        string. Raises NotACall for an unknown name and for anything else."""
        self.schema(name)
        value = loads(arguments or "{}")
        if isinstance(value, str):
            arguments = value
            value = loads(arguments or "{}")
        if value is None or not arguments.strip():
            arguments, value = "{}", {}
        if not isinstance(value, dict):
            raise NotACall
        return Call(name, arguments, call_id)

    def call_of(self, name: str, arguments: Mapping[str, str], call_id: str | None = None) -> Call:
        """arguments: JSON by key."""
        members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        return self.call(name, f"{{{', '.join(members)}}}", call_id)

    def fit(self, call: Call) -> bool:
        """Whether the arguments are what the schema asks for, as far as types, names and enumerations tell."""
        schema = self.schema(call.name)
        return fits(loads(call.arguments), schema, schema)

    def keys(self, name: str) -> frozenset[str] | None:
        """Returns the keys that the arguments may have; None if they may have any."""
        schema = self.schema(name)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or "patternProperties" in schema:
            return None
        if schema.get("additionalProperties", False) is not False:
            return None
        if any(word in schema for word in ("$ref", "anyOf", "oneOf", "allOf")):
            return None
        return frozenset(properties)

    def argument(self, name: str, key: str, text: str) -> str:
        """Returns the JSON of an argument that the model wrote as it is, without the quotes of a string."""
        root = self.schema(name)
        return json_of(text, member(root, key, root), root)
