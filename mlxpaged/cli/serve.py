"""`mlxpaged serve [MODEL]` runs the HTTP server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import ipaddress
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpaged import addons
from mlxpaged.api.config import HttpConfig
from mlxpaged.awake import AWAKE
from mlxpaged.cli import flags
from mlxpaged.cli.background_server import end_with_standard_input
from mlxpaged.cli.engine_flags import DEFAULTS, add_engine_flags, add_log_level, engine_config, priority
from mlxpaged.cli.exit import exit_status
from mlxpaged.cli.flags import size
from mlxpaged.cli.logs import set_up
from mlxpaged.cli.parser import heavy_imports
from mlxpaged.cli.profiles import check_names, profile
from mlxpaged.cli.running_servers import registered
from mlxpaged.cli.service.manager import SERVICE_DIRECTORY, SERVICE_VARIABLE
from mlxpaged.core.text.thinking_limit import ThinkingLimit
from mlxpaged.engine_config import END_LOOPS, KV_CACHE_DTYPES
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.files.generation_config import LIMITS
from mlxpaged.models.sources.short_names import without_address

if TYPE_CHECKING:
    from mlxpaged.engine.load_journal import LoadJournal
    from mlxpaged.engine_config import EngineConfig
    from mlxpaged.registry.model import Model
    from mlxpaged.registry.registry import Registry

logger = logging.getLogger(__name__)

NO_MODEL = "none"
BACKLOG = 2048
IDLE_CONNECTIONS = 4096
"""Connections that may be open beside those that are answered."""
OTHER_FILES = 256
"""Open files beside the connections: the model, whose weights can be in more than a hundred, uploads, the log."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        usage="%(prog)s [MODEL] [flags]",
        description="Serve a model over the OpenAI, Anthropic and Ollama APIs. Each flag can also be set as the "
        "environment variable in brackets.",
    )
    groups = flags.Flags(parser)
    what = "model directory or hub repository; 'demo' and 'demo-vision' are bundled, 'none' serves without a model"
    more = "NAME=MODEL serves it as NAME; the first model is loaded at the start, and the others on first use"
    groups.models(DEFAULTS.model, what, more)

    model = groups.group("model", DEFAULTS)
    model.field("--served-model-name", str, "name of the first model in the API", "MODEL as given")
    formats = sorted(addons.ours("formats"))
    known = flags.one_of(*formats, more=lambda: addons.everything("formats"))
    model.field("--tool-parser", known, f"tool call format: {', '.join(formats)}", "by the chat template")
    template = "file with a chat template in Jinja for the first model"
    model.field("--chat-template", flags.file, template, "the model's own")
    model.switch("--reranker", "MODEL is a reranker like Qwen3-Reranker, for /v1/rerank, whatever its name is")
    adapter = "LoRA adapter, as NAME=DIR for the first model, or MODEL:NAME=DIR; requests name it MODEL:NAME"
    model.values("--adapter", adapter_path, adapter, "adapter_paths")
    embeds = "model for /v1/embeddings, loaded at the start"
    model.value("--embedding-model", str, None, embeds, "MODEL, if it makes embeddings")
    model.value("--served-embedding-model-name", str, None, "name of the embedding model in the API", "as given")
    model.field("--embedding-max-model-len", flags.positive_int, "longest input for embeddings, in tokens")
    reduced = "pixels of the largest image that the model sees; larger ones are reduced; 0: load no vision tower"
    model.field("--max-image-pixels", flags.natural_int, reduced)

    several = groups.group("several models")
    defaults = "thinking (on, off), thinking_budget, max_tokens, temperature and so on, chat_template, system"
    other = f"NAME=MODEL,KEY=VALUE,...: another name of a model that is served, with its own {defaults}"
    several.values("--profile", profile, other, "profiles", separator=";")
    several.values("--alias", named, "NAME=MODEL: another name of a model that is served", "aliases")
    several.values("--pin", str, "name of a model that is never unloaded to make room for another", "pinned")
    found = "directory whose subdirectories are models; a request names one by its path in DIR"
    several.values("--model-dir", flags.directory, found, "model_dirs")
    stored = "NAME=TYPE: the --kv-cache-dtype of one model, instead of that for all"
    several.values("--model-kv-cache-dtype", kv_cache_dtype, stored, "kv_cache_dtypes")
    most = "models that are loaded at once; an idle one is unloaded for another"
    several.value("--max-loaded-models", flags.positive_int, None, most, "as many as fit")
    wait = "longest wait for room; then the models that have it take no new requests, end theirs and make room"
    several.value("--swap-wait", flags.duration, 30.0, wait, "30s")
    idle = "unload a model after this time without a request, for example 10m or 1h; 0: never"
    several.value("--idle-unload", flags.or_zero(flags.duration, None), None, idle, "never")
    all_memory = "most memory of all models together: weights, KV caches and states"
    several.value("--memory", size, None, all_memory, "what leaves a desktop usable")

    tier = groups.group("prefix cache on a disk", DEFAULTS)
    kept = "directory in which prefixes outlive the server, an idle unload and their blocks"
    tier.field("--prefix-cache-dir", flags.path, kept, "none; they are in memory only")
    most = "most bytes there, for all models"
    tier.value("--prefix-cache-disk", size, "20GB", most, dest="prefix_cache_disk_bytes")
    writes = "most bytes that are written there a day; 0: what is there is only read"
    tier.value("--prefix-cache-writes", flags.or_zero(size, 0), "50GB", writes, dest="prefix_cache_write_bytes")

    machines = groups.group("several machines")
    hostfile = "hostfile of `mlx.launch`: MODEL runs on all hosts together, rank 0 on this one, by tensor parallelism"
    machines.value("--hosts", flags.path, None, hostfile, "this machine alone")
    again = "start the ranks again if one fails, and go on with the requests; otherwise these end with an error"
    machines.switch("--restart-ranks", again)

    network = groups.group("network", HttpConfig())
    network.value("--host", str, "127.0.0.1", "address to listen on")
    network.value("--port", flags.port, 8080, "port to listen on; 0: any free port")
    second = "second port, for clients that speak only Ollama's API, such as 11434; 0: any free port"
    network.field("--ollama-port", flags.port, second, "no second port")
    network.field("--max-connections", flags.positive_int, "requests that are answered at once; further ones get a 503")
    largest = f"{HttpConfig.max_body_bytes // 2**20}MiB"
    network.value("--max-body-size", size, largest, "largest request body", dest="max_body_bytes")
    dead = "seconds after which a client that does not read its answer is disconnected; 0: never"
    network.field("--write-timeout", flags.or_zero(flags.positive_seconds, None), dead)
    network.switch("--until-eof", "end when standard input is closed, for a program that starts the server")
    network.value("--drain-timeout", flags.seconds, 30, "seconds that running requests have at shutdown to finish")

    access = groups.group("access", HttpConfig())
    access.field("--api-keys", flags.path, "file made by `mlxpaged keys add`", "no key is needed")
    access.switch("--insecure", "allow other machines to use the server without an API key")
    fetched = "let programs on this machine, or admin keys, download models with POST /api/pull"
    access.switch("--allow-downloads", fetched)
    apart = "let no two API keys share cached prefixes; by default, keys of the same tier share them"
    access.switch("--isolate-prefix-cache", apart)
    names = "another host name of this server, beside the local ones, or * for any"
    access.values("--allowed-host", flags.host_name, names, "allowed_hosts")
    fetched_from = "host whose images the server fetches if a request has their URL; HOST:PORT for another port"
    access.values("--allow-image-hosts", flags.image_host, fetched_from, "image_hosts")
    pages = "origin whose web pages may use the server, beside local pages and apps, or * for any"
    access.values("--cors-origin", flags.origin, pages, "cors_origins")

    requests = groups.group("requests", DEFAULTS)
    queue = "requests that may wait in addition to --max-num-seqs running ones; further ones get a 503"
    requests.field("--max-queue", flags.natural_int, queue)
    classes = "high, normal or low: priority of requests that do not ask for a lower one"
    requests.field("--default-priority", priority, classes)
    limit = "in seconds, for requests that do not set it; 0: no limit"
    timeout = flags.or_zero(flags.positive_seconds, None)
    requests.field("--request-timeout", timeout, f"time for the whole answer, {limit}", "0")
    requests.field("--ttft-timeout", timeout, f"time for the first token, {limit}", "0")
    requests.switch("--strict", "refuse unknown fields and hints in requests, which are ignored otherwise")
    thoughts = "most tokens of an answer's thoughts, a number or per cent of its max_tokens; 0: no limit"
    requests.field("--thinking-budget", thinking_limit, thoughts, "no limit", "thinking_limit")
    requests.switch("--close-thoughts", "if a model ends within its thought, close the thought and begin the answer")
    ended = "auto: if a request has tools, end its answer once it only repeats itself; on: of any request; off"
    requests.field("--end-loops", flags.one_of(*END_LOOPS), ended)
    requests.switch("--timelines", "add the times of waiting, prefill and decoding to every answer")
    kept = "directory for /v1/files and /v1/batches; 0: both are off"
    requests.value("--data-dir", flags.or_zero(flags.path, None), None, kept, "0")

    stalls = groups.group("stalls")
    longest = "seconds after which a step that has not ended counts as stalled; 0: never"
    estimated = "20 times its estimated time, but at least 30"
    unlimited = flags.or_zero(flags.positive_seconds, math.inf)
    stalls.value("--step-timeout", unlimited, None, longest, estimated)
    stalls.switch("--exit-when-stalled", "end a stalled server with status 70, for a service manager that restarts it")

    add_sampling_flags(groups.group("sampling", DEFAULTS))
    add_engine_flags(groups)
    add_log_level(groups, "info")
    parser.set_defaults(run=run, parser=parser)


