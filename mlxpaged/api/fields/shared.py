"""The rows that chat completions and completions share, and a few that every API for text has."""

from __future__ import annotations

from mlxpaged.api.fields.table import Outcome, Row, alias, ignored, refused

ONLY_TOP = "the tokens to sample from are chosen by `top_p`, `top_k` and `min_p`"
NO_TOOLS = "the server runs no tools itself"
NAMED_ADAPTER = "use `adapters`, which names one"
CACHED = "every prompt is looked up in the prefix cache"
ONLY_COMPLETIONS = "chat completions have it; this API does not"

EVERYWHERE: tuple[Row, ...] = (
    Row("*.cache_control", Outcome.LABEL, {"cache_control": {"type": "ephemeral"}}, CACHED),
    refused(
        "extra_body", {"top_k": 1}, "give its fields beside the others; it is an argument of OpenAI's client", ({},)
    ),
)

SAMPLING: tuple[Row, ...] = (
    ignored(
        "stream_options.include_obfuscation", {"include_obfuscation": True}, "no padding is sent", (False,), stream=True
    ),
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
    ignored("cache_prompt", False, CACHED, (True,)),
    ignored("id_slot", 0, "the scheduler places requests", (-1,)),
    ignored("min_keep", 1, "at least one token is always kept", (0,)),
    ignored("length_penalty", 1.2, "it belongs to beam search", (1, 0)),
    ignored("early_stopping", True, "it belongs to beam search", (False,)),
    ignored("spaces_between_special_tokens", False, "the text has no special tokens", (True,)),
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
