"""Runs two replicas of the demo model and a router on loopback, and shows what happens to conversations and requests.

python deploy/replicas/try_replicas.py [--router litellm|smg --program PATH]

Conversations of several turns show whether each stays with the replica that has its prefix. Then one replica is drained
under load, and one is killed. A request is lost if it gets an error before a part of its answer. It is cut off if the
error comes later: that is what a killed replica does to the streams that it has begun. The exit status is 1 if a
conversation moved without a reason, a request was lost, or a drained replica cut one off.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).parent
CONFIGS = {"haproxy": "haproxy.cfg", "litellm": "litellm.yaml", "smg": "smg.sh"}
PORTS = {"haproxy": (8080, 8079, 8081, 8082), "litellm": (8080, 8081, 8082), "smg": (8080, 8079, 8081, 8082)}
"""The ports in the files: the router's first, the replicas' last."""

CONVERSATIONS, TURNS, CLIENTS = 12, 4, 12
BLOCK_SIZE = 16
SYSTEM = "You are a patient assistant. " * 4
KEY = f"sk-{secrets.token_hex(32)}"
START_SECONDS, LOAD_SECONDS, REQUEST_SECONDS = 300.0, 3.0, 60.0


@dataclass
class Turn:
    """One request. outcome: "answered", "lost" or "cut off"."""

    outcome: str
    detail: str = ""
    replica: str = ""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds_to_first: float = 0.0


@dataclass
class Conversation:
    """A client that asks one question after the other."""

    name: str
    url: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": SYSTEM}]

    def ask(self, client: httpx.Client, stream: bool = True, max_tokens: int = 24) -> Turn:
        question = f"{self.name}: what is {len(self.turns) + 11} + 25?"
        messages = [*self.messages, {"role": "user", "content": question}]
        turn = send(client, self.url, self.name, messages, stream, max_tokens)
        self.turns.append(turn)
        if turn.outcome == "answered":
            self.messages = [*messages, {"role": "assistant", "content": turn.text}]
        return turn

    @property
    def stayed(self) -> bool:
        return len({turn.replica for turn in self.turns}) == 1

    @property
    def hit(self) -> bool:
        """Whether each turn found all full blocks of the turn before it."""
        return all(
            after.cached_tokens >= before.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
            for before, after in zip(self.turns, self.turns[1:], strict=False)
        )


def send(
    client: httpx.Client, url: str, name: str, messages: Sequence[dict[str, str]], stream: bool, max_tokens: int
) -> Turn:
    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    turn, start = Turn("lost"), time.monotonic()
    try:
        headers = {"x-litellm-session-id": name, "Authorization": f"Bearer {KEY}"}
        with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            turn.replica = response.headers.get("x-replica") or response.headers.get("x-litellm-model-id") or ""
            if response.status_code != 200:
                turn.detail = f"{response.status_code} {response.read().decode()[:200]}"
                return turn
            ended = False
            for data in events(response) if stream else [response.read().decode()]:
                if turn.outcome == "lost":
                    turn.outcome, turn.seconds_to_first = "cut off", time.monotonic() - start
                ended = ended or not stream or data == "[DONE]"
                if data != "[DONE]":
                    read(turn, json.loads(data))
            if ended and not turn.detail:
                turn.outcome = "answered"
    except httpx.HTTPError as error:
        turn.detail = repr(error)
    return turn


def events(response: httpx.Response) -> Iterator[str]:
    return (line[6:] for line in response.iter_lines() if line.startswith("data: "))


def read(turn: Turn, data: dict[str, Any]) -> None:
    if "error" in data:
        turn.detail = str(data["error"])
    for choice in data.get("choices", ()):
        turn.text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
    if usage := data.get("usage"):
        turn.prompt_tokens = usage["prompt_tokens"]
        turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Program:
    """A process with an HTTP server, and the log of both its outputs."""

    def __init__(self, command: Sequence[str], url: str, health: str, log: Path) -> None:
        self.command, self.url, self.health, self.log = command, url, health, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            env = os.environ | {"LITELLM_MASTER_KEY": KEY}  # without a key, LiteLLM does not start
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=env)

    def wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not is_up(self.url + self.health):
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{self.command[0]} did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def end(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def configure(router: str, folder: Path) -> list[str]:
    """Write the router's file with free ports in place of its own. Returns them in the order of `PORTS`."""
    ports = dict(zip(map(str, PORTS[router]), map(str, free_ports(len(PORTS[router]))), strict=True))
    text = (FOLDER / CONFIGS[router]).read_text()
    text = re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda match: ports[match[0]], text)
    (folder / CONFIGS[router]).write_text(text)
    return list(ports.values())


def router_program(router: str, program: str, folder: Path, port: str) -> Program:
    config, url = str(folder / CONFIGS[router]), f"http://127.0.0.1:{port}"
    if router == "haproxy":
        return Program([program, "-f", config], url, "/health", folder / "router.log")
    if router == "smg":
        return Program(["env", f"SMG={program}", "sh", config], url, "/readiness", folder / "router.log")
    command = [program, "--config", config, "--host", "127.0.0.1", "--port", port]
    return Program(command, url, "/health/liveliness", folder / "router.log")


