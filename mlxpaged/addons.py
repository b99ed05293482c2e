"""The table of add-ons: sources of models, formats of tool calls, APIs and commands, by dotted names.

What is named here is imported when it is needed. Other packages add theirs by entry points of the group `mlxpaged`,
which docs/addons.md explains. A name that is taken, and what cannot be imported, is left out with a warning.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

OFF = "MLXPAGED_NO_ADDONS"
"""This variable leaves out the add-ons of other packages. The processes that a command starts have it too."""


class Named(NamedTuple):
    """What an add-on has under a name. target: "module:object". summary: of a command, for the help. package: the one
    that it comes from, with its version; empty for ours."""

    target: str
    summary: str = ""
    package: str = ""


class Addon(NamedTuple):
    """Each field but the first has what it adds of one kind, by name.

    sources: `Source` (models/sources/source.py), by the prefix of its models. formats: `Format` (formats/format.py), in
    the order in which they are searched. apis: `Api` (api/endpoint.py). commands: functions that add a parser to those
    of the commands, as in cli/, in the order of the help."""

    name: str
    sources: Mapping[str, Named] = {}
    formats: Mapping[str, Named] = {}
    apis: Mapping[str, Named] = {}
    commands: Mapping[str, Named] = {}

    @property
    def contents(self) -> str:
        """For example "sources tar; apis example"."""
        found = {kind: ", ".join(getattr(self, kind)) for kind in KINDS.values()}
        return "; ".join(f"{kind} {names}" for kind, names in found.items() if names)


def commands(**modules: tuple[str, str]) -> dict[str, Named]:
    """modules: by name, the module in cli/ and a summary."""
    return {name: Named(f"mlxpaged.cli.{module}:add_parser", summary) for name, (module, summary) in modules.items()}


def formats(**targets: str) -> dict[str, Named]:
    return {name: Named(f"mlxpaged.formats.{target}") for name, target in targets.items()}


ADDONS = (
    Addon(
        "server",
        apis={"server": Named("mlxpaged.api.server_api:API")},
        commands=commands(serve=("serve", "serve a model over the OpenAI, Anthropic and Ollama APIs")),
    ),
    Addon("openai", apis={"openai": Named("mlxpaged.api.openai.endpoints:API")}),
    Addon("anthropic", apis={"anthropic": Named("mlxpaged.api.anthropic.endpoints:API")}),
    Addon("batches", apis={"batches": Named("mlxpaged.api.batches.endpoints:API")}),
    Addon(
        "ollama",
        apis={"ollama": Named("mlxpaged.api.ollama.endpoints:API")},
        sources={"ollama": Named("mlxpaged.models.sources.other_apps:OLLAMA")},
    ),
    Addon(
        "decisions",
        apis={
            "decisions": Named("mlxpaged.api.decisions.endpoints:DECISIONS"),
            "systemone": Named("mlxpaged.api.decisions.endpoints:SYSTEM_ONE"),
        },
    ),
    Addon("lmstudio", sources={"lmstudio": Named("mlxpaged.models.sources.other_apps:LM_STUDIO")}),
    Addon(
        "tools",
        formats=formats(
            harmony="harmony:HARMONY",
            minimax_m3="minimax:MINIMAX_M3",
            minimax_m2="minimax:MINIMAX_M2",
            gemma4="gemma:GEMMA_4",
            function_gemma="gemma:FUNCTION_GEMMA",
            longcat="glm:LONGCAT",
            hunyuan3="hunyuan:HUNYUAN_3",
            hunyuan="hunyuan:HUNYUAN",
            glm47="glm:GLM",
            pythonic="pythonic:LFM2",
            seed_oss="seed:SEED_OSS",
            deepseek_v32="dsml:DEEPSEEK_V32",
            qwen3_coder="qwen3_coder:QWEN3_CODER",
            kimi_k2="kimi:KIMI_K2",
            kimi_k3="kimi:KIMI_K3",
            minicpm5="minicpm:MINICPM5",
            muse_spark="muse:MUSE_SPARK",
            deepseek_v3="deepseek:DEEPSEEK_V3",
            phi4_mini="json_lists:PHI_4_MINI",
            granite3="json_lists:GRANITE_3",
            nemotron_nano="json_lists:NEMOTRON_NANO",
            command_r="json_lists:COMMAND_R",
            apertus="json_lists:APERTUS",
            mistral="mistral:MISTRAL",
            json_tools="hermes:HERMES",
            llama4_json="llama:LLAMA_4_JSON",
            llama4="llama:LLAMA_4",
            llama3="llama:LLAMA_3",
        ),
    ),
    Addon(
        "chat",
        commands=commands(
            chat=("chat.command", "chat with a model in the terminal"),
            run=("run_prompt", "print the answer to one prompt"),
        ),
    ),
    Addon(
        "models",
        commands=commands(
            ps=("ps", "list the loaded models of the running server"),
            top=("top", "show what the running server does, each second"),
            stop=("stop", "unload a model, or end the running server"),
        ),
    ),
    Addon("launch", commands=commands(launch=("launch", "start a coding agent on the server"))),
    Addon("service", commands=commands(service=("service.command", "start the server at login, and keep it running"))),
    Addon(
        "downloads",
        commands=commands(
            pull=("pull", "download a model, after saying whether it fits this machine"),
            ls=("ls", "list the downloaded models"),
            rm=("rm", "delete a downloaded model"),
            cache=("cache", "show or delete the prefixes that servers have stored on a disk"),
        ),
    ),
    Addon("bench", commands=commands(bench=("bench.flags", "measure how fast this machine serves a model"))),
    Addon(
        "doctor",
        commands=commands(
            doctor=("doctor.flags", "check the attention kernels on this machine, or a model's tool calls")
        ),
    ),
    Addon(
        "settings",
        commands=commands(
            keys=("keys.flags", "make, list and remove API keys"),
            config=("config", "show the configuration, and where each value comes from"),
            completion=("completion", "print a script that completes words in a shell"),
            help=("help", "show the help of a command"),
            version=("version", "show the version"),
        ),
    ),
)
"""Our own. Nothing else names what they have."""

KINDS = {"source": "sources", "format": "formats", "api": "apis", "command": "commands"}
"""Fields of Addon by the first word of an entry point, as in `format.run_tags`."""


@functools.cache
def ours(kind: str) -> dict[str, Named]:
    """What our own add-ons have of one kind, by name. kind: a field of Addon."""
    return {name: named for addon in ADDONS for name, named in getattr(addon, kind).items()}


@functools.cache
def from_outside() -> tuple[Addon, ...]:
    """The add-ons of other packages, by their names and versions. It reads their metadata, and imports none of them."""
    if os.environ.get(OFF, "").strip().lower() not in ("", "0", "false", "no", "off"):
        return ()
    from importlib.metadata import entry_points  # takes 0.1 s, in which `mlxpaged --help` has ended

    found: dict[str, dict[str, dict[str, Named]]] = {}
    for point in sorted(entry_points(group="mlxpaged"), key=lambda point: point.name):
        package = "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        kind, _, name = point.name.partition(".")
        if kind in KINDS and name:
            of_package = found.setdefault(package, {field: {} for field in KINDS.values()})
            of_package[KINDS[kind]][name] = Named(point.value, f"of the add-on {package}", package)
        else:
            leave_out(package, point.name, f"it must begin with {', '.join(f'{kind}.' for kind in KINDS)}")
    return tuple(Addon(package, **found[package]) for package in sorted(found))


def leave_out(package: str, what: str, why: str) -> None:
    import logging  # most commands do without it

    logging.getLogger(__name__).warning("add-on %s: %s is left out: %s", package, what, why)


@functools.cache
def everything(kind: str) -> dict[str, Named]:
    """What all add-ons have of one kind, by name, ours first. kind: a field of Addon."""
    found = dict(ours(kind))
    for addon in from_outside():
        for name, named in getattr(addon, kind).items():
            if (first := found.setdefault(name, named)) is not named:
                leave_out(addon.name, f"{name!r} of its {kind}", f"{first.package or 'mlxpaged'} has this name")
    return found


class Table(Mapping[str, T]):
    """The objects of one kind by name, in the order of the add-ons. Each is imported when it is asked for. One of
    another package that cannot be used is not in the table."""

    def __init__(self, kind: str, of: Any, problem: Callable[[str, T], str | None] = lambda name, value: None) -> None:
        """kind: a field of Addon. of: the class of the objects. problem: says why one of another package cannot be used
        under a name; None if it can."""
        self._kind, self._of, self._problem = kind, of, problem
        self._loaded: dict[str, T | None] = {}

    def __getitem__(self, name: str) -> T:
        named = ours(self._kind).get(name) or everything(self._kind)[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name, named)
        if (value := self._loaded[name]) is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in everything(self._kind) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _load(self, name: str, named: Named) -> T | None:
        """Returns None for an object of another package that cannot be used."""
        if not named.package:
            return self._object(named)
        try:
            value = self._object(named)
            why = self._problem(name, value) if isinstance(value, self._of) else f"it is no {self._of.__name__}"
        except (Exception, SystemExit) as error:  # its code can raise anything
            why = f"{type(error).__name__}: {error}"
        if why is None:
            return value
        leave_out(named.package, f"{name!r} of its {self._kind}", why)
        return None

    def _object(self, named: Named) -> T:
        module, _, attribute = named.target.partition(":")
        found: T = getattr(importlib.import_module(module), attribute)
        return found
