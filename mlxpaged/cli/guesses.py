"""What a user may have meant by a word that does not exist: a command, a flag, a key or the name of a model.

First the words of other servers and their clients, then names that begin with the word, then names that are spelt like
it. If nothing is near, nothing is named: a wrong guess is worse than none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

COMMANDS = {
    **dict.fromkeys(("list", "models", "show", "info"), ("ls", "list")),
    **dict.fromkeys(("download", "fetch", "get", "install", "search"), ("pull", "add", "install")),
    **dict.fromkeys(("delete", "remove", "del", "uninstall"), ("rm", "remove")),
    **dict.fromkeys(("kill", "quit", "unload", "down"), ("stop",)),
    **dict.fromkeys(("server", "start", "up", "load"), ("serve", "install")),
    **dict.fromkeys(("generate", "ask", "prompt", "complete"), ("run",)),
    **dict.fromkeys(("benchmark", "perf"), ("bench",)),
    **dict.fromkeys(("settings", "env", "set"), ("config",)),
    **dict.fromkeys(("create", "new"), ("add",)),
    "status": ("ps", "status"),
    "check": ("doctor",),
    "create-key": ("keys",),
    "login": ("keys",),
}
"""Word -> commands with that meaning. The first one that exists is named. "search": a name that does not exist makes
`pull` search the hub."""

FLAGS = {
    **dict.fromkeys(
        (
            *("c", "ctx", "ctx-size", "num-ctx", "n-ctx", "context", "context-length", "context-size"),
            *("max-context", "max-context-length", "max-kv-size", "max-seq-len", "max-sequence-length"),
        ),
        ("max-model-len",),
    ),
    **dict.fromkeys(("n", "n-predict", "num-predict", "max-new-tokens", "max-completion-tokens"), ("max-tokens",)),
    **dict.fromkeys(("t", "temp", "temperature"), ("temperature", "default-temperature")),
    **dict.fromkeys(("repeat-penalty", "repetition-penalty"), ("default-repetition-penalty",)),
    **{name: (f"default-{name}",) for name in ("top-p", "top-k", "min-p", "presence-penalty", "frequency-penalty")},
    **dict.fromkeys(("np", "parallel", "num-parallel", "max-running-requests", "max-batch-size"), ("max-num-seqs",)),
    **dict.fromkeys(("batch-size", "ubatch-size", "prefill-step-size"), ("max-num-batched-tokens",)),
    **dict.fromkeys(("gpu-memory-utilization", "mem-fraction-static", "max-memory"), ("memory",)),
    **dict.fromkeys(("cache-limit", "prompt-cache-bytes", "kv-cache-size"), ("kv-cache-memory",)),
    **dict.fromkeys(
        ("quantize-kv", "kv-bits", "cache-type-k", "cache-type-v", "ctk", "ctv", "kv-quant"), ("kv-cache-dtype",)
    ),
    **dict.fromkeys(("lora", "lora-modules", "adapter-path"), ("adapter",)),
    **dict.fromkeys(("m", "model-path", "hf-repo"), ("model",)),
    **dict.fromkeys(("a", "model-name"), ("served-model-name",)),
    **dict.fromkeys(("v", "verbose", "debug", "verbosity"), ("log-level",)),
    **dict.fromkeys(("sys", "system-prompt"), ("system",)),
    **dict.fromkeys(("ttl", "keep-alive", "sleep-idle-seconds"), ("idle-unload",)),
    **dict.fromkeys(("key", "token"), ("api-key", "api-keys")),
    **dict.fromkeys(("format", "schema", "grammar"), ("json-schema",)),
    **dict.fromkeys(("cors", "allow-origin", "allowed-origins"), ("cors-origin",)),
    **dict.fromkeys(("model-draft", "md", "speculative-model"), ("draft-model",)),
    "reasoning-budget": ("thinking-budget",),
    "s": ("seed",),
    "p": ("port",),
    "h": ("help",),
    "tool-call-parser": ("tool-parser",),
    "force": ("yes",),
    "y": ("yes",),
}
"""The same for flags, without their dashes."""

DRAFTS = "each step decides how many draft tokens it verifies: see --speculative and --draft-model"
ABSENT = {
    **dict.fromkeys(("num-draft-tokens", "speculative-config"), DRAFTS),
    **dict.fromkeys(("ngl", "n-gpu-layers", "gpu-layers"), "all layers run on the GPU"),
    **dict.fromkeys(("p", "prompt"), "a prompt has no flag: mlxpaged run MODEL PROMPT"),
    **dict.fromkeys(("m", "model"), "MODEL has no flag here"),
}
"""What to say about flags that have nothing of their meaning here."""

LEAST_PREFIX = 3
"""Letters that a word must have to be the beginning of a name."""
LEAST_LIKENESS = 0.7
"""The least ratio of difflib, 2 * M / T for M equal letters of T in both. "prot" and "port" have 0.75, "show" and
"stop" 0.5."""


def meant_command(word: str, known: Iterable[str]) -> str:
    """The end of a message about a command that does not exist."""
    return did_you_mean(meant(word, list(known), COMMANDS))


def meant_flag(flag: str, known: Iterable[str]) -> str:
    """The same for a flag. Here and in `known`, flags have their dashes."""
    word, names = flag.lstrip("-").replace("_", "-"), [name[2:] for name in known if name.startswith("--")]
    if (found := meant(word, names, FLAGS)) is not None:
        return did_you_mean(f"--{found}")
    return f"; {ABSENT[word]}" if word in ABSENT else ""


def meant_key(key: str, known: Iterable[str]) -> str:
    """The same for a key of the configuration file, which is a flag without dashes."""
    word = key.replace("_", "-")
    found = meant(word, list(known), FLAGS)
    return f"; {ABSENT[word]}" if found is None and word in ABSENT else did_you_mean(found)


def meant_name(word: str, known: Iterable[str]) -> str:
    """The same for any other name."""
    return did_you_mean(meant(word, list(known), {}))


def did_you_mean(name: str | None) -> str:
    return "" if name is None else f"; did you mean {name}?"


def meant(word: str, names: list[str], of_others: Mapping[str, tuple[str, ...]]) -> str | None:
    """The name that the word stands for, if there is one."""
    from difflib import get_close_matches  # 10 ms, and most commands are spelt right

    word = word.lower()
    if word in names:  # with other dashes
        return word
    if word in of_others or word in ABSENT:
        return next((name for name in of_others.get(word, ()) if name in names), None)
    if len(word) >= LEAST_PREFIX and (longer := [name for name in names if name.startswith(word)]):
        return min(longer, key=len)
    return next(iter(get_close_matches(word, names, n=1, cutoff=LEAST_LIKENESS)), None)
