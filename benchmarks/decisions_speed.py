"""What many questions about one input cost, beside as many chat requests with an enum: CPU seconds, steps and tokens.

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
from quality.serving import cpu_seconds, serving, steps_and_tokens

OPTIONS = {
    "predicate": ("no", "yes"),
    "choice": ("billing", "sales", "support", "other"),
    "score": ("never", "rarely", "sometimes", "often", "always"),
}
ASKED = {
    "predicate": "Was order {} late?",
    "choice": "Who handles case {}?",
    "score": "How often was order {} late?",
}


def counted(client: httpx.Client, call: Callable[[], None]) -> list[str]:
    """Seconds, CPU seconds of the server, steps and tokens of a call."""
    before, used, start = steps_and_tokens(client), cpu_seconds(), time.perf_counter()
    call()
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    after = steps_and_tokens(client)
    return [f"{seconds:.2f}", f"{used:.2f}", *(str(new - old) for new, old in zip(after, before, strict=True))]


def input_of(num_tokens: int, client: httpx.Client, seed: int) -> str:
    """A text of about so many tokens, unlike that of another seed from its first word on."""
    line = f"Order {seed}-{{}} was late, and the customer called again. "

    def size(count: int) -> int:
        text = "".join(line.format(i) for i in range(count))
        return int(client.post("/tokenize", json={"prompt": text}).json()["count"])

    count = max(1, round(num_tokens / (size(100) / 100)))
    return "".join(line.format(i) for i in range(count))


def question(number: int, kind: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"type": kind, "instructions": ASKED[kind].format(number)}
    match kind:
        case "choice":
            asked["choices"] = [{"value": option} for option in OPTIONS[kind]]
        case "score":
            asked["levels"] = [{"label": option} for option in OPTIONS[kind]]
    return asked


def decide(client: httpx.Client, text: str, count: int, kind: str, first: int = 0, **fields: Any) -> None:
    """first: number of the first question."""
    body = {"input": text, "questions": [question(first + i, kind) for i in range(count)]} | fields
    client.post("/v1/decisions", json=body).raise_for_status()


def chat(
    client: httpx.Client, path: str, model: str, text: str, count: int, kind: str, is_constrained: bool = True
) -> None:
    """One request for each question, all at once, answered by one of its options, or by a token of any kind."""
    schema = {"type": "json_schema", "json_schema": {"name": "option", "schema": {"enum": list(OPTIONS[kind])}}}
    more = {"response_format": schema, "max_tokens": 8} if is_constrained else {"max_tokens": 1}
    listed = ", ".join(OPTIONS[kind])

    def one(number: int) -> None:
        asked = f"{text}\n\nQuestion: {ASKED[kind].format(number)}\nOptions: {listed}"
        body = {"model": model, "messages": [{"role": "user", "content": asked}], "temperature": 0} | more
        client.post(path, json=body).raise_for_status()

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(one, range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--input-tokens", type=int, default=3000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--kind", choices=OPTIONS, default="choice")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--peer", help="base URL of another server's OpenAI API")
    parser.add_argument("--peer-model", default="model")
    args = parser.parse_args()
    count = args.questions
    with serving(args.model, "--block-size", str(args.block_size), connections=count) as client:
        here = client, "/v1/chat/completions", "model"
        decide(client, "x", 1, args.kind)  # what is made at the first request
        chat(*here, "x", 1, args.kind)  # the grammar too
        texts = [input_of(args.input_tokens, client, seed) for seed in range(1, 7)]
        plain = {"calibration": "none", "orders": 1, "kind": args.kind}
        lines = {
            "1 question": lambda: decide(client, texts[0], 1, **plain),
            f"{count} questions": lambda: decide(client, texts[1], count, **plain),
            "the same again": lambda: decide(client, texts[1], count, **plain),
            f"{count} others about it": lambda: decide(client, texts[1], count, first=count, **plain),
            f"{count} questions, calibrated, first time": lambda: decide(client, texts[2], count, args.kind),
            "the same about another input": lambda: decide(client, texts[3], count, args.kind),
            f"{count} chat requests with an enum": lambda: chat(*here, texts[4], count, args.kind),
            f"{count} chat requests of a token": lambda: chat(*here, texts[5], count, args.kind, is_constrained=False),
        }
        print("| what | seconds | CPU seconds | steps | tokens |\n|---|---|---|---|---|")
        for name, call in lines.items():
            print(f"| {name} | {' | '.join(counted(client, call))} |", flush=True)
    if args.peer:
        limits = httpx.Limits(max_connections=count)
        with httpx.Client(base_url=args.peer, timeout=3600, trust_env=False, limits=limits) as peer:
            start = time.perf_counter()
            chat(peer, "chat/completions", args.peer_model, texts[5], count, args.kind, is_constrained=False)
            print(f"| {count} chat requests of a token on the peer | {time.perf_counter() - start:.2f} | | | |")


if __name__ == "__main__":
    main()
