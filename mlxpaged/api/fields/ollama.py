"""Fields of Ollama's API."""

from __future__ import annotations

from typing import Any

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Row, Table, ignored, label, refused

LOADED = "how a model is loaded is decided when the server starts"
NOT_SAMPLED = "this server does not sample in this way"
TOO_LONG = "a prompt that is too long is refused"
SHORT: dict[str, Any] = {"num_predict": 2}


def off(name: str, value: Any, neutral: tuple[Any, ...]) -> Row:
    return refused(f"options.{name}", SHORT | {name: value}, NOT_SAMPLED, neutral)


GENERATING: tuple[Row, ...] = (
    off("typical_p", 0.5, (1,)),
    off("tfs_z", 2.0, (1,)),
    off("mirostat", 2, (0,)),
    label("options.mirostat_tau", SHORT | {"mirostat_tau": 5.0}, "it belongs to `mirostat`"),
    label("options.mirostat_eta", SHORT | {"mirostat_eta": 0.1}, "it belongs to `mirostat`"),
    ignored("truncate", True, TOO_LONG, (False,)),
    ignored("shift", True, "the context is not shifted: the answer ends with `length`", (False,)),
)

CHAT = Table(
    label("messages.tool_calls.type", [{"role": "user", "content": "x"}], "every tool is a function"),
    label("messages.tool_calls.function.index", [{"role": "user", "content": "x"}], "the list has the order"),
    *GENERATING,
    *shared.EVERYWHERE,
)

GENERATE = Table(
    refused("template", "{{ .Prompt }}", "the model's own chat template is used; with `raw`, none", ("",)),
    refused("context", [20], "send the conversation to `/api/chat`; answers have no `context`", ([],)),
    *GENERATING,
    *shared.EVERYWHERE,
)

EMBED = Table(
    ignored("options", {"num_ctx": 4096}, LOADED, ({},)),
    *shared.EVERYWHERE,
)

EMBEDDINGS = Table(
    ignored("options", {"num_ctx": 4096}, LOADED, ({},)),
    *shared.EVERYWHERE,
)

SHOW = Table(
    label("verbose", True, "everything is always shown"),
    *shared.EVERYWHERE,
)

PULL = Table(
    ignored("insecure", True, "the hub is always asked in the same way", (False,)),
    *shared.EVERYWHERE,
)
