"""The house: imports point one way, and the rooms that promise never to import mlx keep it."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mlxpaged
from benchmarks.wiring import Wiring

PACKAGE = Path(mlxpaged.__file__).parent

BELOW_THE_ENGINE = {"core.step", "core.blocks", "attention", "cpu", "models", "formats", "vision"}
MAY_IMPORT = {
    "cli": BELOW_THE_ENGINE | {"registry", "cluster", "api", "engine", "parts", "core"},
    "api": {"registry", "engine", "parts", "core", "models", "formats", "vision"},
    "registry": {"engine", "parts", "core", "models"},
    "cluster": {"engine", "parts", "core", "models"},
    "engine": BELOW_THE_ENGINE | {"parts", "core"},
    "parts": BELOW_THE_ENGINE | {"core"},
    "core.engine": BELOW_THE_ENGINE | {"core.text", "core.scheduling"},
    "core.text": {"core.engine", "models", "formats"},
    "core.scheduling": {"core.step", "core.blocks"},
    "models": BELOW_THE_ENGINE,
    "models.joins": BELOW_THE_ENGINE - {"cpu"},
    "vision": set(),
    "formats": set(),
    "attention": {"core.step", "core.blocks"},
    "cpu": {"attention", "models.joins"},
    "core.blocks": {"core.step"},
    "core.step": {"core.blocks"},
}
"""The core names no part."""


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """The trees have millions of nodes. None is garbage before the last test, and all are then."""
    gc.disable()
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def name_of(expression: ast.expr) -> str | None:
    """The last part of a name with or without dots."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def is_in(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"mlxpaged.{room}.")


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room: str) -> None:
    """The modules beside the folders are for all."""
    folder = PACKAGE.joinpath(*room.split("."))
    allowed = {room, *MAY_IMPORT[room]}
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for name in imported_modules(path):
            if name.startswith("mlxpaged.") and (PACKAGE / name.split(".")[1]).is_dir():
                assert any(is_in(name, each) for each in allowed), f"{path} imports {name}"


WIRE_FORMATS = ("mlxpaged.api.openai", "mlxpaged.api.anthropic", "mlxpaged.api.ollama")
ROUTES = {"app", "batches", "decisions", "openapi", "server_api", "tokenize"}
"""In api/, beside the wire formats: modules that no other part of api/ is built on."""


def api_imports() -> dict[str, set[str]]:
    """By module of api/: those that it imports when it is loaded."""
    modules = {}
    for path in (PACKAGE / "api").rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(part for part in parts if part != "__init__")] = path
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                found[name] |= submodules or {node.module} & modules.keys()
    return found


def test_shared_modules_of_the_api_import_no_wire_format() -> None:
    for name, imported in api_imports().items():
        own = next((each for each in WIRE_FORMATS if name.startswith(each)), None)
        if own is None and (name == "mlxpaged.api" or name.split(".")[2] in ROUTES):
            continue
        foreign = {each for each in imported if each.startswith(WIRE_FORMATS) and not (own and each.startswith(own))}
        assert not foreign, f"{name} imports {foreign}"


WIRING = {
    "imports from the core to optional parts": 0,
    "branches of the core that name a part": 8,
    "fields of other objects that are set from outside": 1,
    "names that end in _because": 0,
    "replaced classes": 23,
    "circles of imports, type checkers' too": 0,
}
"""Only lower these. `python benchmarks/house.py --list` shows what is counted."""


def test_the_rooms_are_wired_no_closer_than_before() -> None:
    wiring = Wiring(PACKAGE)
    assert not wiring.missing(), "a module that is named in benchmarks/wiring.py was moved"
    for title, found in wiring.counts().items():
        assert len(found) <= WIRING[title], "\n".join((f"{title}: {len(found)}, not {WIRING[title]}", *found))
        assert len(found) == WIRING[title], f"{title}: {len(found)} now. Lower the number in this test."


TESTED_ELSEWHERE = {
    "core.engine.constraint": "test_structured_output",
    "core.engine.in_flight": "test_step_loop",
    "core.engine.logprobs": "test_prompt_logprobs",
    "core.engine.prompt_logits": "test_prompt_logprobs",
    "core.engine.random_sampling": "test_sampler",
    "core.engine.results": "test_step_loop",
    "core.engine.stall": "test_watchdog",
    "core.engine.step_log": "test_timeline",
    "core.engine.worker": "test_engine_thread",
    "core.scheduling.row_tiles": "test_prefill_budget",
    "core.scheduling.sequence_kv": "test_sequence",
    "core.text.answer_parser": "test_formats",
    "core.text.answer_stop": "test_stop_strings",
}
"""Modules of the core without a test file of their name, and the file that tests them. Only remove lines."""


