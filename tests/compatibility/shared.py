"""The claims that chat completions and completions share, and a few that every API for text has."""

from __future__ import annotations

from tests.compatibility.claims import Claim, by_model, honoured, ignored, label, refused

CACHED = "every prompt is looked up in the prefix cache"
LOADED = "the server's flags decide how the model is loaded"
PART_OF_MIROSTAT = "it belongs to `mirostat`"
PART_OF_DRY = "it belongs to `dry_multiplier`"

DEADLINES: tuple[Claim, ...] = (
    honoured("timeout", 60, "seconds; then a 408"),
    honoured("ttft_timeout", 60),
)

LOOPS = honoured("end_loops", True, "ours: whether an answer ends that [only repeats itself](api.md#loops)")

PROGRESS = honoured("return_progress", True, "llama.cpp's; [a silent stream](api.md#streams) has data", stream=True)

PROMPT_LOGPROBS: tuple[Claim, ...] = (
    honoured("prompt_logprobs", 2, "vLLM's; up to 20"),
    refused("prompt_logprobs", 2, "not in a stream", stream=True),
)

IMAGES = "if the model takes images; base64 in a `data:` URL, PNG, JPEG, WEBP or GIF"
LEFT_OUT = "in earlier turns and tool results, if the model takes no images; it sees a text that says so"

LABELS: tuple[Claim, ...] = (
    label("user", "u", "numbers and objects too"),
    label("metadata", {"a": "b", "c": 1}),
    label("safety_identifier", "s"),
    label("prompt_cache_key", "k", CACHED),
)

CACHE_HINTS: tuple[Claim, ...] = (
    ignored("prompt_cache_options", {}, CACHED),
    ignored("prompt_cache_retention", "24h", CACHED),
)

SAMPLING: tuple[Claim, ...] = (
    honoured("min_tokens", 1),
    honoured("temperature", 1.5),
    honoured("top_p", 0.9, "0 keeps the likeliest token only"),
    honoured("top_k", 5),
    honoured("min_p", 0.1),
    honoured("repetition_penalty", 1.1, "0 means none, as in mlx-lm"),
    honoured("repetition_context_size", 20, "mlx-lm's: the penalty counts the last tokens only; default: all"),
    honoured("presence_penalty", 0.5),
    honoured("frequency_penalty", 0.5),
    honoured("logit_bias", {"20": -100}, "up to 300 tokens"),
    honoured("seed", 1, "-1 means a random one, as in vLLM and llama.cpp"),
    honoured("stop", ["a", "b"], "a string, or up to 16; an empty string is none"),
    honoured("stop_token_ids", [20]),
    honoured("ignore_eos", True),
    LOOPS,
    honoured("speculative", False, "ours: `false`, `true` or the most draft tokens of a step, up to 8"),
    honoured("n", 2, "up to 16"),
    honoured("stream", True),
    honoured("stream_options", {"include_usage": True}, stream=True),
    honoured(
        "stream_options",
        {"include_usage": True, "continuous_usage_stats": True},
        "vLLM's `continuous_usage_stats`: the usage so far is in every chunk",
        stream=True,
    ),
    label("stream_options", {"include_usage": True}, "without `stream`, where the usage is in the answer"),
    honoured("service_tier", "flex", "low priority"),
    refused("service_tier", "priority", "honoured if the caller's key allows it"),
    honoured("guided_json", {"type": "integer"}, "vLLM's names; a request may have one constraint"),
    honoured("guided_regex", "a+"),
    honoured("guided_choice", ["a", "b"]),
    honoured("guided_grammar", 'start: "a"', "Lark or GBNF"),
    honoured("structured_outputs", {"regex": "a+"}),
    refused("structured_outputs", {"regex": "("}, "with the reason"),
)

HINTS: tuple[Claim, ...] = (
    ignored("num_ctx", 8192, f"{LOADED}; a prompt that is too long is refused"),
    ignored("truncation_length", 8192, "a prompt that is too long is refused"),
    ignored("keep_alive", "5m", "the model stays loaded"),
    ignored("ttl", 60, "the model stays loaded"),
    ignored("n_keep", 4, "a prompt that is too long is refused"),
    ignored("num_keep", 4, "a prompt that is too long is refused"),
    ignored("num_gpu", 99, LOADED),
    ignored("num_thread", 4, LOADED),
    ignored("num_batch", 512, LOADED),
    ignored("draft_model", "d", "it would only make the answer faster"),
    ignored("num_draft_tokens", 3, "it would only make the answer faster"),
    ignored("repetition_detection", {"max_pattern_size": 20, "min_count": 4}, "vLLM's; use `end_loops`"),
    ignored("priority", 1, "use `service_tier`"),
    ignored("request_id", "r", "use the header `X-Request-Id`"),
    ignored("mirostat_tau", 5, PART_OF_MIROSTAT),
    ignored("mirostat_eta", 0.1, PART_OF_MIROSTAT),
    ignored("dynatemp_exponent", 1, "it belongs to `dynatemp_range`"),
    ignored("xtc_threshold", 0.1, "it belongs to `xtc_probability`"),
    ignored("dry_base", 1.75, PART_OF_DRY),
    ignored("dry_allowed_length", 2, PART_OF_DRY),
    ignored("dry_penalty_last_n", -1, PART_OF_DRY),
    ignored("dry_sequence_breakers", ["\n"], PART_OF_DRY),
    ignored("guided_decoding_backend", "outlines", "llguidance enforces every constraint"),
    ignored("structured_outputs.backend", {"regex": "a", "backend": "x"}, "llguidance enforces every constraint"),
)

OTHERS: tuple[Claim, ...] = (
    honoured("cache_salt", "s", "vLLM's; only with the same salt, requests share [prefixes](security.md#api-keys)"),
    by_model("adapters", "a", 'mlx-lm\'s; the name of an [adapter](models.md#lora-adapters); `""`: changes nothing'),
)
