"""The figures of benchmarks/real_quality.py: each function returns the rows of a table."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.row_times import time_rows
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import LoadOptions, load_model
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS

from .dictation import APIS, dictate_all
from .schemas import ask_all
from .scoring import (
    Scores,
    all_drafts,
    engine,
    of_prompt,
    perplexity,
    score,
    score_as_answer,
    whole_prompts,
)

ROOT = Path(__file__).parents[2]
Table = list[list[str]]

WINDOW, FIRST = 768, 256
"""Tokens of a piece of the text, and the first one that counts. The next piece begins where this one's counting did."""

SLOW_WINDOWS = 4
"""Pieces of what is computed token by token."""

ANSWER = 96
"""Tokens of an answer with and without drafts."""

TEXTS, LENGTH, TOP = 20, 500, 20
"""Texts that transformers computes too, their tokens, and the most likely tokens that are compared."""

PLACES = ("Lyon", "Oslo", "Rome", "Cairo")
TASKS = (
    "Repeat this text and replace Ann by Bob: Ann lives in {}. Ann has a red boat, and Ann likes the sea near {}.",
    "Write three sentences about the city {}.",
    "Write a Python class City with a method that returns the name {}, and a function that prints it.",
    "Make a JSON array of four records with the keys name and country. The first record is about {}.",
)
"""What real answers are about: drafts are found in the copy and in the records, and hardly in the prose."""


