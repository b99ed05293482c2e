"""The rows that chat completions and completions share, and a few that every API for text has."""

from __future__ import annotations

from mlxpaged.api.fields.table import Outcome, Row, alias, by_model, honoured, ignored, label, refused

ONLY_TOP = "the tokens to sample from are chosen by `top_p`, `top_k` and `min_p`"
NO_TOOLS = "the server runs no tools itself"
NAMED_ADAPTER = "use `adapters`, which names one"
CACHED = "every prompt is looked up in the prefix cache"
ONLY_COMPLETIONS = "chat completions have it; this API does not"
LOADED = "the server's flags decide how the model is loaded"
PART_OF_MIROSTAT = "it belongs to `mirostat`"
PART_OF_DRY = "it belongs to `dry_multiplier`"

EVERYWHERE: tuple[Row, ...] = (
    Row("*.cache_control", Outcome.LABEL, {"cache_control": {"type": "ephemeral"}}, CACHED),
    refused(
        "extra_body", {"top_k": 1}, "give its fields beside the others; it is an argument of OpenAI's client", ({},)
    ),
)

DEADLINES: tuple[Row, ...] = (
    honoured("timeout", 60, "seconds; then a 408"),
    honoured("ttft_timeout", 60),
)

PROGRESS = honoured("return_progress", True, "llama.cpp's; [a silent stream](api.md#streams) has data", stream=True)

PROMPT_LOGPROBS: tuple[Row, ...] = (
    honoured("prompt_logprobs", 2, "vLLM's; up to 20"),
    refused("prompt_logprobs", 2, "not in a stream", stream=True),
)

LEFT_OUT = "in earlier turns and tool results; the model sees a text that says so"

LABELS: tuple[Row, ...] = (
    label("user", "u", "numbers and objects too"),
    label("metadata", {"a": "b", "c": 1}),
    label("safety_identifier", "s"),
    label("prompt_cache_key", "k", CACHED),
)

CACHE_HINTS: tuple[Row, ...] = (
    ignored("prompt_cache_options", {}, CACHED),
    ignored("prompt_cache_retention", "24h", CACHED),
)

SAMPLING: tuple[Row, ...] = (
    honoured("min_tokens", 1),
    honoured("temperature", 1.5),
    honoured("top_p", 0.9, "0 keeps the likeliest token only"),
    honoured("top_k", 5),
    honoured("min_p", 0.1),
    honoured("repetition_penalty", 1.1, "0 means none, as in mlx-lm"),
    honoured("repetition_context_size", 20, "mlx-lm's: the penalty counts the last tokens only; default: all"),
    honoured("presence_penalty", 0.5),
    honoured("frequency_penalty", 0.5),
    honoured("logit_bias", {"20": -100}),
    honoured("seed", 1, "-1 means a random one, as in vLLM and llama.cpp"),
    honoured("stop", ["a", "b"], "a string, or up to 16; an empty string is none"),
    honoured("stop_token_ids", [20]),
    honoured("ignore_eos", True),
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
    ignored(
        "stream_options.include_obfuscation", {"include_obfuscation": True}, "no padding is sent", (False,), stream=True
    ),
    honoured("service_tier", "flex", "low priority"),
    refused("service_tier", "priority", "honoured if the caller's key allows it"),
    honoured("guided_json", {"type": "integer"}, "vLLM's names; a request may have one constraint"),
    honoured("guided_regex", "a+"),
    honoured("guided_choice", ["a", "b"]),
    honoured("guided_grammar", 'start: "a"', "Lark or GBNF"),
    honoured("structured_outputs", {"regex": "a+"}),
    refused("structured_outputs", {"regex": "("}, "with the reason"),
    refused(
        "structured_outputs.structural_tag", {"structural_tag": "{}"}, "use `json`, `regex`, `choice` or `grammar`"
    ),
    refused(
        "structured_outputs.whitespace_pattern", {"json": {}, "whitespace_pattern": " "}, "use `regex` or `grammar`"
    ),
)

