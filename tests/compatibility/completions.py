"""Fields of completions."""

from __future__ import annotations

from tests.compatibility import shared
from tests.compatibility.claims import Claim, by_model, honoured, ignored

TABLE: tuple[Claim, ...] = (
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
    honoured("suffix", "", "changes nothing"),
    by_model("suffix", "x", "if tokens of the vocabulary mark the [middle of a text](api.md#the-middle-of-a-text)"),
    honoured("split_special_tokens", True, "[control tokens](security.md#control-tokens) in the prompt are text"),
    *shared.PROMPT_LOGPROBS,
    *shared.DEADLINES,
    shared.PROGRESS,
    *shared.LABELS,
    ignored("prediction", {"type": "content", "content": "x"}, "chat completions have it; it changes no answer"),
    *shared.HINTS,
    *shared.OTHERS,
)
