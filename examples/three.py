"""Three prompts in one batch, without a server: the engine's own interface, and what it can tell about itself.

python examples/three.py [MODEL]
"""

from __future__ import annotations

import sys
import time

from mlxpaged.engine import EngineConfig, Request, SamplingParams, build_engine
from mlxpaged.models import DEMO_MODEL, load_model

QUESTIONS = ("Repeat: blue river stone", "What is 17 + 25?", "Reverse: a b c")


def main(model: str) -> None:
    config = EngineConfig(model=model, kv_cache_bytes=64_000_000)
    served = load_model(config.model)
    core = build_engine(config, served)
    texts = dict.fromkeys(QUESTIONS, "")
    for question in QUESTIONS:
        prompt = served.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        core.add(Request(question, prompt, SamplingParams(temperature=0.0, max_tokens=32), time.monotonic()))
    widest = 0
    while core.has_work():
        for output in core.step():
            texts[output.request_id] += output.text
        widest = max(widest, core.stats().scheduler.running)
    for question, text in texts.items():
        print(f"{question} -> {text}")
    stats = core.stats()
    print(f"\n{stats.steps_total} steps, up to {widest} sequences at once, {stats.generated_tokens_total} tokens")
    blocks = stats.scheduler.blocks
    print(f"blocks: {blocks.used} used, {blocks.cached} cached, {blocks.free} free")
    print(f"scheduler: {stats.scheduler}")
    core.close()


if __name__ == "__main__":
    main(*(sys.argv[1:] or [DEMO_MODEL]))