def replica_program(name: str, folder: Path, port: str) -> Program:
    flags = ["--port", port, "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "2", "--kv-cache-memory", "64MB"]
    command = [sys.executable, "-m", "mlxpaged", "serve", "demo", *flags]
    return Program(command, f"http://127.0.0.1:{port}", "/health", folder / f"{name}.log")


@contextmanager
def running(programs: Sequence[Program]) -> Iterator[None]:
    """They start in this order, and run until the end."""
    try:
        for each in programs:
            each.start()
            each.wait_ready()
        yield
    finally:
        for each in programs:
            each.end(signal.SIGKILL)


def client() -> httpx.Client:
    return httpx.Client(timeout=REQUEST_SECONDS, trust_env=False)


def converse(url: str) -> list[Conversation]:
    """All conversations, a few at a time."""

    def run(number: int) -> Conversation:
        conversation = Conversation(f"conversation-{number}", url)
        with client() as own:
            for _ in range(TURNS):
                conversation.ask(own)
        return conversation

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(run, range(CONVERSATIONS)))


def under_load(url: str, phase: str, change: Callable[[], None]) -> list[Conversation]:
    """Conversations without a pause, before, during and after `change`. Every third request is not streamed."""
    done = threading.Event()

    def run(number: int) -> list[Conversation]:
        conversations: list[Conversation] = []
        with client() as own:
            while not done.is_set():
                conversations.append(Conversation(f"{phase}-{number}-{len(conversations)}", url))
                for turn in range(TURNS):
                    if not done.is_set():
                        conversations[-1].ask(own, stream=turn % 3 != 2, max_tokens=64)
        return conversations

    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(run, number) for number in range(CLIENTS)]
        try:
            time.sleep(LOAD_SECONDS)
            change()
            time.sleep(LOAD_SECONDS)
        finally:
            done.set()
        return [conversation for each in running for conversation in each.result()]


def first_token_ms(url: str) -> float:
    """The median of short requests, one after the other."""
    with client() as own:
        turns = [Conversation("latency", url).ask(own, max_tokens=1) for _ in range(40)]
    return 1e3 * statistics.median(turn.seconds_to_first for turn in turns)


def show_replicas(conversations: Sequence[Conversation]) -> None:
    print(f"{'replica':12}{'conversations':>14}{'later turns':>13}{'prompt tokens':>15}{'cached':>9}")
    for replica in sorted({turn.replica for each in conversations for turn in each.turns}):
        here = [each for each in conversations if each.turns[0].replica == replica]
        later = [turn for each in conversations for turn in each.turns[1:] if turn.replica == replica]
        prompts, cached = sum(turn.prompt_tokens for turn in later), sum(turn.cached_tokens for turn in later)
        print(f"{replica:12}{len(here):14}{len(later):13}{prompts:15}{cached / max(prompts, 1):9.0%}")


def show_phase(name: str, conversations: Sequence[Conversation]) -> Counter[str]:
    turns = [turn for each in conversations for turn in each.turns]
    outcomes = Counter(turn.outcome for turn in turns)
    print(f"{name:16}{len(turns):9}{outcomes['answered']:10}{outcomes['lost']:24}{outcomes['cut off']:9}")
    for detail, count in Counter(turn.detail for turn in turns if turn.outcome == "lost").items():
        print(f"  {count} lost: {detail}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description="Try two replicas behind a router, on loopback.")
    parser.add_argument("--router", choices=CONFIGS, default="haproxy")
    parser.add_argument("--program", help="the router's program, if it is not in the PATH")
    args = parser.parse_args()
    program = shutil.which(args.program or args.router)
    if program is None:
        print(f"{args.program or args.router} is not installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        front, *_, first, second = configure(args.router, folder)
        replicas = [replica_program("mac-1", folder, first), replica_program("mac-2", folder, second)]
        router = router_program(args.router, program, folder, front)
        with running([*replicas, router]):
            problems = [*show_conversations(router, replicas, args.router != "smg"), *show_ends(router, replicas)]
    for problem in problems:
        print(f"NOT AS IT SHOULD BE: {problem}")
    return 1 if problems else 0


def show_conversations(router: Program, replicas: Sequence[Program], names_replicas: bool) -> Iterator[str]:
    """Yields what is wrong. names_replicas: whether the router says which replica has answered."""
    conversations = converse(router.url)
    show_replicas(conversations)
    moved = sum(not each.stayed for each in conversations)
    missed = sum(not each.hit for each in conversations)
    known = f"{moved} of {len(conversations)} conversations moved, " if names_replicas else ""
    print(f"{known}{missed} missed their prefix")
    direct, routed = first_token_ms(replicas[0].url), first_token_ms(router.url)
    print(f"first token after {direct:.1f} ms, through the router {routed:.1f} ms\n")
    if moved or missed:
        yield "a conversation did not stay with its prefix"


def show_ends(router: Program, replicas: Sequence[Program]) -> Iterator[str]:
    """Yields what is wrong."""

    def end(replica: Program, number: signal.Signals) -> None:
        replica.end(number)
        replica.start()
        replica.wait_ready()

    print(f"{'':16}{'requests':>9}{'answered':>10}{'lost before they began':>24}{'cut off':>9}")
    drained = under_load(router.url, "drain", lambda: end(replicas[0], signal.SIGTERM))
    if show_phase("mac-1 drained", drained)["cut off"]:
        yield "a drained replica cut a stream off"
    killed = under_load(router.url, "kill", lambda: end(replicas[1], signal.SIGKILL))
    show_phase("mac-2 killed", killed)
    if any(turn.outcome == "lost" for each in (*drained, *killed) for turn in each.turns):
        yield "a request was lost that had not begun"


if __name__ == "__main__":
    sys.exit(main())
