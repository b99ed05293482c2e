"""What many questions about one input cost, beside as many chat requests with an enum: seconds, steps and tokens.

Steps and computed tokens are about the same on any machine; seconds are not. A peer at --peer gets the same chat
requests, so run it alone on the machine:

    python benchmarks/decisions_speed.py MODEL --input-tokens 4000 --questions 100 --peer http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from quality.serving import serving, steps_and_tokens

LABELS = ("billing", "sales", "support", "other")


def counted(client: httpx.Client, call: Callable[[], None]) -> list[str]:
    """Seconds, steps and tokens of a call."""
    before, start = steps_and_tokens(client), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    after = steps_and_tokens(client)
    return [f"{seconds:.2f}", *(str(new - old) for new, old in zip(after, before, strict=True))]


def input_of(num_tokens: int, client: httpx.Client, seed: int) -> str:
    """A text of about so many tokens, unlike that of another seed from its first word on."""
    line = f"Order {seed}-{{}} was late, and the customer called again. "

    def size(count: int) -> int:
        text = "".join(line.format(i) for i in range(count))
        return int(client.post("/tokenize", json={"prompt": text}).json()["count"])

    count = max(1, round(num_tokens / (size(100) / 100)))
    return "".join(line.format(i) for i in range(count))


def question(number: int, kind: str) -> dict[str, Any]:
    if kind == "predicate":
        return {"type": "predicate", "instructions": f"Was order {number} late?"}
    asked = f"Who handles case {number}?"
    return {"type": "choice", "instructions": asked, "choices": [{"value": label} for label in LABELS]}


def decide(client: httpx.Client, text: str, count: int, kind: str = "choice", **fields: Any) -> None:
    body = {"input": text, "questions": [question(i, kind) for i in range(count)]} | fields
    client.post("/v1/decisions", json=body).raise_for_status()


def chat(client: httpx.Client, path: str, model: str, text: str, count: int) -> None:
    """One request for each question, all at once, answered by one of the labels. max_tokens: the longest label."""
    schema = {"type": "json_schema", "json_schema": {"name": "label", "schema": {"enum": list(LABELS)}}}

    def one(number: int) -> None:
        messages = [{"role": "user", "content": f"{text}\n\nWho handles case {number}?"}]
        body = {"model": model, "messages": messages, "temperature": 0, "response_format": schema, "max_tokens": 8}
        client.post(path, json=body).raise_for_status()

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(one, range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--input-tokens", type=int, default=3000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--kind", choices=("choice", "predicate"), default="choice")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--peer", help="base URL of another server's OpenAI API")
    parser.add_argument("--peer-model", default="model")
    args = parser.parse_args()
    count = args.questions
    with serving(args.model, "--block-size", str(args.block_size), connections=count) as client:
        decide(client, "x", 1)  # what is made at the first request
        chat(client, "/v1/chat/completions", "model", "x", 1)  # the grammar too
        texts = [input_of(args.input_tokens, client, seed) for seed in range(1, 6)]
        plain = {"calibration": "none", "orders": 1, "kind": args.kind}
        lines = {
            "1 question": lambda: decide(client, texts[0], 1, **plain),
            f"{count} questions": lambda: decide(client, texts[1], count, **plain),
            "the same again": lambda: decide(client, texts[1], count, **plain),
            f"{count} questions, calibrated, first time": lambda: decide(client, texts[2], count, args.kind),
            "the same about another input": lambda: decide(client, texts[3], count, args.kind),
            f"{count} chat requests with an enum": lambda: chat(
                client, "/v1/chat/completions", "model", texts[4], count
            ),
        }
        print("| what | seconds | steps | tokens |\n|---|---|---|---|")
        for name, call in lines.items():
            print(f"| {name} | {' | '.join(counted(client, call))} |", flush=True)
    if args.peer:
        limits = httpx.Limits(max_connections=count)
        with httpx.Client(base_url=args.peer, timeout=3600, trust_env=False, limits=limits) as peer:
            start = time.perf_counter()
            chat(peer, "chat/completions", args.peer_model, texts[4], count)
            print(f"| {count} chat requests on the peer | {time.perf_counter() - start:.2f} | | |")


if __name__ == "__main__":
    main()
