"""What speculative decoding brings: tokens for each forward pass, and tokens per second beside plain decoding.

    python benchmarks/speculation.py [--model demo] [--rounds 9]

First the drafter alone, on texts of this repository with the model's tokenizer: an answer is replayed, and the rule
decides as on a device whose rows cost 0.17 of a step (an M3 Ultra, by publication). `edits`: a file after a commit; the
prompt is the file before it. `json`: records of one kind; `schema`: the same, constrained to their schema, so that the
grammar drafts too. `prose`: a page of the docs after another one.

Then the engine in this process, `--speculative ngram` beside `off`, in turn: the model repeats a text of its prompt, as
the demo model can, and continues one. At temperature 1 a small model repeats itself, which a large one does not; at 1.8
it hardly does. The speed is that of tokens per second while all requests decode, and beside it, of the time until the
last one ends: drafts are accepted more often in some than in others, and those that are left are not as many. The
figures to quote are the medians of the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.row_times import time_rows
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.cpu import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.parts.drafting.acceptance import MOST_DRAFTS, PRIORS, Acceptance, StepCounts
from mlxpaged.parts.drafting.draft_budget import draft_lengths
from mlxpaged.parts.drafting.ngram import NgramIndex
from mlxpaged.parts.grammar.grammar import GrammarMatcher, Grammars

COST = 0.17
"""Of a row more, in plain steps."""

TEXT = "the river runs past the mill and the inn, then the road bends left and climbs the long hill to the old town"

TURN = 10
"""Steps of an engine before another one's: its weights stay in the processor's cache, as if it were alone."""

Encode = Callable[[str], list[int]]
Sample = tuple[list[int], list[int]]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def edits(encode: Encode, count: int) -> list[Sample]:
    """The last changes of modules of some length."""
    samples: list[Sample] = []
    names = [name for name in git("ls-files", "mlxpaged").split() if name.endswith(".py")]
    random.Random(0).shuffle(names)
    for name in names:
        commits = git("log", "--format=%h", "-4", "--", name).split()
        if len(commits) < 2:
            continue
        new, old = (git("show", f"{commit}:{name}") for commit in commits[:2])
        if 1500 < len(new) < 9000 and new != old:
            samples.append((encode(old), encode(new)))
        if len(samples) == count:
            break
    return samples


def records(encode: Encode, count: int) -> list[Sample]:
    rng = random.Random(0)

    def record() -> dict[str, object]:
        name = f"{rng.choice(['Ada', 'Linus', 'Grace'])} {rng.choice('ABCDEFG')}"
        place = {"city": rng.choice(["Paris", "Oslo", "Rome"]), "unit": "celsius"}
        return {"id": rng.randrange(10**6), "name": name, "active": rng.random() < 0.5, "location": place}

    return [(encode("The records as JSON:"), encode(json.dumps([record() for _ in range(25)]))) for _ in range(count)]


RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "active": {"type": "boolean"},
        "location": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"const": "celsius"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "name", "active", "location"],
    "additionalProperties": False,
}
SCHEMA = Constraint("json_schema", json.dumps({"type": "array", "items": RECORD}))
"""The schema of `records`."""


def prose(encode: Encode, count: int) -> list[Sample]:
    pages = [git("show", f"HEAD:{name}") for name in git("ls-files", "docs").split() if name.endswith(".md")]
    pages = [page for page in pages if len(page) > 3000][: count + 1]
    return [(encode(page[:6000]), encode(after[:4000])) for page, after in itertools.pairwise(pages)]


def replay(
    samples: ListOf[Sample], start: Callable[[], GrammarMatcher | None] = lambda: None
) -> tuple[float, float, float]:
    """Tokens for each pass, the share of drafts that is accepted, and the speed beside plain decoding. start: makes the
    grammar of an answer."""
    tokens, passes, drafted, accepted, cost = 0, 0, 0, 0, 0.0
    for prompt, answer in samples:
        index, steps, text, done = NgramIndex(), StepCounts(), list(prompt), 0
        acceptance = Acceptance(list(PRIORS), steps)
        matcher = start()
        while done < len(answer):
            index.extend(text, len(text))
            drafts, match = index.continuation(len(text), min(MOST_DRAFTS, len(answer) - done - 1))
            forced = [] if matcher is None else matcher.forced()[: min(MOST_DRAFTS, len(answer) - done - 1)]
            drafts = forced or drafts
            if matcher is not None:
                drafts = drafts[: matcher.count_allowed(drafts)]
            chances = [1.0] * len(drafts) if forced else acceptance.chances(match, len(drafts))
            [length] = draft_lengths([len(text)], [chances], lambda rows, keys: 1 + COST * (rows - 1))
            right = [draft == token for draft, token in zip(drafts[:length], answer[done:], strict=False)]
            count = [*right, False].index(False)
            steps.count += 1
            if length and not forced:
                acceptance.observe(match, length, count)
            if matcher is not None:
                for token in answer[done : done + count + 1]:
                    matcher.advance(token)
            text += answer[done : done + count + 1]
            done += count + 1
            passes, drafted, accepted, cost = passes + 1, drafted + length, accepted + count, cost + 1 + COST * length
        tokens += len(answer)
    return tokens / passes, accepted / max(1, drafted), tokens / cost


def engine(served: ServedModel, name: str, speculative: str) -> EngineCore:
    core = build_engine(EngineConfig(model=name, speculative=speculative, prefix_caching=False), served)
    time_rows(core)
    return core


class Race:
    """Engines that do the same, some steps of each in turn, so that what else the machine does slows both."""

    def __init__(self, cores: ListOf[EngineCore], prompts: ListOf[list[int]], params: SamplingParams) -> None:
        self.seconds, self.rates = dict.fromkeys(cores, 0.0), dict[EngineCore, float]()
        self.tokens_per_step = dict[EngineCore, float]()
        steps, begun = {}, {}
        for core in cores:
            core.submit([Request(f"{i}", list(prompt), params, core.clock()) for i, prompt in enumerate(prompts)])
            while any(running.num_tokens == 0 for running in core.requests.by_sequence.values()):
                core.step()
            steps[core], begun[core] = core.loop.num_steps, core.requests.num_generated_tokens
        while any(core.has_work() for core in cores):
            for core in filter(EngineCore.has_work, cores):
                started = core.clock()
                for _ in range(TURN):
                    if core.has_work():
                        core.step()
                self.seconds[core] += core.clock() - started
                tokens = core.requests.num_generated_tokens - begun[core]
                if core not in self.rates and len(core.requests.by_sequence) < len(prompts):
                    self.rates[core] = tokens / self.seconds[core]  # while all decode
                self.tokens_per_step[core] = tokens / (core.loop.num_steps - steps[core])


def beside_plain(name: str, rounds: int) -> None:
    plain, drafting = (engine(load_model(name), name, which) for which in ("off", "ngram"))
    reader = plain.served.tokenizer.reader
    print(
        f"\n{'engine':13}{'batch':>6}{'tokens a step':>15}{'drafts':>8}{'speed':>7}{'from, to':>14}{'to the end':>12}"
    )
    for temperature, batch in itertools.product((0.0, 1.0, 1.8), (1, 8)):
        texts = [f"{i} {TEXT}" for i in range(batch)]
        if temperature == 0:
            chats = [[{"role": "user", "content": f"Repeat: {text}"}] for text in texts]
            options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
            prompts = [list(reader.apply_chat_template(chat, **options)) for chat in chats]
            params = SamplingParams(max_tokens=120, temperature=0.0)
        else:
            prompts = [reader.encode(text, add_special_tokens=False) for text in texts]
            params = SamplingParams(max_tokens=120, temperature=temperature, seed=1, ignore_eos=True)
        races = [Race([plain, drafting][:: 1 - 2 * (number % 2)], prompts, params) for number in range(rounds)]
        speeds = [race.rates[drafting] / race.rates[plain] for race in races]
        ends = [race.seconds[plain] / race.seconds[drafting] for race in races]
        kind = f"text at {temperature}" if temperature else "copy"
        each = races[-1].tokens_per_step
        print(
            f"{kind:13}{batch:6}{each[plain]:15.2f}{each[drafting]:8.2f}{statistics.median(speeds):7.2f}"
            f"{f'{min(speeds):.2f} to {max(speeds):.2f}':>14}{statistics.median(ends):12.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=9, help="of the engine; 0: the drafters alone")
    args = parser.parse_args()
    served = load_model(args.model)
    reader, grammars = served.tokenizer.reader, Grammars(served.tokenizer, served.vocab_size)

    def encode(text: str) -> list[int]:
        return list(reader.encode(text, add_special_tokens=False))

    print(f"BLAS: {blas.describe()}\n{'texts':8}{'tokens/pass':>12}{'accepted':>10}{'speed at 0.17':>15}")
    kinds: dict[str, Callable[[Encode, int], list[Sample]]] = {"edits": edits, "json": records, "schema": records}
    for kind, make in (kinds | {"prose": prose}).items():
        start = (lambda: grammars.start(SCHEMA, ignore_eos=False)) if kind == "schema" else lambda: None
        tokens, accepted, speed = replay(make(encode, 8), start)
        print(f"{kind:8}{tokens:12.2f}{accepted:10.2f}{speed:15.2f}")
    if args.rounds:
        beside_plain(args.model, args.rounds)


if __name__ == "__main__":
    main()