ALIASES: tuple[Row, ...] = (
    alias("max_new_tokens", 2, "max_tokens", "TGI, SGLang", max_tokens=None),
    alias("num_predict", 2, "max_tokens", "Ollama; ignored beside `max_tokens`", yields=True, max_tokens=None),
    alias("n_predict", 2, "max_tokens", "llama.cpp", max_tokens=None),
    alias("max_output_tokens", 2, "max_tokens", "OpenAI's responses", max_tokens=None),
    alias(
        "options", {"top_k": 5}, "", "Ollama's; its fields count as fields of the body, which hold where they differ"
    ),
    alias("repeat_penalty", 1.1, "repetition_penalty", "llama.cpp, Ollama, LM Studio"),
    alias("repeat_last_n", 64, "repetition_context_size", "llama.cpp, Ollama; -1 means all tokens"),
    alias("repetition_penalty_range", 64, "repetition_context_size", "0 means all tokens", (0,)),
    alias("stop_sequences", ["a"], "stop"),
    alias("stopping_strings", ["a"], "stop", "text-generation-webui"),
    alias("random_seed", 1, "seed", "Mistral"),
    alias("ban_eos_token", True, "ignore_eos"),
    alias("json_schema", {"type": "integer"}, "guided_json", "llama.cpp", ({},)),
    alias("grammar", 'root ::= "a"', "guided_grammar", "llama.cpp", ("",)),
    alias("grammar_string", 'root ::= "a"', "guided_grammar", "text-generation-webui", ("",)),
    alias("regex", "a+", "guided_regex", "SGLang"),
)

HINTS: tuple[Row, ...] = (
    ignored("prediction", {"type": "content", "content": "x"}, "it would only make the answer faster"),
    ignored("num_ctx", 8192, f"{LOADED}; a prompt that is too long is refused"),
    ignored("truncation_length", 8192, "a prompt that is too long is refused"),
    ignored("keep_alive", "5m", "the model stays loaded"),
    ignored("ttl", 60, "the model stays loaded"),
    ignored("cache_prompt", False, CACHED, (True,)),
    ignored("id_slot", 0, "the scheduler places requests", (-1,)),
    ignored("n_keep", 4, "a prompt that is too long is refused"),
    ignored("num_keep", 4, "a prompt that is too long is refused"),
    ignored("min_keep", 1, "at least one token is always kept", (0,)),
    ignored("num_gpu", 99, LOADED),
    ignored("num_thread", 4, LOADED),
    ignored("num_batch", 512, LOADED),
    ignored("draft_model", "d", "it would only make the answer faster"),
    ignored("num_draft_tokens", 3, "it would only make the answer faster"),
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
    ignored("length_penalty", 1.2, "it belongs to beam search", (1, 0)),
    ignored("early_stopping", True, "it belongs to beam search", (False,)),
    ignored("spaces_between_special_tokens", False, "the text has no special tokens", (True,)),
    ignored("guided_decoding_backend", "outlines", "llguidance enforces every constraint"),
    ignored("structured_outputs.backend", {"regex": "a", "backend": "x"}, "llguidance enforces every constraint"),
    ignored("timings_per_token", True, "use the header `X-Mlxpaged-Timeline`", (False,)),
)

