"""Fields of completions."""

from __future__ import annotations

from mlxpaged.api.fields import shared
from mlxpaged.api.fields.table import Table, alias, honoured, refused

TABLE = Table(
    honoured("prompt", ["one", "two"], "text, token ids, or a list of either"),
    honoured("model", "demo", "another model is a 404"),
    honoured(
        "max_tokens", 2, "the default is 16; `null` and -1 are no limit; it is cut to what is left of the context"
    ),
    honoured("max_tokens", 0, "only the prompt is computed"),
    *shared.SAMPLING,
    honoured("best_of", 2, "not in a stream"),
    honoured("logprobs", 2, "up to 20; in streams too"),
    honoured("echo", True),
    honoured("echo", True, "log-probabilities of the prompt and the answer; in streams too", logprobs=1),
    honoured("split_special_tokens", True, "[control tokens](security.md#control-tokens) in the prompt are text"),
    *shared.PROMPT_LOGPROBS,
    *shared.DEADLINES,
    shared.PROGRESS,
    *shared.LABELS,
    *shared.EVERYWHERE,
    *shared.ALIASES,
    alias("max_completion_tokens", 2, "max_tokens", max_tokens=None),
    *shared.HINTS,
    refused("suffix", "x", "models get the text before the answer only", ("",)),
    refused("add_special_tokens", False, "the tokenizer adds its special tokens; send token ids", (True,)),
    refused("prompt_embeds", "x", "a prompt is text or token ids"),
    refused("system", "Be brief.", "put it into the prompt", ("",)),
    refused("response_format", {"type": "json_object"}, "use `structured_outputs`", ({"type": "text"},)),
    refused("tools", [{"type": "function", "function": {"name": "f"}}], "use `/v1/chat/completions`", ([],)),
    *shared.REFUSALS,
)