def test_each_module_of_the_core_that_decides_something_has_a_test_file_of_its_name() -> None:
    """Records without a branch are tested where they are used."""
    wiring = Wiring(PACKAGE)
    branches = ast.If | ast.For | ast.While | ast.IfExp | ast.BoolOp | ast.Try | ast.comprehension
    deciding = [
        each for each in wiring.core if any(isinstance(node, branches) for node in ast.walk(wiring.trees[each]))
    ]
    names = {path.stem for path in (PACKAGE.parent / "tests").rglob("test_*.py")}
    named = [each for each in deciding if f"test_{each.rpartition('.')[2]}" in names]
    assert set(deciding) - set(named) == TESTED_ELSEWHERE.keys()
    assert names >= set(TESTED_ELSEWHERE.values())


def test_the_server_starts_its_engine_before_the_api_is_imported() -> None:
    """The import takes a second, in which the engine thread reads weights."""
    todo, seen = ["mlxpaged.cli.serve", "mlxpaged.engine.async_engine"], set[str]()
    while todo:
        name = todo.pop()
        path = PACKAGE.parent / name.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for node in tree_of(path).body:  # what is imported when the module is
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlxpaged"):
                todo += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    assert {"mlxpaged.cli.engine_flags", "mlxpaged.core.engine.core"} <= seen
    assert not {"mlxpaged.api.app", "mlxpaged.api.access.key_file", "mlxpaged.cli.http_server"} & seen


def test_what_is_for_cpus_only_is_reached_through_the_loader_the_streams_and_the_blas() -> None:
    doors = {
        "mlxpaged.cpu.float32": {
            *("models/adapters/adapters.py", "models/loader.py", "models/replacements.py", "models/files/weights.py"),
            *("models/sources/gguf/weights.py", "models/sources/model_files.py"),
        },
        "mlxpaged.cpu.malloc": {"engine/builder.py"},
        "mlxpaged.cpu.optimize": {"models/loader.py", "models/replacements.py"},
        "mlxpaged.cpu.streams": {
            "parts/embeddings/embedder.py",
            "core/engine/model_runner.py",
            "parts/images/image_encoder.py",
        },
        "mlxpaged.cpu": {"__init__.py", "cli/doctor/machine.py", "cli/http_server.py"},
    }
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "cpu":
            for name in imported_modules(path):
                if name.split(".")[:2] == ["mlxpaged", "cpu"]:
                    found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    assert found == doors


def test_blocks_scheduling_and_the_cpu_package_itself_never_import_mlx() -> None:
    paths = [path for room in ("blocks", "scheduling") for path in (PACKAGE / "core" / room).glob("*.py")]
    names = ["mlxpaged.cpu", "mlxpaged.core.step", *(f"mlxpaged.core.{path.parent.name}.{path.stem}" for path in paths)]
    code = f"import sys, {', '.join(names)}; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_api_never_imports_mlx_itself() -> None:
    for path in (PACKAGE / "api").rglob("*.py"):
        assert "mlx.core" not in path.read_text(), path


def test_only_the_source_of_a_model_looks_for_its_weights_by_their_names() -> None:
    """Adapters, and the dense layers of sentence-transformers, are no part of a model's own weights."""
    readers = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "mx.load(" in path.read_text()}
    names = ("sources/model_files", "adapters/adapters", "adapters/peft", "encoders/embedding")
    assert readers == {f"models/{name}.py" for name in names}


def test_the_metal_sources_are_beside_the_package_or_inside_the_wheel() -> None:
    assert (PACKAGE / "metal_kernels").is_dir() or (PACKAGE.parent / "metal_kernels").is_dir()


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_the_package() -> set[str]:
    """Functions, fields and constants of mlxpaged/ whose names begin with an underscore."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if private(name)}


def names_used_of_others(path: Path) -> Iterator[tuple[int, str]]:
    """Attributes of all but self and cls, imported names, and names given to setattr and getattr as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlxpaged"):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func) in ("setattr", "getattr", "object"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value.split(".")[-1]


def test_tests_use_no_private_name_of_the_package() -> None:
    tests = Path(__file__).parent
    names = private_names_of_the_package()
    assert names, "the search finds private names"
    used = [
        f"{path.relative_to(tests)}:{line}: {name}"
        for path in tests.rglob("*.py")
        if path.parent.name != "metal_on_cpu"  # an interpreter of its own, with private parts of its own
        for line, name in names_used_of_others(path)
        if name in names
    ]
    assert not used, used


def test_the_tests_that_the_readme_of_the_tests_names_exist() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (root / "tests" / "README.md").read_text())
    assert len(named) >= 20
    for path, name in named:
        functions = {
            node.name for node in nodes_of(root / path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in functions, f"{path} has no {name}"


def test_a_docstring_begins_with_a_noun_or_a_verb() -> None:
    fragment = re.compile(r"\s*(Of |Between |By |Around |As `)")
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                assert not fragment.match(str(node.value.value)), f"{path}:{node.lineno}"
