"""What ends as a loop (`--end-loops on`) of real texts, which are none, and of what models write, and what it costs.

    make bench-loops [ARGS="--texts 2000 --answers 250"]

Texts: files of this repository, of Python's library, of /usr/share and of /var/log, as tokens of the real model, each
read as if it were an answer without a prompt. Loops: greedy answers without an end token of the demo model and of
SmolLM2-135M-Instruct, which go on with pieces of such files. A search of all periods says where the fourth copy of the
first loop ends. Cost: the host's time for a token of an answer that is watched, in answers of several lengths.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Sequence as TokenSequence
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.models.text.tokenizer_files import tokenizer_in
from mlxpaged.parts.repetition.cycles import Cycle
from mlxpaged.parts.repetition.loop_end import COPIES, LEAST_TOKENS, WatchedAnswer
from mlxpaged.parts.repetition.meant import is_data, nests

ROOT = Path(__file__).parents[1]
MODEL = Path(sys.prefix) / "real" / "float32"
MORE = 60
"""Within so many tokens after its fourth copy, a loop is to end."""
SIZES = range(500, 100_000)
SHARES = {ROOT: 0.36, Path(sysconfig.get_path("stdlib")): 0.32, Path("/usr/share"): 0.36, Path("/var/log"): 0.02}
KINDS = {
    "code": {"py", "c", "h", "js", "css", "pl", "pm", "vim", "sh", "el", "tcl", "cmake", "m4", "awk", "lua", "metal"},
    "tables and data": {"csv", "json", "xml", "enc", "svg", "toml", "yml", "conf", "po", "ps", "map", "dat", "afm"},
    "logs": {"log", "err"},
    "prose": {"md", "txt", "rst", "html", "tex", "pod", "1", "3", "5", "7", "8", "info", "copyright"},
}


class Found(NamedTuple):
    """What ended an answer after so many tokens."""

    tokens: int
    cycle: Cycle


def watched(tokens: Sequence[int], tokenizer: Tokenizer) -> Found | None:
    """Reads tokens as an answer, one a step."""
    sequence = TokenSequence(0, [0], len(tokens) + 1)
    answer = WatchedAnswer(SamplingParams(), sequence, tokenizer)
    for count, token in enumerate(tokens, 1):
        sequence.token_ids.append(token)
        if (cycle := answer.loop()) is not None:
            return Found(count, cycle)
    return None


def texts(root: Path, most: int) -> Iterator[tuple[Path, str]]:
    """Files of text, the same ones in each run on a machine."""
    hidden = (path for path in root.iterdir() if not path.name.startswith(".")) if root.exists() else ()
    paths = [each for path in hidden for each in ([path] if path.is_file() else path.rglob("*"))]
    paths = sorted(each for each in paths if not each.is_symlink() and each.is_file() and each.stat().st_size in SIZES)
    random.Random(0).shuffle(paths)
    found = 0
    for path in paths:
        try:
            text = path.read_text()
        except (UnicodeDecodeError, OSError):
            continue
        if "\0" not in text and found < most:
            found += 1
            yield path, text


def kind_of(path: Path) -> str:
    suffix = path.suffix.lstrip(".") or path.name.lower()
    return next((kind for kind, suffixes in KINDS.items() if suffix in suffixes), "others")


def read_texts(tokenizer: Tokenizer, count: int) -> None:
    kinds, ended, num_tokens = Counter[str](), [], 0
    for root, share in SHARES.items():
        for path, text in texts(root, round(count * share)):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            kinds[kind_of(path)] += 1
            num_tokens += len(tokens)
            if (found := watched(tokens, tokenizer)) is not None:
                ended.append((path, found))
    print(f"texts: {sum(kinds.values())} ({', '.join(f'{kind}: {n}' for kind, n in kinds.most_common())})")
    print(f"tokens: {num_tokens}; ended as loops: {len(ended)}")
    for path, found in ended:
        print(f"  {path}: {found.cycle}")


def first_cycle(tokens: Sequence[int], more: int = 0) -> tuple[int, int] | None:
    """Where the first cycle is so many tokens past its fourth copy and its sixtieth token, and its period, by a search
    of all periods."""
    same = dict.fromkeys(range(1, len(tokens) // COPIES + 1), 0)
    for end in range(1, len(tokens) + 1):
        for period in same:
            is_same = end > period and tokens[end - 1] == tokens[end - 1 - period]
            same[period] = same[period] + 1 if is_same else 0
            if is_same and same[period] + period >= max(LEAST_TOKENS, COPIES * period) + more:
                return end, period
    return None


def write_loops(name: str, path: str, count: int, most: int) -> None:
    config = EngineConfig(path, kv_cache_bytes=1_000_000_000, max_num_seqs=24, speculative="off")
    core = build_engine(config, load_model(path))
    tokenizer, drawn = core.served.tokenizer, random.Random(1)
    pieces = [text for root, share in SHARES.items() for _, text in texts(root, round(count * share))]
    answers: dict[str, list[int]] = {}
    causes: dict[str, str | None] = {}
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, end_loops=True)
    for number, text in enumerate(pieces):
        start = drawn.randrange(max(1, len(text) - 400))
        prompt = tokenizer.encode(text[start : start + drawn.randrange(40, 240)])
        core.add(Request(str(number), prompt, params, 0.0))
        answers[str(number)] = []
    while core.has_work():
        for output in core.step():
            answers[output.request_id] += output.token_ids
            causes[output.request_id] = output.stop_cause
    late, without_words, others = list[int](), 0, list[str]()
    for request_id, tokens in answers.items():
        cause = causes[request_id]
        if cause is not None:
            period, length = (int(cause.partition(f"{key}=")[2].partition(";")[0]) for key in ("period", "tokens"))
            late.append(length - max(LEAST_TOKENS, COPIES * period))
        elif (found := first_cycle(tokens, MORE)) is not None:
            end, period = found
            unit = tokenizer.decode(tokens[end - period : end])
            if is_data(unit * 16) or nests(unit):
                without_words += 1
            else:
                others.append(unit)
    print(f"{name}: {len(answers)} answers of up to {most} tokens; ended as loops: {len(late)}")
    if late:
        mean = sum(late) / len(late)
        print(f"  tokens after the fourth copy and the sixtieth token: at most {max(late)}, in the mean {mean:.0f}")
    print(f"  not ended, {MORE} tokens after them: {without_words} without words, {len(others)} others {others[:9]}")


def cost(tokenizer: Tokenizer) -> None:
    """CPU time: other load changes it least."""
    drawn = random.Random(2)
    print("us of the host for a token: of an answer of random tokens; of one that repeats its first half")
    for length in (1_000, 8_000, 32_000, 128_000):
        tokens = [drawn.randrange(40_000) for _ in range(length)]
        times = []
        for each in (tokens, tokens[: length // 2] * 2):
            began = time.thread_time()
            assert watched(each, tokenizer) is None
            times.append((time.thread_time() - began) / length * 1e6)
        print(f"  {length}: {times[0]:.2f}; {times[1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--answers", type=int, default=200, help="of each model; 0: none")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    args = parser.parse_args()
    if not args.model.exists():
        parser.error(f"{args.model} is missing: `make bench-loops` makes it")
    tokenizer = tokenizer_in(args.model, None, ())
    cost(tokenizer)
    read_texts(tokenizer, args.texts)
    if args.answers:
        write_loops("demo", "demo", args.answers, args.tokens)
        write_loops("SmolLM2-135M-Instruct", str(args.model), args.answers, args.tokens)


if __name__ == "__main__":
    main()
