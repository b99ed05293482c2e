"""`mlxpaged ls` lists the models that the hub's cache, Ollama and LM Studio have, and says which can be served."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from mlxpaged.cli import flags
from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.parser import heavy_imports
from mlxpaged.cli.profiles import profile
from mlxpaged.cli.table import print_table
from mlxpaged.models.sources.short_names import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxpaged.models.sources.downloads import Download
    from mlxpaged.registry.profile import Profile

COLUMNS = ("name", "size", "kind", "source", "quantization", "context", "served")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "ls",
        usage="%(prog)s [--json]",
        description="List the downloaded models, those of Ollama and LM Studio too: size, kind, source of the type, "
        "quantization, context length, and whether they can be served, or why not. Profiles of the configuration "
        "file stand after their model.",
    )
    flags.Flags(parser).values("--profile", profile, "as for `mlxpaged serve`", "profiles", separator=";")
    parser.add_argument("--json", action="store_true", help="print JSON: sizes in bytes, and the directories")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with heavy_imports():
        from mlxpaged.models.sources.downloads import downloads
        from mlxpaged.models.sources.source import source_models
    rows = [row_of(download) for download in [*downloads(), *source_models()]]
    rows = [each for row in rows for each in (row, *rows_of_profiles(row, args.profiles))]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print("no model is downloaded; `mlxpaged pull qwen3:4b` downloads one", file=sys.stderr)
        return 0
    print_table([[column.upper() for column in COLUMNS], *map(cells, rows)])
    return 0


def rows_of_profiles(row: dict[str, Any], profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Rows of the profiles of a model, which have its files."""
    names = row["name"], row["short_name"]
    own = [each.name for each in profiles if each.model in names]
    return [row | {"name": name, "short_name": None, "profile_of": row["name"]} for name in own]


def cells(row: dict[str, Any]) -> list[str]:
    name = f"{row['name']} ({row['short_name']})" if row["short_name"] else row["name"]
    if "profile_of" in row:
        name = f"{row['name']} (profile of {row['profile_of']})"
    served = "yes" if row["served"] else f"no: {row['reason']}"
    facts = row["kind"], row["source"] or "-", row["quantization"], str(row["context_length"] or "-")
    return [name, megabytes(row["bytes"]), *facts, served]


def row_of(download: Download) -> dict[str, Any]:
    """A row: what --json prints."""
    from mlxpaged.models.device_memory import free_device_memory
    from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
    from mlxpaged.models.file_facts import file_facts
    from mlxpaged.models.sources.completeness import missing_files
    from mlxpaged.models.sources.downloads import UNKNOWN
    from mlxpaged.models.sources.local import local_path
    from mlxpaged.models.sources.preflight import PICKLES, check_directory, local_file_sizes
    from mlxpaged.registry.catalog import described

    path = download.path
    try:
        # Pickles are not downloaded here. If others have, it is said below that they are not read.
        missing = missing_files(path) if path.is_dir() and not any(path.glob(PICKLES)) else []
        if missing:
            resumes = "" if ":" in download.name else f": `mlxpaged pull {download.name}` resumes the download"
            raise UnsupportedModelError(f"{missing[0]} is missing{resumes}")
        path = local_path(str(path)) or path
        check_directory(path, local_file_sizes(path), free_device_memory())
        reason = None
    except (ModelNotFoundError, UnsupportedModelError) as error:
        reason = str(error)
    found = described(download.name, download.path)
    facts = file_facts(download.name, download.path if found is None else found.path)
    return {
        "name": download.name,
        "short_name": short_name(download.name),
        "bytes": download.bytes,
        "kind": facts.kind.value,
        "source": facts.source and facts.source.value,
        "quantization": facts.quantization or UNKNOWN,
        "context_length": facts.context_length,
        "served": reason is None,
        "reason": reason,
        "path": str(download.path),
    }