REFUSALS: tuple[Row, ...] = (
    refused("typical_p", 0.5, ONLY_TOP, (1,)),
    refused("typical", 0.5, ONLY_TOP, (1,)),
    refused("tfs_z", 0.5, ONLY_TOP, (1,)),
    refused("tfs", 0.5, ONLY_TOP, (1,)),
    refused("top_a", 0.5, ONLY_TOP, (0,)),
    refused("top_n_sigma", 1, ONLY_TOP, (0, -1)),
    refused("nsigma", 1, ONLY_TOP, (0, -1)),
    refused("epsilon_cutoff", 0.1, ONLY_TOP, (0,)),
    refused("eta_cutoff", 0.1, ONLY_TOP, (0,)),
    refused("xtc_probability", 0.5, ONLY_TOP, (0,)),
    refused("mirostat", 2, ONLY_TOP, (0,)),
    refused("mirostat_mode", 2, ONLY_TOP, (0,)),
    refused("dry_multiplier", 0.8, "use `repetition_penalty` or `frequency_penalty`", (0,)),
    refused("no_repeat_ngram_size", 2, "use `repetition_penalty` or `frequency_penalty`", (0,)),
    refused("encoder_repetition_penalty", 1.1, "use `repetition_penalty`", (1,)),
    refused("penalize_nl", False, "the penalties count newlines too", (True,)),
    refused(
        "presence_context_size",
        20,
        "the penalty counts the whole answer, as OpenAI defines it",
        (),
        "presence_penalty",
        presence_penalty=1,
    ),
    refused(
        "frequency_context_size",
        20,
        "the penalty counts the whole answer, as OpenAI defines it",
        (),
        "frequency_penalty",
        frequency_penalty=1,
    ),
    refused("dynatemp_range", 0.5, "one temperature holds for the whole answer", (0,)),
    refused("dynamic_temperature", True, "one temperature holds for the whole answer", (False,)),
    refused("smoothing_factor", 0.2, "only `temperature` changes the distribution", (0,)),
    refused("temperature_last", True, "the order of the samplers is vLLM's", (False,)),
    refused("samplers", ["top_k"], "the order of the samplers is vLLM's", ([],)),
    refused("sampler_order", [6, 0], "the order of the samplers is vLLM's", ([],)),
    refused("do_sample", False, "use `temperature` 0", (True,)),
    refused("use_beam_search", True, "there is no beam search", (False,)),
    refused("num_beams", 2, "there is no beam search", (1,)),
    refused("penalty_alpha", 0.6, "there is no contrastive search", (0,)),
    refused("guidance_scale", 1.5, "there is no classifier-free guidance", (1,)),
    refused("negative_prompt", "x", "there is no classifier-free guidance", ("",)),
    refused("logits_processors", ["p"], "use `logit_bias` or a constraint", ([],)),
    refused("custom_logit_processor", "p", "use `logit_bias` or a constraint"),
    refused("custom_params", {"a": 1}, "they belong to `custom_logit_processor`", ({},)),
    refused("allowed_token_ids", [1], "use `logit_bias` or a constraint"),
    refused("bad_words", ["a"], "use `logit_bias`", ([],)),
    refused("banned_strings", ["a"], "use `logit_bias`", ([],)),
    refused("banned_tokens", [20], "use `logit_bias`", ([], "")),
    refused("custom_token_bans", "20", "use `logit_bias`", ("",)),
    refused("ebnf", "root ::= x", "use `guided_grammar`"),
    refused("guided_whitespace_pattern", " ", "use `guided_regex` or `guided_grammar`"),
    refused("skip_special_tokens", False, "the text has no special tokens", (True,)),
    refused("include_stop_str_in_output", True, "the text ends before the stop string", (False,)),
    refused("no_stop_trim", True, "the text ends before the stop string", (False,)),
    refused("detokenize", False, "answers are text", (True,)),
    ignored("return_token_ids", True, "answers are text; use `/tokenize`", (False,)),
    refused("return_tokens_as_token_ids", True, "answers are text; use `/tokenize`", (False,)),
    refused("return_tokens", True, "answers are text; use `/tokenize`", (False,)),
    refused("return_hidden_states", True, "only tokens leave the engine", (False,)),
    refused("n_probs", 2, "use `logprobs`", (0,)),
    refused("truncate_prompt_tokens", 10, "prompts are never cut"),
    refused("t_max_predict_ms", 100, "use `timeout`", (0,)),
    honoured("cache_salt", "s", "vLLM's; only with the same salt, requests share [prefixes](security.md#api-keys)"),
    by_model("adapters", "a", "mlx-lm's; the name of an [adapter](models.md#lora-adapters)", neutral=("",)),
    refused("lora", [{"id": 0, "scale": 1}], NAMED_ADAPTER, ([],)),
    alias("lora_path", "a", "adapters", "SGLang", neutral=("",)),
    refused("kv_transfer_params", {"a": 1}, "the KV cache stays on this server", ({},)),
    refused("format", "json", "Ollama's; use `response_format` or `guided_json`", ("",)),
)

OF_COMPLETIONS: tuple[Row, ...] = (
    refused("n", 2, "there is one answer", (1,)),
    refused("seed", 1, ONLY_COMPLETIONS, (-1,)),
    refused("min_p", 0.1, ONLY_COMPLETIONS),
    refused("repetition_penalty", 1.1, ONLY_COMPLETIONS),
    refused("presence_penalty", 0.5, ONLY_COMPLETIONS),
    refused("frequency_penalty", 0.5, ONLY_COMPLETIONS),
    refused("logit_bias", {"20": -100}, ONLY_COMPLETIONS, ({},)),
    refused("min_tokens", 1, ONLY_COMPLETIONS, (0,)),
    refused("stop_token_ids", [20], ONLY_COMPLETIONS, ([],)),
    refused("ignore_eos", True, ONLY_COMPLETIONS, (False,)),
    refused("functions", [{"name": "f"}], "replaced by `tools`", ([],)),
    *(
        refused(name, value, ONLY_COMPLETIONS)
        for name, value in (
            ("structured_outputs", {"regex": "a+"}),
            ("guided_json", {"type": "integer"}),
            ("guided_regex", "a+"),
            ("guided_choice", ["a", "b"]),
            ("guided_grammar", 'start: "a"'),
        )
    ),
)
"""Fields that change the answer of completions, for other APIs that lack them."""
