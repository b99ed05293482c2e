"""What an engine is asked to do: on one machine, and on rank 0 of several."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.errors import RankLostError
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.step import Step
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS
from mlxpaged.parts.drafting.drafting import Drafting
from mlxpaged.parts.images.image_encoder import ImageEncoder
from mlxpaged.parts.ranks.shared_runner import SharedRunner
from mlxpaged.vision.image import PromptImage
from tests.cluster.ranks import MESSAGES, ring_bytes
from tests.engine.helpers import part_of

NUM_TOKENS = 16
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 121, 150)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.9)
GRAMMAR = replace(GREEDY, constraint=Constraint("regex", "[a-z]{1,20}"))


@dataclass
class Outcome:
    """tokens: by request. sent, needed: bytes of collectives, of all steps. messages: bytes of each. Outcomes are equal
    if the tokens are: how many steps there were, and what they moved, depends on when the ranks were ready."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    preemptions: int = field(default=0, compare=False)
    swapped_in: int = field(default=0, compare=False)
    hits: int = field(default=0, compare=False)
    copied: int = field(default=0, compare=False)
    model_calls: int = field(default=0, compare=False)
    overlapped: int = field(default=0, compare=False)
    sent: int = field(default=0, compare=False)
    needed: int = field(default=0, compare=False)
    messages: list[int] = field(default_factory=list, compare=False)


def count_bytes(core: EngineCore, outcome: Outcome) -> None:
    """Add up what tensor parallelism needs: two all_sums [T, hidden] of each layer, of which a ring sends each part
    N - 1 times as a sum and N - 1 times as a result; and the logits, if the ranks have shares of the vocabulary."""
    model, forward = core.served.model, core.runner.forward
    count = core.runner.ranks.count if isinstance(core.runner, SharedRunner) else 1
    inner: Any = getattr(model, "language_model", model)
    hidden, shares_vocabulary = inner.args.hidden_size, getattr(inner, "sharding_group", None) is not None

    def counting_forward(batch: Step, *arguments: Any) -> Any:
        logits = forward(batch, *arguments)
        needed = 2 * (count - 1) / count * 2 * len(model.layers) * batch.num_tokens * hidden
        needed += (count - 1) / count * logits.size if shares_vocabulary else 0
        outcome.needed += int(4 * needed)
        return logits

    core.runner.forward = counting_forward  # type: ignore[method-assign]


