"""`mlxpaged keys add | list | remove` edits the file of API keys that `serve --api-keys` reads."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from pydantic import ValidationError

from mlxpaged.api.access import key_file, key_usage
from mlxpaged.api.access.key_file import KeyEntry, KeyFile, KeyFileError
from mlxpaged.api.access.key_usage import Usage
from mlxpaged.cli.os_errors import sentence
from mlxpaged.cli.ps import ABSENT, ago
from mlxpaged.cli.table import print_table


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 with a message if the file cannot be used or has no such key, else 0."""
    try:
        {"add": run_add, "list": run_list, "remove": run_remove}[args.verb](args)
    except (KeyFileError, OSError) as error:
        print(f"mlxpaged: {sentence(error)}", file=sys.stderr)
        return 1
    return 0


def run_add(args: argparse.Namespace) -> None:
    path: Path = args.api_keys
    key, salt, digest = key_file.make_key()
    settings = {name: getattr(args, name) for name in KeyEntry.model_fields if name in args}
    with key_file.locked(path):
        keys = key_file.read(path)[0].keys if path.exists() else ()
        if any(entry.name == args.name for entry in keys):
            raise KeyFileError(f"{path}: there is already a key named {args.name}")
        try:
            entry = KeyEntry(salt=salt, hash=digest, created=key_file.today(), **settings)
            content = KeyFile(keys=(*keys, entry))
        except ValidationError as error:
            raise key_file.unusable(path, error) from None
        key_file.write(path, content)
    print(key, flush=True)
    print(f"The key cannot be shown again. To use it: mlxpaged serve --api-keys {quote(str(path))}", file=sys.stderr)


def run_list(args: argparse.Namespace) -> None:
    entries, usages = key_file.read(args.api_keys)[0].keys, known_usages(args.api_keys)
    if args.json:
        print(json.dumps([as_json(entry, usages.get(entry.name, Usage())) for entry in entries], indent=2))
        return
    limits = ("TIER", "MAX", "REQUESTS/MIN", "TOKENS/MIN", "ADMIN", "METRICS", "CREATED")
    titles = ("NAME", *limits, "LAST USED", "TOKENS THIS MONTH", "TOKENS", "MODELS")
    print_table([titles, *(described(entry, usages.get(entry.name, Usage())) for entry in entries)])


def known_usages(keys: Path) -> Mapping[str, Usage]:
    """Returns what the servers have written, as of now. Nothing, with a message, if their file cannot be used."""
    try:
        return {name: usage.at(time.time()) for name, usage in key_usage.read(key_usage.usage_path(keys)).items()}
    except (OSError, ValueError) as error:
        print(f"mlxpaged: the usage of the keys is not known: {sentence(error)}", file=sys.stderr)
        return {}


def described(entry: KeyEntry, usage: Usage) -> tuple[str, ...]:
    limits = (ABSENT if each is None else str(each) for each in (entry.requests_per_minute, entry.tokens_per_minute))
    rights = ("yes" if each else "no" for each in (entry.admin, entry.admin or entry.metrics))
    models = "all" if entry.models is None else ",".join(entry.models)
    used = ago(time.time() - usage.last_used) if usage.last_used else ABSENT
    settings = entry.tier, entry.max_priority or entry.tier, *limits, *rights, entry.created or ABSENT
    return entry.name, *settings, used, str(usage.month_tokens), str(usage.tokens), models


def as_json(entry: KeyEntry, usage: Usage) -> dict[str, object]:
    """Returns what may be shown of a key: nothing that it could be found from."""
    return entry.model_dump(exclude={"salt", "hash"}) | {"usage": key_usage.fields_of(usage)}


def run_remove(args: argparse.Namespace) -> None:
    path: Path = args.api_keys
    with key_file.locked(path):
        keys = key_file.read(path)[0].keys
        left = tuple(entry for entry in keys if entry.name != args.name)
        if len(left) == len(keys):
            raise KeyFileError(f"{path}: there is no key named {args.name}")
        key_file.write(path, KeyFile(keys=left))
    key_usage.forget(key_usage.usage_path(path), args.name)
    print(f"{args.name} is removed", file=sys.stderr)
