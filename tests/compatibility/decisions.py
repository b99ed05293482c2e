"""Fields of decisions, in all dialects."""

from __future__ import annotations

from typing import Any

from tests.compatibility.claims import Claim, by_model, honoured, ignored, label, refused

PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "x"}
CHOICE: dict[str, Any] = {"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": True}]}
SCORE: dict[str, Any] = {"type": "score", "instructions": "x", "levels": [{"label": "a"}, {"label": "b"}]}
NAMED = {"q": {"type": "bool", "instructions": "x"}}
OURS = "an addition; see [how options are read](decisions.md#how-options-are-read)"

METHOD: tuple[Claim, ...] = (
    honoured("calibration", "none", f"or `content_free`; {OURS}"),
    refused("calibration", "x"),
    honoured("orders", 2, OURS),
    honoured("answers", "symbol", f"`text`, `symbol` or `cloze`; {OURS}"),
    honoured("timeout", 60, "seconds; then a 408"),
    honoured("ttft_timeout", 60, "seconds until a question's row is computed"),
    honoured("service_tier", "flex", "the priority; the key's tier by default"),
)

DECISIONS: tuple[Claim, ...] = (
    honoured("model", "demo", "any model that generates text"),
    honoured("input", [{"role": "user", "content": "x"}], "text, or messages, calls and their results"),
    by_model("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]),
    honoured("questions", [PREDICATE, CHOICE | {"name": "n"}, SCORE], "1 to 400"),
    refused("questions", [PREDICATE | {"type": "x"}]),
    honoured("state", {"a": 1}, "mlx-vlm's, with an object of questions", input=None, questions=NAMED),
    by_model("images", ["data:,x"], "mlx-vlm's: paths are not read", input=None, questions=NAMED),
    honoured("prompt_cache_key", "k", "only requests with the same one share prefixes"),
    label("safety_identifier", "s"),
    ignored("user", "u", "use `safety_identifier`"),
    *METHOD,
)

SYSTEM_ONE: tuple[Claim, ...] = (
    honoured("model", "demo", "any model that generates text"),
    honoured("state", {"a": 1}, "text, or JSON"),
    honoured("questions", {"q": {"type": "score", "instructions": "x", "criteria": ["a", "b"]}}, "1 to 400"),
    refused("questions", {"q": {"type": "x"}}),
    by_model("images", ["data:,x"], "Rapid-MLX's"),
    honoured("temperature", 2, "Rapid-MLX's: divides the log-probabilities"),
    honoured("keep_alive", "5m", "as in [Ollama's API](api.md#ollama)"),
    *METHOD,
)