def documents(num_bytes: int) -> str:
    """The beginning of this repository's docs."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    return text.encode()[:num_bytes].decode(errors="ignore")


def pieces(tokens: list[int]) -> list[list[int]]:
    starts = range(0, len(tokens) - WINDOW + 1, WINDOW - FIRST)
    return [tokens[start : start + WINDOW] for start in starts]


def tokens_of(directory: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids)


def perplexities(directory: Path, num_bytes: int, num_bfloat16: int) -> Table:
    """num_bfloat16: pieces that are computed in 16 bits too, which a CPU does 30 times more slowly; 0: none."""
    windows = pieces(tokens_of(directory, documents(num_bytes)))
    served, rows = load_model(str(directory)), Table()

    def add(name: str, found: list[Scores], beside: list[Scores] | None) -> None:
        logprobs = np.concatenate([each.logprobs for each in found])
        about = f"{sum(each.steps for each in found)} steps, {sum(each.cached for each in found)} tokens from the cache"
        row = [name, f"{len(logprobs)}", f"{perplexity(logprobs):.4f}"]
        if beside is not None:
            other = np.concatenate([each.logprobs for each in beside[: len(found)]])
            change = 100 * (perplexity(logprobs) / perplexity(other) - 1)
            row += [f"{change:+.4f} %", f"{np.abs(logprobs - other).max():.2g}"]
        else:
            row += ["", ""]
        rows.append([*row, about])
        print(rows[-1], flush=True)

    def all_of(core: EngineCore, *, warm: bool = False) -> list[Scores]:
        found = []
        for tokens in windows:
            if warm:
                score(core, tokens[: FIRST + 1], FIRST)
            found.append(score(core, tokens, FIRST))
        return found

    with whole_prompts():
        plain = all_of(engine(served, prefix_caching=False, max_num_batched_tokens=2 * WINDOW))
    add("float32, a prompt in one step", plain, None)
    chunked = all_of(engine(served, prefix_caching=False, max_num_batched_tokens=96, max_num_seqs=4))
    add("chunks of at most 96 tokens", chunked, plain)
    add("prefix hits in memory", all_of(engine(served), warm=True), plain)
    add("prefix hits on the disk", from_disk(served, windows), plain)
    with all_drafts():
        core = engine(served, speculative="ngram", prefix_caching=False)
        answers = [score_as_answer(core, tokens, FIRST) for tokens in windows[:SLOW_WINDOWS]]
    add("an answer, drafts verified together", answers, plain)
    for dtype in ("int8", "int4"):
        add(f"{dtype} KV", all_of(engine(served, dtype, prefix_caching=False)), plain)
    if num_bfloat16:
        with tempfile.TemporaryDirectory() as folder:
            half = load_model(str(bfloat16_directory(directory, Path(folder))), LoadOptions(cpu_dtype="model"))
            core = engine(half, prefix_caching=False)
            add("bfloat16", [score(core, tokens, FIRST) for tokens in windows[:num_bfloat16]], plain)
    return rows


def from_disk(served: object, windows: list[list[int]]) -> list[Scores]:
    with tempfile.TemporaryDirectory() as folder:
        before = engine(served, prefix_cache_dir=Path(folder))  # type: ignore[arg-type]
        for tokens, _ in itertools.product(windows, range(2)):  # a prefix is stored once it was found again
            score(before, tokens[: FIRST + 1], FIRST)
        before.keep_prefixes()
        before.close()
        after = engine(served, prefix_cache_dir=Path(folder))  # type: ignore[arg-type]
        found = [score(after, tokens, FIRST) for tokens in windows]
        after.close()
        return found


def bfloat16_directory(directory: Path, made: Path) -> Path:
    """A copy with weights in bfloat16."""
    for path in directory.iterdir():
        if path.suffix != ".safetensors":
            (made / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (made / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    half = {name: weight.astype(mx.bfloat16) for name, weight in weights.items()}
    mx.save_safetensors(str(made / "model.safetensors"), half, metadata={"format": "pt"})
    return made


def drafts(directory: Path) -> Table:
    """Greedy answers with n-gram drafts beside those without: the same requests, batch by batch."""
    rows = Table()
    for batch in (1, 4, 16):
        found: dict[str, tuple[int, int, int, float]] = {}
        for speculative in ("off", "ngram"):
            config = EngineConfig(model=str(directory), speculative=speculative, prefix_caching=False)
            core = build_engine(config, load_model(str(directory)))
            time_rows(core)
            found[speculative] = answer_all(core, batch)
        tokens, steps, accepted, seconds = found["ngram"]
        plain_tokens, plain_steps, _, plain_seconds = found["off"]
        rate, plain_rate = tokens / seconds, plain_tokens / plain_seconds
        rows.append(
            [
                *(f"{batch}", f"{tokens}", f"{plain_steps}", f"{steps}", f"{tokens / (tokens - accepted):.2f}"),
                *(f"{plain_rate:.1f}", f"{rate:.1f}", f"{rate / plain_rate:.2f}"),
            ]
        )
        print(rows[-1], flush=True)
    return rows


def answer_all(core: EngineCore, batch: int) -> tuple[int, int, int, float]:
    """Tokens, steps, accepted drafts and seconds of 16 answers, `batch` at a time, after their prompts."""
    asked = [task.format(place, place) for place in PLACES for task in TASKS]
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    reader, params = core.served.tokenizer.reader, SamplingParams(max_tokens=ANSWER, temperature=0.0)
    tokens, steps, seconds = 0, 0, 0.0
    for start in range(0, len(asked), batch):
        for i, text in enumerate(asked[start : start + batch]):
            prompt = list(reader.apply_chat_template([{"role": "user", "content": text}], **options))
            core.add(Request(f"{start + i}", prompt, params, core.clock()))
        while any(running.num_tokens == 0 for running in core.requests.by_sequence.values()):
            core.step()
        begun, before, began = core.requests.num_generated_tokens, core.loop.num_steps, core.clock()
        while core.has_work():
            core.step()
        tokens += core.requests.num_generated_tokens - begun
        steps += core.loop.num_steps - before
        seconds += core.clock() - began
    return tokens, steps, core.stats().of(NO_DRAFTS).accepted_total, seconds


@contextlib.contextmanager
def serving(model: Path) -> Iterator[str]:
    """The URL of `mlxpaged serve`, whose model is `local`."""
    program = Path(sys.executable).with_name("mlxpaged")
    command = [str(program), "serve", str(model), "--served-model-name", "local", "--port", "0"]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as server:
        try:
            assert server.stdout is not None
            line = next(text for text in map(bytes.decode, server.stdout) if "http://" in text)
            yield "http://" + line.split("http://")[1].split()[0].rstrip("/")
        finally:
            server.terminate()
            server.communicate()


def dictated(model: Path, count: int, concurrent: int = 8) -> Table:
    """Answers with values that the prompt dictates, by API. Prints those that only the schema makes wrong."""
    with serving(model) as url:
        found = dictate_all(url, "local", range(count), concurrent)
    for each in found:
        if each.problem or each.is_lost:
            print(f"dictated {each.case.seed}: {each.problem or each.case.text}: {each.answer[:300]}", file=sys.stderr)
    rows = []
    for api in APIS:
        own = [each for each in found if each.case.api == api]
        valid = sum(not each.problem for each in own)
        copied, free, lost = (sum(getattr(each, name) for each in own) for name in ("copied", "copied_free", "is_lost"))
        rows.append([api, *(f"{number}" for number in (len(own), valid, copied, free, lost))])
    return rows


def schemas(model: Path, count: int, concurrent: int = 8) -> Table:
    """Answers of `mlxpaged serve`, for schemas of the seeds from 0 on."""
    with serving(model) as url:
        verdicts = ask_all(url, "local", range(count), concurrent)
    wrong = [verdict for verdict in verdicts if verdict.problem]
    for verdict in wrong:
        print(f"schema {verdict.seed}: {verdict.problem}: {verdict.answer[:300]}", file=sys.stderr)
    characters = sum(len(verdict.answer) for verdict in verdicts)
    return [[f"{count}", f"{count - len(wrong)}", f"{characters}"]]


def token_ids(model: Path, directory: Path, num_bytes: int, llama_cpp: Path | None) -> Table:
    """Of this repository's files: the server's own tokenizers beside `tokenizers`, and beside llama.cpp's."""
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "*.md", "*.py", "*.metal", "*.toml", "*.yml", "Makefile"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    texts, size = [], 0
    for name in sorted(names, key=lambda name: (len(name) * 7919) % 101):  # of all folders
        text = (ROOT / name).read_text()
        if size < num_bytes and text:
            texts.append(text)
            size += len(text.encode())
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    expected = [list(library.encode(text).ids) for text in texts]
    kinds: dict[str, Callable[[], list[list[int]]]] = {
        "the server, GGUF": lambda: own_ids(model, texts),
        "the server, directory": lambda: own_ids(directory, texts),
    }
    if llama_cpp is not None:
        kinds["llama.cpp, GGUF"] = lambda: llama_cpp_ids(llama_cpp, model, texts)
    rows = Table()
    for name, encode in kinds.items():
        found = encode()
        differing = sum(one != other for one, other in zip(found, expected, strict=True))
        rows.append([name, f"{len(texts)}", f"{size}", f"{sum(map(len, found))}", f"{differing}"])
        print(rows[-1], flush=True)
    return rows


