"""`mlxpaged serve [MODEL]`"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from mlxpaged.api import DataDirInUseError, HttpConfig, KeyFileError, create_app
from mlxpaged.attention import BACKENDS
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE, SUPPORTED_BLOCK_SIZES
from mlxpaged.cli.flags import (
    RETUNE,
    Flags,
    block_size,
    checked,
    directory,
    host_name,
    is_loopback,
    milliseconds,
    natural_int,
    one_of,
    or_off,
    origin,
    port,
    positive_int,
    positive_seconds,
    seconds,
    share,
    tuning,
)
from mlxpaged.cli.http_server import HttpServer
from mlxpaged.cli.logs import set_up
from mlxpaged.engine import EngineConfig, Priority
from mlxpaged.engine.memory import parse_size
from mlxpaged.models import DEMO_MODEL, tool_parsers
from mlxpaged.scheduler import PREFILL_MODES
from mlxpaged.scheduler.config import DECODE_MULTIPLE, LEAST_STEP_SECONDS

NO_MODEL = "none"
TUNINGS = "auto, default, paged:N (N keys to a threadgroup in decoding) or contiguous"
PRIORITIES = tuple(priority.name.lower() for priority in Priority)
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULTS = EngineConfig()
HTTP_DEFAULTS = HttpConfig()
BACKLOG = 2048
OTHER_FILES = 512
"""Beside connections that are answered: those that are idle, the model, the log."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over the OpenAI API",
        description="Serve a model over the OpenAI API. Every flag has an environment variable, shown with it.",
    )
    flags = Flags(parser)
    flags.value(
        "model",
        str,
        DEMO_MODEL,
        "model directory or hub repository; 'demo' for the bundled one (default), 'none' for no model",
        nargs="?",
        metavar="MODEL",
    )
    flags.value("--host", str, "127.0.0.1", "address to listen on (default 127.0.0.1)")
    flags.value("--port", port, 8080, "port to listen on, 0 for any free one (default 8080)")
    flags.value("--api-keys", Path, None, "file of API keys, made by `mlxpaged keys add` (default: none are needed)")
    flags.switch("--insecure", "listen beyond loopback without API keys")
    flags.values(
        "--allowed-host",
        host_name,
        "name by which clients may reach the server, beside localhost and addresses; several times, or *",
        metavar="NAME",
    )
    flags.values(
        "--cors-origin",
        origin,
        "origin of pages that may use the server from a browser; several times, or * (default: none)",
        metavar="ORIGIN",
    )
    flags.value(
        "--max-body-size",
        checked(parse_size),
        HTTP_DEFAULTS.max_body_bytes,
        "largest body of a request (default 16MiB)",
        metavar="SIZE",
    )
    flags.value(
        "--max-connections",
        positive_int,
        HTTP_DEFAULTS.max_connections,
        f"requests answered at once; the next ones get a 503 (default {HTTP_DEFAULTS.max_connections})",
    )
    flags.value("--served-model-name", str, None, "name of the model in the API (default: MODEL as given)")
    flags.value(
        "--embedding-model",
        str,
        None,
        "model directory or hub repository for /v1/embeddings (default: MODEL, where it states that it makes them)",
        metavar="MODEL",
    )
    flags.value("--served-embedding-model-name", str, None, "its name in the API (default: as given)")
    flags.value(
        "--embedding-max-model-len",
        positive_int,
        DEFAULTS.embedding_max_model_len,
        "tokens of the longest input for embeddings, for which memory is kept (default "
        f"{DEFAULTS.embedding_max_model_len})",
    )
    flags.value(
        "--tool-parser",
        one_of(*tool_parsers()),
        None,
        f"{', '.join(tool_parsers())} (default: the one that the chat template calls for)",
        metavar="NAME",
    )
    add_engine_flags(flags)
    flags.value(
        "--max-queue",
        natural_int,
        DEFAULTS.max_queue,
        f"requests taken beyond --max-num-seqs; the next ones get a 503 (default {DEFAULTS.max_queue})",
    )
    flags.value(
        "--default-priority",
        one_of(*PRIORITIES),
        DEFAULTS.default_priority.name.lower(),
        f"{', '.join(PRIORITIES)}: of requests that do not lower themselves (default normal)",
    )
    flags.value(
        "--request-timeout",
        or_off(positive_seconds),
        None,
        "seconds for an answer to be complete, where the request does not say (default 0: any time)",
        metavar="SECONDS",
    )
    flags.value(
        "--ttft-timeout",
        or_off(positive_seconds),
        None,
        "seconds for the first token of an answer, where the request does not say (default 0: any time)",
        metavar="SECONDS",
    )
    flags.switch("--timelines", "add to every answer where its time went, as X-Mlxpaged-Timeline does for one")
    flags.value("--drain-timeout", seconds, 30.0, "seconds that running requests get at shutdown (default 30)")
    flags.value(
        "--data-dir",
        Path,
        None,
        "directory for /v1/files and /v1/batches, made where it is missing (default: there are none)",
        metavar="DIR",
    )
    flags.value("--log-level", one_of(*LOG_LEVELS), "info", f"{', '.join(LOG_LEVELS)} (default info)")
    parser.set_defaults(run=run, parser=parser)


