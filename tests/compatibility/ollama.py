"""Fields of Ollama's API."""

from __future__ import annotations

from typing import Any

from tests.compatibility.claims import Claim, by_model, honoured, ignored, label, refused
from tests.compatibility.shared import LEFT_OUT

LOADED = "how a model is loaded is decided when the server starts"
STAYS = "from the end of the model's last request; ignored, and named, if it is pinned, and for keys of no admin"
NAME = "with or without `:latest`; another model is a 404"
IMAGES = "if the model takes images; base64 of PNG, JPEG, WEBP or GIF, which stand before the text"
SHORT: dict[str, Any] = {"num_predict": 2}


def options(values: dict[str, Any], note: str) -> Claim:
    return honoured("options", SHORT | values, note)


def hint(name: str, value: Any, note: str = LOADED) -> Claim:
    return ignored(f"options.{name}", SHORT | {name: value}, note)


GENERATING: tuple[Claim, ...] = (
    honoured("stream", False, "the default is true"),
    honoured("format", "json"),
    honoured("format", {"type": "integer"}, "a JSON schema; always enforced"),
    refused("format", "xml"),
    honoured("think", False, "if the chat template has no switch, the server closes the thought at once"),
    by_model(
        "think",
        True,
        "the model must think; `low` limits the thinking to 1,024 tokens, `medium` to 4,096; `high` and `max` do not",
    ),
    options({"temperature": 0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, "the defaults are this server's"),
    options({"seed": 1, "stop": ["a"]}, "a `seed` below 0 is random; `num_predict` below 1 is no limit"),
    options({"repeat_penalty": 1.1, "repeat_last_n": 64}, "by default the penalty is for all tokens"),
    options({"end_loops": True}, "ours: whether an answer ends that [only repeats itself](api.md#loops)"),
    options({"presence_penalty": 0.5, "frequency_penalty": 0.5}, "they count the whole answer"),
    hint("num_ctx", 4096, "the context is that of the model, or `--max-model-len`"),
    hint("num_keep", 4, "the context is not shifted"),
    *(hint(name, 1) for name in ("num_batch", "num_gpu", "num_gqa", "num_thread", "main_gpu")),
    *(hint(name, True) for name in ("low_vram", "f16_kv", "use_mmap", "use_mlock", "numa")),
    honoured("logprobs", True),
    honoured("top_logprobs", 2, "up to 20", logprobs=True),
    honoured("keep_alive", "5m", STAYS),
)

CHAT: tuple[Claim, ...] = (
    honoured("model", "demo:latest", NAME),
    honoured(
        "messages",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
        "roles `system`, `user`, `assistant`, `tool`; with none, the answer is `load` or `unload` at once",
    ),
    honoured(
        "messages",
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        "a last message of the assistant without calls is continued",
    ),
    by_model("messages", [{"role": "user", "content": "x", "images": ["aGk="]}], IMAGES),
    ignored(
        "messages.images",
        [
            {"role": "user", "content": "x", "images": ["aGk="]},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "z"},
        ],
        LEFT_OUT,
    ),
    label("tools", []),
    honoured("tools", [{"type": "function", "function": {"name": "f"}}], "as in chat completions"),
    *GENERATING,
)

GENERATE: tuple[Claim, ...] = (
    honoured("model", "demo:latest", NAME),
    honoured("prompt", "y", "a user's message; without a prompt, the answer is `load` or `unload` at once"),
    by_model("images", ["aGk="], f"{IMAGES}; not together with `raw`"),
    honoured("suffix", "", "changes nothing"),
    by_model("suffix", "x", "if tokens of the vocabulary mark the [middle of a text](api.md#the-middle-of-a-text)"),
    honoured("system", "Be brief."),
    honoured("raw", True, "the model continues the prompt as it is; not together with `system` and `think`"),
    *GENERATING,
)

EMBED: tuple[Claim, ...] = (
    honoured("model", "vectors:latest", "the model that makes embeddings"),
    refused("model", "demo", "this model only generates text"),
    honoured("input", ["one", "two"], "up to 2,048 texts"),
    honoured("truncate", False, "by default, a text that is too long is cut; with false, it is refused"),
    honoured("dimensions", 64, "as in `/v1/embeddings`"),
    honoured("keep_alive", "5m", STAYS),
)

EMBEDDINGS: tuple[Claim, ...] = (
    honoured("model", "vectors:latest", "the model that makes embeddings"),
    honoured("prompt", "one", "a text that is too long is cut"),
    honoured("keep_alive", "5m", STAYS),
)

SHOW: tuple[Claim, ...] = (
    honoured("model", "demo:latest"),
    honoured("name", "demo", "the old name of `model`"),
)

PULL: tuple[Claim, ...] = (
    honoured("model", "demo", "a short name, `OWNER/NAME`, or an address of the hub"),
    honoured("name", "demo", "the old name of `model`"),
    honoured("stream", False, "the default is true"),
)
