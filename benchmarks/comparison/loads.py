"""The loads A to E: who asks what, when. The same words for every server, other words in every repetition.

A  distinct prompts, a number of them at a time     D  several users, each in a conversation of several turns
B  one shared prefix, a number at a time            E  arrivals at random, mixed lengths, at a share of capacity
C  streams that decode while long prompts arrive
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .client import Answer, Client, Message
from .model import Texts

CAPACITY = "E capacity"
"""A load of its own: E's requests, a number at a time. What it reaches is what E's rates are shares of."""


@dataclass(frozen=True)
class Sizes:
    """All numbers of the loads; lengths are in tokens."""

    a_requests: int = 32
    a_prompt: int = 140
    a_output: int = 64
    a_concurrent: tuple[int, ...] = (1, 4, 16)

    b_requests: int = 32
    b_prefix: int = 2000
    b_own: int = 40
    b_output: int = 32
    b_concurrent: int = 16

    c_streams: int = 8
    c_stream_prompt: int = 64
    c_stream_output: int = 256
    c_long: int = 5
    c_long_prompt: int = 4000
    c_long_output: int = 16
    c_every_seconds: float = 5.0

    d_users: int = 4
    d_turns: int = 8
    d_prompt: int = 60
    d_output: int = 48

    e_requests: int = 40
    e_prompt: tuple[int, int] = (32, 1024)
    e_output: tuple[int, int] = (16, 128)
    """Shortest and longest; the logarithm of a length is uniform between them."""
    e_shares: tuple[float, ...] = (0.5, 0.8, 1.2)
    e_concurrent: int = 16


QUICK = Sizes(
    a_requests=4,
    a_output=8,
    a_concurrent=(1, 4),
    b_requests=4,
    b_prefix=512,
    b_output=8,
    b_concurrent=4,
    c_streams=2,
    c_stream_output=32,
    c_long=1,
    c_long_prompt=1000,
    c_long_output=4,
    c_every_seconds=1.0,
    d_users=2,
    d_turns=3,
    d_output=8,
    e_requests=6,
    e_prompt=(32, 256),
    e_output=(8, 32),
    e_shares=(0.8,),
    e_concurrent=4,
)
"""Shows in minutes that everything works; its figures mean little."""


@dataclass(frozen=True)
class Run:
    """What a load brought: the answers in any order, and its duration in seconds."""

    name: str
    answers: list[Answer]
    seconds: float
    window: tuple[float, float]
    """From when to when (perf_counter) tokens count."""


@dataclass(frozen=True)
class Load:
    name: str
    run: Callable[[Client], Run]


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def make_loads(
    letters: Sequence[str], capacity: float | None, sizes: Sizes, texts: Texts, repetition: int
) -> list[Load]:
    """In the order in which they run. E is left out while its capacity (requests per second) is not known."""
    words = TextsOf(texts, f"repetition {repetition}")
    loads = []
    if "A" in letters:
        loads += [Load(f"A at {count}", DistinctPrompts(sizes, words, count)) for count in sizes.a_concurrent]
    if "B" in letters:
        loads.append(Load("B", SharedPrefix(sizes, words)))
    if "C" in letters:
        loads.append(Load("C", LongPrompts(sizes, words)))
    if "D" in letters:
        loads.append(Load("D", Conversations(sizes, words)))
    if "E" in letters and capacity is None:
        loads.append(Load(CAPACITY, Mixed(sizes, words)))
    if "E" in letters and capacity is not None:
        loads += [Load(f"E at {share:g}", Arrivals(sizes, words, share, capacity)) for share in sizes.e_shares]
    return loads


@dataclass(frozen=True)
class TextsOf:
    """Texts whose names are one repetition's own."""

    texts: Texts
    scope: str

    def of(self, name: str, tokens: int) -> str:
        return self.texts.of(f"{self.scope}, {name}", tokens)


@dataclass(frozen=True)
class Question:
    messages: list[Message]
    max_tokens: int
    role: str = "request"


