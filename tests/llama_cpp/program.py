"""Runs a GGUF file in llama.cpp, in an interpreter of its own: `make test-gguf` installs its bindings there.

Reads JSON from standard input: `file`, `prompt` (token ids), `num_tokens` and `texts`. Writes JSON: `steps`, the token
of each, and the logarithms of the most probable tokens' probabilities before it; `encoded`, the tokens of texts.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import xllamacpp  # type: ignore[import-not-found]

MOST_PROBABLE = 50


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def main() -> None:
    asked = json.load(sys.stdin)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = asked["file"]
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
    server = xllamacpp.Server(parameters)  # it ends if this name is gone
    address = server.listening_address
    texts = ({"content": text, "add_special": True, "parse_special": True} for text in asked["texts"])
    found: dict[str, Any] = {"encoded": [ask(address, "/tokenize", each)["tokens"] for each in texts]}
    if asked["prompt"]:
        settings = {"temperature": 0, "n_probs": MOST_PROBABLE, "cache_prompt": False, "ignore_eos": True}
        body = {"prompt": asked["prompt"], "n_predict": asked["num_tokens"], **settings}
        steps = ask(address, "/completion", body)["completion_probabilities"]
        found["steps"] = [
            (step["id"], {each["id"]: each["logprob"] for each in step["top_logprobs"]}) for step in steps
        ]
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