def add_engine_flags(flags: Flags) -> None:
    """What the engine runs with, for `mlxpaged bench` as well."""
    flags.value(
        "--kv-cache-memory",
        checked(parse_size),
        None,
        "memory for keys and values, for example 256MB or 8GB (default: what is left after the weights)",
    )
    flags.value(
        "--swap-space",
        or_off(checked(parse_size)),
        DEFAULTS.swap_space_bytes,
        "room for keys and values of requests that give way, for example 4GB (default 0: they are computed again)",
        metavar="SIZE",
    )
    flags.value("--swap-dir", directory, None, "directory for --swap-space (default: it is in memory)", metavar="DIR")
    flags.value(
        "--block-size",
        block_size,
        DEFAULTS.block_size,
        f"tokens per KV block, one of {SUPPORTED_BLOCK_SIZES} (default {DEFAULT_BLOCK_SIZE})",
    )
    flags.value(
        "--max-num-seqs",
        positive_int,
        DEFAULTS.max_num_seqs,
        f"sequences in the running batch (default {DEFAULTS.max_num_seqs})",
    )
    flags.value(
        "--max-num-batched-tokens",
        positive_int,
        DEFAULTS.max_num_batched_tokens,
        f"tokens in one step, prompts and answers together (default {DEFAULTS.max_num_batched_tokens})",
    )
    flags.value(
        "--prefill-mode",
        one_of(*PREFILL_MODES),
        DEFAULTS.prefill_mode,
        "mixed: prompts are computed beside decoding requests; separate: a step does either (default mixed)",
    )
    flags.value(
        "--decode-preference",
        share,
        DEFAULTS.decode_preference,
        "0 to below 1. mixed: share of a step's tokens that prompts leave alone while anybody decodes; separate: share "
        f"of the steps that decode while prompts wait (default {DEFAULTS.decode_preference})",
    )
    flags.value(
        "--max-step-ms",
        milliseconds,
        None,
        "what prompts may make of a step, by what steps took so far, so that streams do not stall: 0 for no limit "
        f"(default {DECODE_MULTIPLE:g} times the step without them, or {1000 * LEAST_STEP_SECONDS:g}, while anybody "
        "decodes)",
    )
    flags.value(
        "--attention-backend",
        one_of(*BACKENDS),
        "auto",
        f"one of {', '.join(BACKENDS)} (default auto: Metal kernels if they pass a self-check, else MLX's operations)",
    )
    flags.value("--attention-tuning", tuning, "auto", f"{TUNINGS} (default auto: measured once on this machine)")
    flags.switch("--retune", RETUNE)
    flags.switch("--no-prefix-cache", "compute every prompt from its first token")
    flags.switch("--no-batching", "run one request at a time, the same as --max-num-seqs 1")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """What MODEL and the flags of `add_engine_flags` say. Raises ValueError where they contradict each other."""
    return EngineConfig(
        model=args.model,
        kv_cache_bytes=args.kv_cache_memory,
        swap_space_bytes=args.swap_space,
        swap_dir=args.swap_dir,
        block_size=args.block_size,
        max_num_seqs=1 if args.no_batching else args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefill_mode=args.prefill_mode,
        decode_preference=args.decode_preference,
        max_step_ms=args.max_step_ms,
        attention_backend=args.attention_backend,
        attention_tuning=args.attention_tuning,
        retune=args.retune,
        prefix_caching=not args.no_prefix_cache,
    )


def server_config(args: argparse.Namespace) -> EngineConfig | None:
    """The same for all flags; None for a server without a model. Raises ValueError too."""
    if args.model == NO_MODEL:
        if args.embedding_model is not None:
            raise ValueError("--embedding-model is loaded beside a MODEL, not without one")
        if args.swap_space:
            raise ValueError("--swap-space is for the requests of a MODEL, and there is none")
        return None
    return dataclasses.replace(
        engine_config(args),
        served_model_name=args.served_model_name,
        tool_parser=args.tool_parser,
        embedding_model=args.embedding_model,
        served_embedding_model_name=args.served_embedding_model_name,
        embedding_max_model_len=args.embedding_max_model_len,
        max_queue=args.max_queue,
        default_priority=Priority[args.default_priority.upper()],
        request_timeout=args.request_timeout or None,
        ttft_timeout=args.ttft_timeout or None,
        timelines=args.timelines,
    )


def http_config(args: argparse.Namespace) -> HttpConfig:
    return HttpConfig(
        api_keys=args.api_keys,
        allowed_hosts=args.allowed_host,
        cors_origins=args.cors_origin,
        max_body_bytes=args.max_body_size,
        max_connections=args.max_connections,
    )


def run(args: argparse.Namespace) -> int:
    set_up(args.log_level)
    try:
        config = server_config(args)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        listener = listen(args.host, args.port)
    except OSError as error:
        print(f"mlxpaged: cannot listen on {args.host}:{args.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    if not (args.api_keys or args.insecure or is_loopback(listener.getsockname()[0])):
        listener.close()
        remedy = "name a file of API keys with --api-keys (`mlxpaged keys add` makes one), or let everybody in with"
        args.parser.error(f"--host {args.host} can be reached from other machines: {remedy} --insecure")
    try:
        app = create_app(config, http=http_config(args), data_dir=args.data_dir)
    except (KeyFileError, DataDirInUseError, OSError, ValueError) as error:
        listener.close()
        place = "" if isinstance(error, KeyFileError) else f"--data-dir {args.data_dir}: "
        print(f"mlxpaged: {place}{error}", file=sys.stderr)
        return 1
    allow_open_files(args.max_connections + OTHER_FILES)
    return HttpServer(app, listener, args.drain_timeout).run_until_signal()


def allow_open_files(count: int) -> None:
    """As far as the system lets us. A shell on a Mac starts with 256, and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded: a port that is taken should not cost a minute of loading."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
