"""Counts how the rooms of mlxpaged/ are wired: what the core names of optional parts, and other seams without a name.

`house.py` prints the counts. `tests/test_house.py` lets them only fall.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

CORE = {
    "cache": "block_pool block_table groups prefix_cache table_rows",
    "scheduler": "admission block_manager config pool_size preemption prefill_budget queue row_table schedule_builder "
    "scheduler sequence sequence_kv stats wait",
    "attention": "gather kv_cache layer layout metadata pool",
    "engine": "async_engine commands core engine_thread errors model_runner part recovery request request_rows "
    "request_stream request_table row_times running_request sampler sampling_params step step_input step_loop",
}
"""By room, the modules that every request of every model runs: scheduling, blocks, keys and values, the engine. Until
they have a folder of their own, this is the list. What makes an engine of its parts (engine/builder.py, sizes.py,
executor.py, parts.py) names them all, and is none of it."""

PARTS = {
    "drafting": (
        "engine.draft_check engine.draft_loading engine.draft_passes engine.drafting engine.network_drafters "
        "engine.ngram scheduler.acceptance scheduler.draft_budget scheduler.step_cost models.draft_assistant "
        "models.draft_head models.draft_model"
    ),
    "disk": (
        "cache.disk_index cache.disk_journal cache.disk_records cache.disk_store engine.disk_share engine.disk_tier "
        "engine.disk_writer engine.stored_prefixes"
    ),
    "states": (
        "cache.checkpoints models.gated_delta models.rollback models.states scheduler.junctions scheduler.recurrent"
    ),
    "memory": (
        "engine.growth_wait engine.headroom engine.memory_pressure engine.memory_watch engine.pool_resizer "
        "engine.step_memory engine.swap_space engine.wired_memory"
    ),
    "grammar": (
        "engine.characters engine.constraint engine.grammar engine.grammar_check engine.grammar_limits engine.integers "
        "engine.json_grammar engine.json_in_lark engine.json_schema engine.loosening engine.patterns "
        "engine.schema_limits engine.schema_merge engine.structured_output"
    ),
    "images": "engine.image_encoder engine.images models.vision models.vision_family models.vision_probe vision",
    "pace": (
        "engine.deadlines engine.prompt_progress engine.stall engine.step_log engine.thinking_budget engine.timeline "
        "engine.watchdog"
    ),
    "log-probabilities": "engine.logprobs engine.prompt_logits",
    "step graphs": "engine.step_graphs",
    "batch-invariant": "engine.device_tiles engine.row_tiles scheduler.row_tiles",
    "ranks": "cluster engine.follower engine.rank_messages engine.ranks engine.shared_runner",
    "adapters": "models.adapted_layers models.adapters",
    "embeddings": (
        "engine.embedder engine.embedder_loading engine.embedding_core engine.embedding_passes models.embedding "
        "models.encoder models.encoder_files models.encoder_model models.reranker"
    ),
}
"""By optional part, its modules and folders. A server without one of them still answers."""

PART_WORDS = ("adapter", "disk", "draft", "image", "mtp", "rank", "swap", "tier", "tile", "vision")
"""Parts of names by which the core asks whether an optional part is there."""


def module_of(path: Path, package: Path) -> str:
    """For example `engine.step_loop`."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def dotted(expression: ast.expr) -> str:
    """`self.scheduler.max_tokens` of the expression that says so; "" for anything but names and attributes."""
    if isinstance(expression, ast.Attribute):
        owner = dotted(expression.value)
        return owner and f"{owner}.{expression.attr}"
    return expression.id if isinstance(expression, ast.Name) else ""


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions on which a branch depends: of `if`, `while`, `assert`, a comprehension, and `a if b else c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


class Wiring:
    """The modules of a package, parsed once."""

    def __init__(self, package: Path) -> None:
        self.trees = {module_of(path, package): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
        self.rooms = {path.name for path in package.iterdir() if path.is_dir()}
        self.name = package.name
        self.core = [f"{room}.{name}" for room, names in CORE.items() for name in names.split()]
        self.parts = [name for names in PARTS.values() for name in names.split()]
        self.lines = {
            module_of(path, package): len(path.read_text().splitlines()) for path in sorted(package.rglob("*.py"))
        }

    def missing(self) -> list[str]:
        """Modules that CORE and PARTS name and that are not there."""
        return [name for name in (*self.core, *self.parts) if name not in self.trees and name not in self.rooms]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """By module: those of the package that it imports, in functions and for type checkers too."""
        found: dict[str, set[str]] = {}
        for name, tree in self.trees.items():
            found[name] = set()
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{self.name}."):
                    module = (node.module or "")[len(self.name) + 1 :]
                    submodules = {f"{module}.{alias.name}" for alias in node.names} & self.trees.keys()
                    found[name] |= submodules or {module}
        return found

    def is_part(self, module: str) -> bool:
        return any(module == part or module.startswith(f"{part}.") for part in self.parts)

    def imports_of_parts(self) -> list[str]:
        return [
            f"{name} imports {each}" for name in self.core for each in sorted(self.imports[name]) if self.is_part(each)
        ]

    def tests_for_parts(self) -> list[str]:
        """Branches of the core that depend on something that is named after a part."""
        return [
            f"{name}:{test.lineno}: {ast.unparse(test)}"
            for name in self.core
            for test in conditions(self.trees[name])
            if any(
                word in (each.id if isinstance(each, ast.Name) else each.attr).lower()
                for each in ast.walk(test)
                if isinstance(each, ast.Name | ast.Attribute)
                for word in PART_WORDS
            )
        ]

    def foreign_assignments(self) -> list[str]:
        """Fields of an object that another one holds, set from outside: `self.a.b = c`. In all rooms that the engine
        thread runs."""
        found = []
        for name, tree in self.trees.items():
            if name.split(".")[0] not in ("attention", "cache", "engine", "models", "scheduler"):
                continue
            for node in ast.walk(tree):
                targets = node.targets if isinstance(node, ast.Assign) else []
                if isinstance(node, ast.AugAssign | ast.AnnAssign):
                    targets = [node.target]
                found += [
                    f"{name}:{target.lineno}: {ast.unparse(target)}"
                    for target in targets
                    if isinstance(target, ast.Attribute)
                    if dotted(target).startswith("self.")
                    if dotted(target).count(".") > 1
                    if target.attr != "__class__"
                ]
        return found

    def reasons_beside_values(self) -> list[str]:
        """Names that end in `_because`: each says why another name is None."""
        names = {
            node.attr for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)
        }
        names |= {node.arg for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.arg)}
        names |= {node.id for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return sorted(name for name in names if name.endswith("_because"))

    def class_swaps(self) -> list[str]:
        return [
            f"{name}:{node.lineno}: {ast.unparse(target)}"
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute) and target.attr == "__class__"
        ]

    def circles(self) -> list[str]:
        """Modules that import each other, directly or through others, for type checkers too: one entry for each group
        (Tarjan 1972: strongly connected components)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found = []

        def visit(name: str) -> None:
            index[name] = low[name] = len(index)
            stack.append(name)
            for each in sorted(self.imports.get(name, ())):
                if each not in index:
                    visit(each)
                    low[name] = min(low[name], low[each])
                elif each in stack:
                    low[name] = min(low[name], index[each])
            if low[name] == index[name]:
                group = stack[stack.index(name) :]
                del stack[stack.index(name) :]
                if len(group) > 1:
                    found.append(" <-> ".join(sorted(group)))

        for name in self.trees:
            if name not in index:
                visit(name)
        return found

    def counts(self) -> dict[str, list[str]]:
        """By count, what is counted."""
        return {
            "imports from the core to optional parts": self.imports_of_parts(),
            "branches of the core that name a part": self.tests_for_parts(),
            "fields of other objects that are set from outside": self.foreign_assignments(),
            "names that end in _because": self.reasons_beside_values(),
            "replaced classes": self.class_swaps(),
            "circles of imports, type checkers' too": self.circles(),
        }

    def core_lines(self) -> int:
        return sum(self.lines[name] for name in self.core)
