"""Counts how the rooms of mlxpaged/ are wired: what the core names of optional parts, and other seams without a name.

`house.py` prints the counts. `tests/test_house.py` lets them only fall.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

CORE = ("core", *(f"attention.{name}" for name in ["gather", "kv_cache", "layer", "layout", "metadata", "pool"]))
"""Modules and folders that every request of every model runs: blocks, scheduling, the step, keys and values. What makes
an engine of its parts (engine/builder.py, sizes.py, executor.py, parts.py) names them all, and is none of it."""

PARTS = (
    "parts",
    "cluster",
    *(f"models.{name}" for name in ["adapters", "drafts", "encoders", "states", "vision"]),
    "vision",
)
"""Folders of what is optional. A server without one of them still answers."""

PART_WORDS = ("adapter", "disk", "draft", "image", "mtp", "rank", "tier", "tile", "vision")
"""Parts of names by which the core asks whether an optional part is there."""


def module_of(path: Path, package: Path) -> str:
    """For example `engine.step_loop`."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def is_of(module: str, owners: Iterable[str]) -> bool:
    """Whether it is one of these modules and folders, or in one of them."""
    return any(module == each or module.startswith(f"{each}.") for each in owners)


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
        self.name = package.name
        self.core = [name for name in self.trees if is_of(name, CORE)]
        self.lines = {
            module_of(path, package): len(path.read_text().splitlines()) for path in sorted(package.rglob("*.py"))
        }

    def missing(self) -> list[str]:
        """Modules that CORE and PARTS name and that are not there."""
        return [each for each in (*CORE, *PARTS) if each not in self.trees]

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

    def imports_of_parts(self) -> list[str]:
        return [
            f"{name} imports {each}" for name in self.core for each in sorted(self.imports[name]) if is_of(each, PARTS)
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
            if name.split(".")[0] not in ("attention", "core", "engine", "models", "parts"):
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