def own_ids(model: Path, texts: list[str]) -> list[list[int]]:
    reader = load_model(str(model), LoadOptions(cpu_dtype="auto")).tokenizer.reader
    return [list(reader.encode(text, add_special_tokens=True)) for text in texts]


def llama_cpp_ids(python: Path, model: Path, texts: list[str]) -> list[list[int]]:
    asked = json.dumps({"file": str(model), "prompt": [], "num_tokens": 0, "texts": texts})
    command = [str(python), str(ROOT / "tests" / "llama_cpp" / "program.py")]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1])["encoded"])


def beside_torch(directory: Path, folder: Path) -> Table:
    """folder: where torch is installed."""
    tokens = tokens_of(directory, documents(200_000))
    texts = [tokens[i * LENGTH : (i + 1) * LENGTH] for i in range(TEXTS)]
    core = engine(load_model(str(directory)), prefix_caching=False)
    found = [of_prompt(core, text, top=TOP)[0] for text in texts]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "numbers.npz"
        np.savez(path, tokens=np.array(texts), ids=np.array([each.top_ids for each in found]))
        program = Path(__file__).with_name("beside_torch.py")
        variables = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, str(program), str(directory), str(path)], env=variables, check=True)
        theirs = np.load(path)
    own = np.array([each.logprobs for each in found])
    top, best = np.array([each.top_logprobs for each in found]), np.array([each.top_ids[:, 0] for each in found])
    differences = (np.abs(own - theirs["own"]), np.abs(top - theirs["at"]))
    return [
        [
            *(f"{TEXTS} of {LENGTH}", f"{differences[0].max():.2g}", f"{differences[1].max():.2g}"),
            *(f"{(best == theirs['best']).sum()} of {best.size}",),
            f"{100 * (perplexity(own.ravel()) / perplexity(theirs['own'].ravel()) - 1):+.5f} %",
        ]
    ]
