"""`mlxpaged completion SHELL` prints a script that completes words in bash, zsh or fish.

The script asks `mlxpaged completion words` at each Tab, so that downloaded models are completed too, and all shells
complete the same words.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxpaged.cli.flags import one_of
from mlxpaged.cli.parser import Parser
from mlxpaged.models.sources.short_names import BUNDLED, short_names

BASH = """\
_mlxpaged() {
    local line="${COMP_LINE:0:COMP_POINT}" found words before=""
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local current="${words[${#words[@]}-1]}"
    # bash breaks words at : and =, and replaces only what comes after them
    [[ $COMP_WORDBREAKS == *:* ]] && before="${current%"${current##*[:=]}"}"
    COMPREPLY=()
    while IFS=$'\\t' read -r found _; do
        COMPREPLY+=("${found#"$before"}")
    done < <(mlxpaged completion words -- "${words[@]:1}" 2>/dev/null)
}
complete -o default -F _mlxpaged mlxpaged
"""

ZSH = """\
_mlxpaged() {
    local -a found
    local line
    for line in ${(f)"$(mlxpaged completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"}; do
        found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
    done
    if (( $#found )); then _describe mlxpaged found; else _files; fi
}
compdef _mlxpaged mlxpaged
"""

FISH = """\
function __mlxpaged_words
    set -l current (commandline -ct)
    set -l found (mlxpaged completion words -- (commandline -opc)[2..-1] "$current" 2>/dev/null)
    if test -n "$found"
        printf '%s\\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c mlxpaged -f -a '(__mlxpaged_words)'
"""

SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        usage="%(prog)s bash | zsh | fish",
        description="Print a script that completes commands, flags and models. For bash, write to ~/.bashrc: "
        "source <(mlxpaged completion bash). For zsh, to ~/.zshrc, after compinit: source <(mlxpaged completion zsh). "
        "For fish, to ~/.config/fish/config.fish: mlxpaged completion fish | source",
    )
    parser.add_argument("shell", type=one_of(*SHELLS, "words"), metavar="SHELL", help="bash, zsh or fish")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.shell in SHELLS:
        print(SHELLS[args.shell], end="")
        return 0
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    for word, meaning in completions(words or [""]):
        print(f"{word}\t{meaning}")
    return 0


def completions(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What the last word can become, with short explanations. The others are before it."""
    *before, current = words
    seen = set[str]()
    for word, meaning in candidates(before, current):
        if word.startswith(current) and word not in seen:
            seen.add(word)
            yield word, meaning


def candidates(before: Sequence[str], current: str) -> Iterable[tuple[str, str]]:
    from mlxpaged.cli import COMMANDS, chosen_command, make_parser

    command, _ = chosen_command(before)
    if command is None and not current.startswith("-"):
        return [(name, named.summary) for name, named in COMMANDS.items()]
    parser = make_parser([command] if command in COMMANDS else [])
    for word in before:
        parser = parser.commands.get(word, parser)
    for action in parser.actions:
        if before and before[-1] in action.option_strings and action.nargs != 0:
            return values_of(parser, action)
    if current.startswith("-"):
        return [(flag, (action.help or "").partition(" [")[0]) for action in parser.actions for flag in long(action)]
    if parser.commands:
        return [(name, "") for name in parser.commands]
    return [pair for action in parser.actions if not action.option_strings for pair in values_of(parser, action)]


def long(action: argparse.Action) -> list[str]:
    return [flag for flag in action.option_strings if flag.startswith("--")]


def values_of(parser: Parser, action: argparse.Action) -> list[tuple[str, str]]:
    """Known values of a flag or a positional argument. Empty if it takes anything: the shell then completes files."""
    from mlxpaged.cli import COMMANDS

    if action.metavar == "MODEL":
        return [*((name, row.repository) for name, row in short_names().items()), *((name, "") for name in models())]
    if action.metavar == "COMMAND":
        return [(name, "") for name in COMMANDS]
    if action.metavar == "SHELL":
        return [(name, "") for name in SHELLS]
    return [(value, "") for flag in action.option_strings for value in parser.choices.get(flag, ())]


def models() -> Iterator[str]:
    """The bundled models, and the repositories of the hub's cache. To scan the cache would take 0.3 s."""
    from huggingface_hub import constants

    yield from BUNDLED
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        yield folder.name.removeprefix("models--").replace("--", "/", 1)