class Threads(ThreadPoolExecutor):
    """Threads that send requests. An interrupt ends the waiting: no more requests are sent, and those in flight end
    with the server."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._left = threading.Event()

    def sleep_until(self, moment: float) -> None:
        self._left.wait(max(0.0, moment - time.perf_counter()))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._left.set()
        self.shutdown(wait=kind is None, cancel_futures=kind is not None)


def ask_all(client: Client, questions: Iterable[Question], concurrent: int) -> list[Answer]:
    """`concurrent` at a time: the next is sent when one is answered."""
    with Threads(concurrent) as pool:
        return list(
            pool.map(lambda question: client.ask(question.messages, question.max_tokens, question.role), questions)
        )


def timed(name: str, ask: Callable[[], list[Answer]]) -> Run:
    start = time.perf_counter()
    answers = ask()
    end = time.perf_counter()
    return Run(name, answers, end - start, (start, end))


@dataclass(frozen=True)
class DistinctPrompts:
    sizes: Sizes
    words: TextsOf
    concurrent: int

    def __call__(self, client: Client) -> Run:
        name, sizes = f"A at {self.concurrent}", self.sizes
        prompts = [self.words.of(f"{name}, prompt {i}", sizes.a_prompt) for i in range(sizes.a_requests)]
        questions = [Question(user(prompt), sizes.a_output) for prompt in prompts]
        return timed(name, lambda: ask_all(client, questions, self.concurrent))


@dataclass(frozen=True)
class SharedPrefix:
    sizes: Sizes
    words: TextsOf

    def __call__(self, client: Client) -> Run:
        sizes = self.sizes
        prefix: Message = {"role": "system", "content": self.words.of("B, prefix", sizes.b_prefix)}
        own = [self.words.of(f"B, prompt {i}", sizes.b_own) for i in range(sizes.b_requests)]
        questions = [Question([prefix, *user(text)], sizes.b_output) for text in own]
        return timed("B", lambda: ask_all(client, questions, sizes.b_concurrent))


@dataclass(frozen=True)
class LongPrompts:
    """Streams ask again as soon as they are answered, until the last long prompt is. What counts is what came before
    that moment."""

    sizes: Sizes
    words: TextsOf

    def __call__(self, client: Client) -> Run:
        sizes, long_done = self.sizes, threading.Event()
        texts = [self.words.of(f"C, long prompt {i}", sizes.c_long_prompt) for i in range(sizes.c_long)]

        def stream(index: int) -> list[Answer]:
            answers: list[Answer] = []
            while not long_done.is_set() and not (answers and answers[-1].error):
                text = self.words.of(f"C, stream {index}, prompt {len(answers)}", sizes.c_stream_prompt)
                answers.append(client.ask(user(text), sizes.c_stream_output, "stream"))
            return answers

        def long(index: int) -> Answer:
            pool.sleep_until(start + (index + 1) * sizes.c_every_seconds)
            return client.ask(user(texts[index]), sizes.c_long_output, "long")

        with Threads(sizes.c_streams + sizes.c_long) as pool:
            start = time.perf_counter()
            streams = [pool.submit(stream, index) for index in range(sizes.c_streams)]
            long_answers = list(pool.map(long, range(sizes.c_long)))
            end = time.perf_counter()
            long_done.set()
            answers = [answer for future in streams for answer in future.result()]
        return Run("C", long_answers + answers, end - start, (start, end))


@dataclass(frozen=True)
class Conversations:
    """Users send their next message as soon as they are answered, with all that was said before."""

    sizes: Sizes
    words: TextsOf

    def __call__(self, client: Client) -> Run:
        sizes = self.sizes

        def converse(index: int) -> list[Answer]:
            messages: list[Message] = []
            answers: list[Answer] = []
            for turn in range(sizes.d_turns):
                messages += user(self.words.of(f"D, user {index}, turn {turn}", sizes.d_prompt))
                answers.append(client.ask(list(messages), sizes.d_output, f"user {index}"))
                if answers[-1].error:
                    break
                messages.append({"role": "assistant", "content": answers[-1].text})
            return answers

        def all_users() -> list[Answer]:
            with Threads(sizes.d_users) as pool:
                return [answer for answers in pool.map(converse, range(sizes.d_users)) for answer in answers]

        return timed("D", all_users)


def mixed_questions(sizes: Sizes, words: TextsOf, name: str) -> list[Question]:
    rng = random.Random("E")  # every server and share has the same lengths

    def length(shortest: int, longest: int) -> int:
        return round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))

    lengths = [(length(*sizes.e_prompt), length(*sizes.e_output)) for _ in range(sizes.e_requests)]
    return [
        Question(user(words.of(f"{name}, prompt {i}", prompt)), output) for i, (prompt, output) in enumerate(lengths)
    ]


@dataclass(frozen=True)
class Mixed:
    sizes: Sizes
    words: TextsOf

    def __call__(self, client: Client) -> Run:
        questions = mixed_questions(self.sizes, self.words, CAPACITY)
        return timed(CAPACITY, lambda: ask_all(client, questions, self.sizes.e_concurrent))


@dataclass(frozen=True)
class Arrivals:
    """A Poisson process: the pauses between requests are exponential. No client waits for an answer before it sends the
    next request."""

    sizes: Sizes
    words: TextsOf
    share: float
    capacity: float

    def __call__(self, client: Client) -> Run:
        name, rng = f"E at {self.share:g}", random.Random("E, arrivals")
        questions = mixed_questions(self.sizes, self.words, name)
        due, now = [], 0.0
        for _ in questions:
            now += rng.expovariate(self.share * self.capacity)
            due.append(now)

        def all_arrivals() -> list[Answer]:
            with Threads(len(questions)) as pool:
                start = time.perf_counter()

                def ask(seconds: float, question: Question) -> Answer:
                    pool.sleep_until(start + seconds)
                    return client.ask(question.messages, question.max_tokens)

                return list(pool.map(ask, due, questions))

        return timed(name, all_arrivals)


def warm_up(client: Client, texts: Texts) -> list[Answer]:
    """One request alone, then four together; of words that no load uses."""
    questions = [Question(user(texts.of(f"warm-up {i}", 100)), 8, "warm-up") for i in range(5)]
    return ask_all(client, questions[:1], 1) + ask_all(client, questions[1:], 4)


def capped(client: Client, seconds: float) -> Client:
    """The client with a new deadline, in `seconds`."""
    return replace(client, deadline=time.perf_counter() + seconds)
