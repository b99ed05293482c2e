"""Runs three prompts in one batch without a server, by the engine's own interface, and prints its statistics.

python examples/three.py [MODEL]
"""

from __future__ import annotations

import sys
import time

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.models.sources.short_names import DEMO_MODEL

QUESTIONS = ("Repeat: blue river stone", "What is 17 + 25?", "Reverse: a b c")


def blocks(core: EngineCore) -> str:
    usage = core.stats().scheduler.blocks
    return f"blocks: {usage.used} used, {usage.cached} cached, {usage.free} free"


def main(model: str) -> None:
    config = EngineConfig(model=model, kv_cache_bytes=64_000_000)
    served = load_model(config.model)
    core = build_engine(config, served)
    texts = dict.fromkeys(QUESTIONS, "")
    for question in QUESTIONS:
        prompt = served.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        core.add(Request(question, prompt, SamplingParams(temperature=0.0, max_tokens=32), time.monotonic()))
    most_running = 0
    while core.has_work():
        for output in core.step():
            texts[output.request_id] += output.text
        stats = core.stats()
        most_running = max(most_running, stats.scheduler.running)
        print(f"step {stats.steps_total}: {stats.scheduler.running} running, {blocks(core)}")
    print()
    for question, text in texts.items():
        print(f"{question} -> {text}")
    stats = core.stats()
    print(f"\n{stats.steps_total} steps, up to {most_running} sequences at once, {stats.generated_tokens_total} tokens")
    print(blocks(core))
    print(f"scheduler: {stats.scheduler}")
    core.close()


if __name__ == "__main__":
    main(*(sys.argv[1:] or [DEMO_MODEL]))
