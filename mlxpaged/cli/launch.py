"""`mlxpaged launch claude | codex | opencode` starts a coding agent that uses the running server."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxpaged.cli.arguments import keep_after_dashes
from mlxpaged.cli.client import ServerError
from mlxpaged.cli.connection import Connection, add_server_flags, connected, running
from mlxpaged.cli.flags import model_name

NO_KEY = "unused"
"""Agents want a key, which a server without keys does not look at."""
OUTPUT_TOKENS = 8192
TOO_SMALL = 3
"""The exit status if the model's context is smaller than the agent needs."""
SIGNALLED = 128
"""Added to the number of the signal that has ended the agent, as in a shell."""


@dataclass(frozen=True)
class Settings:
    variables: dict[str, str]
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agent:
    """settings: what it needs to use a server. context: tokens of a useful session. because: what takes them. smooth:
    tokens of a session without the trouble that `below` names."""

    install: str
    settings: Callable[[Connection], Settings]
    context: int
    because: str
    smooth: int = 0
    below: str = ""


def claude(connection: Connection) -> Settings:
    # One model for all: Claude Code asks others for titles and for its subagents.
    models = [f"ANTHROPIC_{kind}MODEL" for kind in ("", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_")]
    return Settings(
        {
            "ANTHROPIC_BASE_URL": connection.client.url,
            "ANTHROPIC_API_KEY": connection.client.key or NO_KEY,
            **dict.fromkeys(models, connection.model),
            **({} if (limit := max_model_len(connection)) is None else {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(limit)}),
        }
    )


def codex(connection: Connection) -> Settings:
    """Overrides ~/.codex/config.toml and leaves it as it is. A JSON string is also one of TOML."""
    values = {
        "model": connection.model,
        **({} if (limit := max_model_len(connection)) is None else {"model_context_window": limit}),
        "model_provider": "mlxpaged",
        "model_providers.mlxpaged.name": "mlxpaged",
        "model_providers.mlxpaged.base_url": f"{connection.client.url}/v1",
        "model_providers.mlxpaged.wire_api": "responses",
        "model_providers.mlxpaged.env_key": "MLXPAGED_API_KEY",
    }
    args = tuple(word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}"))
    return Settings({"MLXPAGED_API_KEY": connection.client.key or NO_KEY}, args)


def opencode(connection: Connection) -> Settings:
    model: dict[str, Any] = {"tool_call": True}
    if (limit := max_model_len(connection)) is not None:
        model["limit"] = {"context": limit, "output": min(OUTPUT_TOKENS, limit // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{connection.client.url}/v1", "apiKey": connection.client.key or NO_KEY},
        "models": {connection.model: model},
    }
    config = {"model": f"mlxpaged/{connection.model}", "provider": {"mlxpaged": provider}}
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


AGENTS = {
    "claude": Agent(
        "npm install -g @anthropic-ai/claude-code",
        claude,
        context=32_768,
        because="its own prompt and tools take about 8,000, the files that it reads and its answers the rest",
        smooth=65_536,
        below="it shortens its conversation in nearly every turn",
    ),
    "codex": Agent(
        "npm install -g @openai/codex",
        codex,
        context=32_768,
        because="its own prompt and tools take more than 4,096, the files that it reads and its answers the rest",
    ),
    "opencode": Agent(
        "npm install -g opencode-ai",
        opencode,
        context=32_768,
        because=f"an answer may take {OUTPUT_TOKENS:,}, its own prompt and tools and the files that it reads the rest",
    ),
}


def max_model_len(connection: Connection) -> int | None:
    """None if the model is not loaded and the key may not load it: its first request does that."""
    entries = connection.client.get("/v1/models")["data"]
    return next((entry.get("max_model_len") for entry in entries if entry["id"] == connection.model), None)


def too_small(name: str, connection: Connection) -> str | None:
    """Says that the model's context is smaller than the agent needs. None if it is not, or if it is not known."""
    agent, limit = AGENTS[name], max_model_len(connection)
    if limit is None or limit >= agent.context:
        return None
    needs = f"{name} needs a context of about {agent.context:,} tokens, and {connection.model} has {limit:,}"
    return f"{needs}: {agent.because}"


def tight(name: str, connection: Connection) -> str | None:
    """Says that the agent works with the model's context, but not smoothly. None if it does, or if it is not known."""
    agent, limit = AGENTS[name], max_model_len(connection)
    if limit is None or limit >= agent.smooth:
        return None
    return f"{connection.model} has a context of {limit:,} tokens: below {agent.smooth:,}, {agent.below} ({name})"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        usage="%(prog)s {claude,codex,opencode} [MODEL] [flags] [-- ...]",
        description="Start a coding agent that uses the running server. What is after -- goes to the agent.",
        epilog="The exit status is that of the agent; 1 if it is not installed or if there is no server; "
        f"{TOO_SMALL} if the model's context is smaller than the agent needs.",
    )
    parser.add_argument("agent", choices=tuple(AGENTS), help="the program to start")
    parser.add_argument(
        "model", nargs="?", type=model_name, metavar="MODEL", help="name of a served model (default: the first one)"
    )
    printed = "print the variables and the command instead, for a server that runs"
    parser.add_argument("--print", action="store_true", help=printed, dest="prints")
    anyway = "start the agent also if the model's context is smaller than it needs"
    parser.add_argument("--small-context", action="store_true", help=anyway, dest="takes_small_context")
    add_server_flags(parser, starts=True)
    keep_after_dashes(parser, "agent_args")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    agent = AGENTS[args.agent]
    try:
        if args.prints:
            running(args)
        elif (program := shutil.which(args.agent)) is None:
            print(f"mlxpaged: {args.agent} is not installed. To install it: {agent.install}", file=sys.stderr)
            return 1
        with connected(args, args.model) as connection:
            if (lack := too_small(args.agent, connection)) is not None and not args.takes_small_context:
                remedy = "serve a model with a longer context, or start it anyway with --small-context"
                print(f"mlxpaged: {lack}; {remedy}", file=sys.stderr)
                return TOO_SMALL
            if (note := tight(args.agent, connection)) is not None:
                print(f"mlxpaged: {note}", file=sys.stderr)
            settings = agent.settings(connection)
            words = [*settings.args, *args.agent_args]
            if args.prints:
                for name, value in settings.variables.items():
                    print(f"export {name}={shlex.quote(value)}")
                print(shlex.join([args.agent, *words]))
                return 0
            return wait_for([program, *words], settings.variables)
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1


def wait_for(command: list[str], variables: dict[str, str]) -> int:
    """Run a program in the terminal of this process until its end. Returns its exit status, as a shell does. Ctrl-C is
    for the program alone. A handler is reset in the program, which an ignored signal would not be. Raises
    ServerError if the program cannot be started."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = subprocess.call(command, env=os.environ | variables)
    except OSError as error:  # it is for another CPU, or what runs it is missing
        raise ServerError(f"{command[0]} cannot be started: {error.strerror}") from None
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else SIGNALLED - status
