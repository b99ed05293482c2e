"""Counts what a reader of the code meets: lines, how the rooms are wired, and the files that run in a decode step.

python benchmarks/house.py [--list] [CHECKOUT]

--list: what is counted, too.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from wiring import Wiring

CLASSES = {
    "core/engine/core.py": "EngineCore",
    "core/engine/step_loop.py": "StepLoop",
    "core/engine/model_runner.py": "ModelRunner",
}

STEPS = 3
"""Decode steps that are traced, of one sequence."""


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def lines_of_class(path: Path, name: str) -> int:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return (node.end_lineno or node.lineno) - node.lineno + 1
    return 0


def decode_files(package: Path) -> list[str]:
    """The files of the package of which a function runs in a decode step, on this machine's backend."""
    from mlxpaged.core.engine.request import Request
    from mlxpaged.core.engine.sampling_params import SamplingParams
    from mlxpaged.engine.builder import build_engine
    from mlxpaged.engine_config import EngineConfig
    from mlxpaged.models.loader import load_model

    config = EngineConfig(model="demo", kv_cache_bytes=64_000_000)
    served = load_model(config.model)
    core = build_engine(config, served)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    core.add(Request("one", served.tokenizer.encode("Repeat: blue river stone"), params, time.monotonic()))
    while not any(output.token_ids for output in core.step()):
        pass
    core.step()
    found = set[str]()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        found.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(trace)
    for _ in range(STEPS):
        core.step()
    sys.settrace(before)
    core.close()
    return sorted(path[len(f"{package}/") :] for path in found if path.startswith(f"{package}/"))


def main(checkout: Path, lists: bool) -> None:
    package = checkout / "mlxpaged"
    files = list(package.rglob("*.py"))
    wiring = Wiring(package)
    print(f"mlxpaged/: {lines(files):,} lines in {len(files)} files")
    print(f"the core: {wiring.core_lines():,} lines in {len(wiring.core)} files")
    print(f"tests/: {lines((checkout / 'tests').rglob('*.py')):,} lines")
    for path, name in CLASSES.items():
        print(f"{name}: {lines_of_class(package / path, name)} lines")
    for title, found in wiring.counts().items():
        print(f"{title}: {len(found)}", *(found if lists else ()), sep="\n  ")
    sys.path.insert(0, str(checkout))
    decode = decode_files(package)
    print(f"a decode step runs functions of {len(decode)} files:", *decode, sep="\n  ")


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if argument != "--list"]
    main(Path(named[0] if named else Path(__file__).parents[1]).resolve(), "--list" in sys.argv)