def add_sampling_flags(sampling: flags.Flags) -> None:
    ignored = "do not take defaults from the model's generation_config.json; its end tokens are still used"
    sampling.switch("--no-generation-config", ignored)
    for name, limits in LIMITS.items():
        kind = flags.fitting(int if limits.whole else float, str(limits), limits.fit)
        text = f"{name} of requests that do not set it, {limits}"
        sampling.field(f"--default-{name.replace('_', '-')}", kind, text, "the model's")


thinking_limit = flags.or_zero(flags.checked(ThinkingLimit.parse), None)


@flags.checked
def named(text: str) -> tuple[str, str]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise ValueError(f"must be NAME=MODEL, got {text!r}")
    return name, model


@flags.checked
def kv_cache_dtype(text: str) -> tuple[str, str]:
    name, _, dtype = text.rpartition("=")
    if not name or dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"must be NAME=TYPE with a type of {', '.join(KV_CACHE_DTYPES)}, got {text!r}")
    return name, dtype


@flags.checked
def adapter_path(text: str) -> AdapterPath:
    """Its name may have that of a model, as MODEL:NAME."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"must be NAME=DIR or MODEL:NAME=DIR, got {text!r}")
    return AdapterPath(name, flags.path(path))


def server_models(args: argparse.Namespace) -> Registry | None:
    """Returns None for a server without a model. Raises ValueError if flags contradict each other."""
    with heavy_imports():
        from mlxpaged.engine.awake_clock import AwakeClock
        from mlxpaged.engine.watchdog import StallLimits
        from mlxpaged.registry.catalog import Catalog
        from mlxpaged.registry.model import Model
        from mlxpaged.registry.occupants import Limits
        from mlxpaged.registry.registry import registry_of
    if "MLX_RANK" in os.environ:
        raise ValueError(
            "mlx.launch started this; run `mlxpaged serve MODEL --hosts FILE`, which starts the ranks itself"
        )
    names = flags.models_of(args)
    if NO_MODEL in names:
        needing = {
            "--embedding-model": args.embedding_model,
            "--adapter": args.adapter_paths,
            "--profile": args.profiles,
        }
        for flag, given in (needing | {"--swap-space": args.swap_space_bytes}).items():
            if given:
                raise ValueError(f"{flag} needs a MODEL; it cannot be used with {NO_MODEL!r}")
        if len(names) > 1:
            raise ValueError(f"{NO_MODEL!r} cannot be served together with other models")
        return None
    if args.served_embedding_model_name is not None and args.embedding_model is None:
        raise ValueError("--served-embedding-model-name needs --embedding-model")
    first, *others = names
    own_name, path = flags.name_and_path(first)
    options = {"generation_config": not args.no_generation_config}
    name = args.served_model_name or own_name
    base = engine_config(args, **options, model=path, served_model_name=None if name == path else name)
    own = "off" if base.speculative == "draft" else base.speculative
    plain = dataclasses.replace(
        base, tool_parser=None, chat_template=None, reranker=False, mtp=None, draft_model=None, speculative=own
    )
    models = [Model(name, base)]
    if args.embedding_model is not None:
        name = args.served_embedding_model_name or without_address(args.embedding_model)
        models.append(Model(name, of(plain, without_address(args.embedding_model), name, only_embeds=True)))
    num_at_start = len(models)
    for other in others:
        name, path = flags.name_and_path(other)
        models.append(Model(name, of(plain, path, name)))
    give_adapters(models, args.adapter_paths)
    give_kv_cache_dtypes(models, args.kv_cache_dtypes)
    if args.hosts is not None:
        return cluster_registry(args, models)
    check_names(args.profiles, [*(model.name for model in models), *dict(args.aliases)])
    catalog = Catalog(args.model_dirs)
    for model in models:  # requests that name no model look for one of a kind
        model.found = catalog.find_source(model.config.model)
    return registry_of(
        models,
        plain,
        num_at_start=num_at_start,
        aliases=dict(args.aliases),
        profiles={each.name: each for each in args.profiles},
        pinned=args.pinned,
        limits=Limits(args.max_loaded_models, args.idle_unload, args.swap_wait),
        catalog=catalog,
        clock=AwakeClock(),
        watchdog=StallLimits(args.step_timeout, args.exit_when_stalled),
        loads=load_journal(args.data_dir),
    )


def load_journal(data_dir: Path | None) -> LoadJournal | None:
    """In the data directory, or in that of a service: what starts a server again and again has one of these. Returns
    None without them, and if it cannot be used: the server says that of its data directory later."""
    directory = data_dir or (SERVICE_DIRECTORY.expanduser() if os.environ.get(SERVICE_VARIABLE) else None)
    if directory is None:
        return None
    from mlxpaged.durable_files import make_private
    from mlxpaged.engine.load_journal import LoadJournal

    try:
        if not directory.exists():
            make_private(directory)
        return LoadJournal(directory / "loads")
    except OSError:
        return None


def cluster_registry(args: argparse.Namespace, models: Sequence[Model]) -> Registry:
    """A registry whose model runs on several machines. Raises ValueError."""
    given = {
        "a second model": models[1:],
        "--adapter": args.adapter_paths,
        "--profile": args.profiles,
        "--reranker": args.reranker,
    }
    for what in (name for name, value in given.items() if value):
        raise ValueError(f"{what} cannot be used together with --hosts")
    if args.prefix_cache_dir is not None:  # the ranks have other working directories
        directory = args.prefix_cache_dir.absolute()
        models[0].config = dataclasses.replace(models[0].config, prefix_cache_dir=directory)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's library is imported: each rank loads from its own disk
    with heavy_imports():
        from mlxpaged.cluster.cluster_engine import ClusterEngine
        from mlxpaged.cluster.hosts import Hosts
        from mlxpaged.engine.watchdog import StallLimits
        from mlxpaged.registry.occupants import Limits
        from mlxpaged.registry.registry import registry_of
    try:
        hosts = Hosts.read(args.hosts)
    except OSError as error:
        raise ValueError(f"--hosts {args.hosts}: {error.strerror or error}") from None
    host = ClusterEngine(hosts, StallLimits(args.step_timeout), args.restart_ranks, args.log_level)
    aliases, limits = dict(args.aliases), Limits(1, args.idle_unload, args.swap_wait)
    return registry_of(models, models[0].config, args.pinned, aliases=aliases, limits=limits, engine_host=host)


def give_adapters(models: Sequence[Model], paths: Sequence[AdapterPath]) -> None:
    """Raises ValueError for an adapter of a model that is not served, or that only makes embeddings."""
    by_name = {model.name: model for model in models if not model.config.only_embeds}
    for name, path in paths:
        of_model, _, adapter = name.rpartition(":")
        model = by_name.get(of_model or models[0].name)
        if model is None:
            raise ValueError(f"--adapter {name!r}: no model {of_model!r} is served that generates text")
        adapters = (*model.config.adapters, AdapterPath(adapter, path))
        model.config = dataclasses.replace(model.config, adapters=adapters)


def give_kv_cache_dtypes(models: Sequence[Model], dtypes: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError for a model that no flag names."""
    by_name = {model.name: model for model in models}
    for name, dtype in dtypes:
        if name not in by_name:
            raise ValueError(f"--model-kv-cache-dtype {name}={dtype}: no model {name!r} is served")
        by_name[name].config = dataclasses.replace(by_name[name].config, kv_cache_dtype=dtype)