def prompts(seed: int, size: int = 200) -> list[list[int]]:
    """Sixteen. Half of them begin with the same 24 tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(1, size) for _ in range(24)]
    made = [[rng.randrange(1, size) for _ in range(length)] for length in LENGTHS]
    return [shared[: len(each)] + each[24:] if i % 2 else each for i, each in enumerate(made)]


def requests(seed: int) -> list[Request]:
    """Greedy ones but for two with a seed, two answers for one prompt, and two with a grammar."""
    made = []
    for i, prompt in enumerate(prompts(seed)):
        params = replace(SAMPLED, seed=i) if i in (3, 12) else GRAMMAR if i in (5, 10) else GREEDY
        made.append(Request(str(i), prompt, params, time.monotonic()))
    made.append(replace(made[13], request_id="twin", fork_of="13", params=replace(SAMPLED, seed=99)))
    return made


def count_overlapped(core: EngineCore, outcome: Outcome) -> None:
    """Count the steps that are launched before the one before them has ended."""
    overlap_step = core.loop.overlap_step

    def counting(batch: Step) -> None:
        outcome.overlapped += 1
        overlap_step(batch)

    core.loop.overlap_step = counting  # type: ignore[method-assign]


def step_to_the_end(core: EngineCore, outcome: Outcome) -> None:
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            outcome.tokens.setdefault(output.request_id, []).extend(output.token_ids)


def mixed(core: EngineCore, seed: int = 0) -> Outcome:
    """Sixteen requests and one more answer; then the memory shrinks, and half of them again with other names."""
    outcome, before = Outcome(), ring_bytes()
    count_bytes(core, outcome)
    for request in requests(seed):
        core.add(request)
    step_to_the_end(core, outcome)
    core.give_back()
    for request in requests(seed)[::2]:
        core.add(replace(request, request_id=f"again {request.request_id}", fork_of=None))
    step_to_the_end(core, outcome)
    stats = core.stats()
    outcome.preemptions = stats.scheduler.preemptions_total
    outcome.swapped_in = stats.scheduler.blocks_swapped_in_total
    outcome.hits = stats.scheduler.prefix_hit_tokens_total
    outcome.copied = stats.scheduler.blocks_copied_total
    outcome.model_calls = stats.model_calls_total
    outcome.sent, outcome.messages = ring_bytes() - before, MESSAGES
    assert stats.scheduler.blocks.used == 0
    core.close()
    return outcome


def with_images(core: EngineCore) -> Outcome:
    """Prompts with images and of text alone; then again after the features were dropped, some of them longer."""
    outcome = Outcome()
    images = part_of(core, ImageEncoder).images
    assert core.served.vision is not None
    form, rng = core.served.vision.format, random.Random(3)

    def shown(name: str, *sizes: tuple[int, int], length: int) -> Request:
        prompt, images = [rng.randrange(1, 200) for _ in range(length)], []
        for number, size in enumerate(sizes):
            width, height = form.size(*size)
            pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
            first, tokens = len(prompt), form.tokens(width, height)
            places = tuple(first + i for i, token in enumerate(tokens) if token == form.placeholder)
            images.append(PromptImage(bytes([number, width // 8, height // 8]), pixels, places))
            prompt += [*tokens, *(rng.randrange(1, 200) for _ in range(length))]
        return Request(name, prompt, GREEDY, time.monotonic(), images=tuple(images))

    made = [shown("one", (64, 48), length=9), shown("two", (48, 64), (80, 32), length=5), shown("text", length=40)]
    for request in made:
        core.add(request)
    step_to_the_end(core, outcome)
    images.budget = 0
    images.evict()
    for request in made:
        more = [*request.prompt_token_ids, *outcome.tokens[request.request_id]]
        core.add(replace(request, request_id=f"again {request.request_id}", prompt_token_ids=more))
        core.add(replace(request, request_id=f"salted {request.request_id}", cache_salt=("s",)))
    step_to_the_end(core, outcome)
    outcome.hits = images.num_encoded
    core.close()
    return outcome


def with_drafts(core: EngineCore) -> Outcome:
    """The sixteen requests with a bias that makes them repeat a token; all drafts are verified, if there are any. The
    last one of several is wrong."""
    outcome = Outcome()
    drafting = core.part(Drafting)
    if drafting is not None:
        drafting.budget.lengths = lambda contexts, chances, *_: [len(each) for each in chances]
    if drafting is not None and drafting.drafter is not None:
        propose = drafting.drafter.propose

        def careless(running: RunningRequest, most: int) -> tuple[list[int], int]:
            drafts, match = propose(running, most)
            return [*drafts[:-1], *(7 if len(drafts) > 1 else draft for draft in drafts[-1:])], match

        drafting.drafter.propose = careless  # type: ignore[method-assign]
    for request in requests(0):
        core.add(replace(request, params=replace(request.params, logit_bias={50: 20.0})))
    step_to_the_end(core, outcome)
    outcome.hits = core.stats().of(NO_DRAFTS).accepted_total
    core.close()
    return outcome


def overlapping(core: EngineCore) -> Outcome:
    """Nothing that needs kernels for whole blocks."""
    outcome = Outcome()
    count_overlapped(core, outcome)
    for i, request in enumerate(requests(0)[2:12:3]):
        core.add(replace(request, params=replace(request.params, max_tokens=20 + 5 * i)))
    step_to_the_end(core, outcome)
    outcome.model_calls = core.stats().model_calls_total
    return outcome


def until_a_rank_is_lost(core: EngineCore) -> str:
    for request in requests(0):
        core.add(request)
    try:
        step_to_the_end(core, Outcome())
    except RankLostError as error:
        return str(error)
    return "no rank was lost"


def sizes(core: EngineCore) -> tuple[int, int, int]:
    """Blocks, checkpoints and swap slots."""
    config = core.scheduler.config
    return config.num_blocks, config.num_checkpoints, config.num_swap_slots
