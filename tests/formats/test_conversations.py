"""Random conversations of agents, in all APIs: none is refused, and the model is shown all of them, in order.

`make test-formats` tries them with the makers' chat templates. MLXPAGED_CONVERSATIONS: how many with each.
MLXPAGED_FUZZ_SEED and MLXPAGED_FUZZ_FIRST: which.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from tests.api.helpers import raw
from tests.formats.conversations import BODIES, TOOLS, Conversation, Message, Piece, Writer, in_chat
from tests.formats.families import FAMILIES, Family, family_server, own_template, watched_prompts
from tests.scripted import follow

CONVERSATIONS = int(os.environ.get("MLXPAGED_CONVERSATIONS") or 5)
SEED = int(os.environ.get("MLXPAGED_FUZZ_SEED") or 1)
FIRST = int(os.environ.get("MLXPAGED_FUZZ_FIRST") or 0)
TEMPLATES = os.environ.get("MLXPAGED_TEMPLATES")
THEIRS = sorted(path.stem for path in Path(TEMPLATES).glob("*.jinja")) if TEMPLATES else []

BY_NAME = {family.name: family for family in FAMILIES}
BY_TEMPLATE = {name: family for family in FAMILIES for name in family.theirs}
NO_CHAT = {"fireworks-ai-llama-3-firefunction-v2": "it refuses all without `functions`, a variable of its own"}
CLOCKS = {"tool_chat_template_hunyuan_a13b": "each prompt begins with the time, to the second"}
CONTEXT = 65536

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "the argument"}'},
}
SIMPLE: list[Message] = [
    {"role": "system", "content": "the system"},
    {"role": "user", "content": "the user"},
    {"role": "assistant", "content": "the said", "reasoning_content": "the thought", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "the result"},
    {"role": "assistant", "content": "the answer"},
    {"role": "user", "content": "the end"},
]
"""What a template does not show of this, it cannot show."""
SAID: Message = {"role": "assistant", "content": "the said", "tool_calls": [CALL, CALL | {"id": "call_2"}]}
RESULTS: list[Message] = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"the result {i}"} for i in (1, 2)]
ROUND = [{"role": "user", "content": "the user"}, SAID, *RESULTS, SAID, RESULTS[0]]
GREETING: Message = {"role": "assistant", "content": "the greeting"}
PLAIN: list[Message] = [SIMPLE[0], GREETING, SIMPLE[1], *SIMPLE[4:], *ROUND, *SIMPLE[4:], *ROUND, *SIMPLE[4:]]
"""A template that changes earlier prompts of this changes those of all conversations."""


class Talks:
    """Sends conversations to a server. prompts: of its requests."""

    def __init__(self, client: httpx.Client, prompts: list[str]) -> None:
        self.client, self.prompts = client, prompts

    def prompt_of(self, path: str, body: Message) -> str:
        """Fails if the request is refused."""
        before = len(self.prompts)
        response = self.client.post(path, json={"model": "scripted"} | body)
        assert response.status_code == 200, (response.text, body)
        return self.prompts[before]

    def simple_prompt(self) -> str:
        return self.prompt_of("/v1/chat/completions", {"messages": SIMPLE, "tools": TOOLS, "max_tokens": 1})

    def extends(self, messages: Sequence[Message], has_tools: bool = True) -> bool:
        """Whether each prompt begins with the one before, without the tokens that open an answer."""
        ends = [i + 1 for i, (one, other) in enumerate(itertools.pairwise(messages)) if opens_turn(one, other)]
        prompts = [self.shown(messages[:end], has_tools) for end in (*ends, len(messages))]
        return all(other.startswith(one) for one, other in itertools.pairwise(prompts))

    def shown(self, messages: Sequence[Message], has_tools: bool) -> str:
        body = in_chat(Conversation(tuple(messages), has_tools, False)) | {"add_generation_prompt": False}
        return self.prompt_of("/v1/chat/completions", body)


def opens_turn(message: Message, following: Message) -> bool:
    return message["role"] in ("user", "tool") and following["role"] == "assistant"


def check_prompts(talks: Talks, name: str, count: int) -> None:
    simple = talks.simple_prompt()
    lost = {kind for kind in ("said", "thought") if f"the {kind}" not in simple}
    lost |= {"thought"}  # most templates show that of the newest turn only
    said_last = simple.find("the said") > simple.find("the argument")
    for number in range(FIRST, FIRST + count):
        writer = Writer(f"{SEED}:{name}:{number}")
        talk = writer.conversation(writer.rng.choice((2, 4, 8, 20)))
        path = list(BODIES)[number % len(BODIES)]
        if talk.continues and path == "/v1/responses":  # it has no such field
            path = "/v1/chat/completions"
        prompt = talks.prompt_of(path, BODIES[path](talk))
        pieces = [piece for piece in writer.pieces if piece.kind not in lost]
        assert [piece for piece in pieces if piece.word not in prompt] == [], (number, path, prompt)
        ordered = [piece for piece in pieces if not (said_last and piece.kind == "said")]
        assert out_of_order(prompt, ordered) == [], (number, path, prompt)


def out_of_order(prompt: str, pieces: Sequence[Piece]) -> list[tuple[Piece, Piece]]:
    """Pairs of words that stand in another order than in the conversation. Results are in the order of their calls."""
    placed = sorted((prompt.rfind(piece.word), piece.group, piece) for piece in pieces if piece.group is not None)
    results = [piece for piece in pieces if piece.kind == "result"]
    found = [(one, other) for (_, group, one), (_, later, other) in itertools.pairwise(placed) if group > later]
    return found + [(a, b) for a, b in itertools.pairwise(results) if prompt.rfind(a.word) > prompt.rfind(b.word)]


def check_extension(talks: Talks, name: str, count: int) -> None:
    if not all(talks.extends(PLAIN, has_tools) for has_tools in (True, False)):
        pytest.skip("the template changes earlier turns")
    for number in range(FIRST, FIRST + count):
        writer = Writer(f"{SEED}:{name}:{number}", is_plain=True)
        talk = writer.conversation(random.Random(number).choice((2, 4, 6)))
        if not talk.continues:
            assert talks.extends(talk.messages, talk.has_tools), (number, talk.messages)


CHECKS: dict[str, Callable[[Talks, str, int], None]] = {"shown": check_prompts, "extends": check_extension}


def check(family: Family, template: str, name: str, count: int, checked: str) -> None:
    with family_server(family, template, CONTEXT) as server, raw(server) as client:
        prompts = watched_prompts(server)
        follow(server, lambda prompt: "x")
        CHECKS[checked](Talks(client, prompts), name, count)


@pytest.mark.parametrize("checked", CHECKS)
@pytest.mark.parametrize("name", ["Qwen3-Coder", "Mistral Small 3.2", "Gemma 3"])
def test_conversations_are_shown_by_our_templates(name: str, checked: str) -> None:
    check(BY_NAME[name], own_template(BY_NAME[name]), name, 8, checked)


@pytest.mark.slow
@pytest.mark.skipif(not TEMPLATES, reason="MLXPAGED_TEMPLATES names no directory with the makers' templates")
@pytest.mark.parametrize("checked", CHECKS)
@pytest.mark.parametrize("name", THEIRS)
def test_conversations_are_shown_by_the_makers_templates(name: str, checked: str) -> None:
    if why := NO_CHAT.get(name) or (CLOCKS.get(name) if checked == "extends" else None):
        pytest.skip(why)
    family = BY_TEMPLATE.get(name, Family(name, "json_tools"))
    template = (Path(str(TEMPLATES)) / f"{name}.jinja").read_text(encoding="utf-8")
    check(family, template, name, CONVERSATIONS, checked)