def of(config: EngineConfig, model: str, name: str, **fields: Any) -> EngineConfig:
    return dataclasses.replace(config, model=model, served_model_name=name, **fields)


def run(args: argparse.Namespace) -> int:
    set_up(args.log_level)
    AWAKE.choose(not args.allow_sleep)
    for addon in addons.from_outside():
        logger.info("add-on %s: %s", addon.name, addon.contents)
    if (free := listeners_of(args)) is None:  # known before the imports of the engine, which take seconds
        return 1
    close(free)
    try:
        registry = server_models(args)
    except ValueError as error:
        args.parser.error(str(error))
    listeners = listeners_of(args)
    if listeners is None:
        return 1
    addresses = [listener.getsockname() for listener in listeners]
    if not (args.api_keys or args.insecure or ipaddress.ip_address(addresses[0][0]).is_loopback):
        close(listeners)
        remedy = "use API keys with --api-keys FILE (`mlxpaged keys add` makes it), or allow access without a key with"
        args.parser.error(f"--host {args.host} can be reached from other machines: {remedy} --insecure")
    http = flags.from_flags(
        HttpConfig,
        args,
        ollama_port=addresses[1][1] if len(addresses) > 1 else None,
        max_open_connections=allow_open_files(args.max_connections),
    )
    with heavy_imports():
        import uvloop

        from mlxpaged.models.device_memory import limit_memory
    limit_memory(args.memory)
    if args.until_eof:
        end_with_standard_input()
    status = 0
    with (
        contextlib.suppress(KeyboardInterrupt),  # a SIGINT before the server handles it
        registered(local_url(addresses[0]), shared=not args.until_eof),
        noted_end(registry),
    ):
        if registry is not None:
            registry.start(uvloop.new_event_loop())  # tokens reach clients sooner than with asyncio's loop
        # Imported only now: this takes a second, in which the engine thread reads weights.
        from mlxpaged.cli.http_server import run_server

        status = run_server(registry, listeners, http, args.data_dir, args.drain_timeout)
    return exit_status(status, has_engine=registry is not None or args.allow_downloads)


@contextlib.contextmanager
def noted_end(registry: Registry | None) -> Iterator[None]:
    """At the end of the context, or at a SIGTERM before the server handles it, a load that has not ended is no reason
    for the end of the process."""
    if registry is None:
        yield
        return

    def end(number: int, _: object) -> None:
        registry.end_journal()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        registry.end_journal()
        signal.signal(signal.SIGTERM, before)


def local_url(address: tuple[Any, ...]) -> str:
    """Returns the URL of a listening address for clients on this machine: of 0.0.0.0, that of 127.0.0.1."""
    host = ipaddress.ip_address(address[0])
    if host.is_unspecified:
        host = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1")
    return f"http://[{host}]:{address[1]}" if host.version == 6 else f"http://{host}:{address[1]}"


def allow_open_files(answered: int) -> float:
    """Allow the open files that the server needs, if the system permits. Returns how many connections may be open.

    A shell on a Mac starts with 256 files, and mlx-lm's import sets 2,048, which can be raised to 4,096. answered:
    connections that are answered at once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = answered + IDLE_CONNECTIONS + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a Mac can have a lower limit than the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft - min(OTHER_FILES, soft // 2)


def listeners_of(args: argparse.Namespace) -> list[socket.socket] | None:
    """Returns the main socket, and the one for Ollama's clients if there is one. None, with a message, if one of the
    ports cannot be had."""
    found: list[socket.socket] = []
    for flag, port in (("--port", args.port), ("--ollama-port", args.ollama_port)):
        if port is None:
            continue
        try:
            found.append(listen(args.host, port))
        except OSError as error:
            close(found)
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                from mlxpaged.cli.port_in_use import occupant

                reason = f"{reason}: {occupant(url_for(args.host, port), flag)}"
            print(f"mlxpaged: cannot listen on {args.host}:{port}: {reason}", file=sys.stderr)
            return None
    return found


def url_for(host: str, port: int) -> str:
    """Returns the URL of an address as a user writes it, which may be a name."""
    try:
        return local_url((host, port))
    except ValueError:
        return f"http://{host}:{port}"


def close(listeners: Iterable[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use is reported at once."""
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
