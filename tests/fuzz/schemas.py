"""Random JSON schemas around the limits of depth and size, and a program that compiles some of them as a server does:
`python -m tests.fuzz.schemas SEED FIRST COUNT`. It prints how many were compiled and refused, by kind, the reasons, the
numbers of the schemas whose compiler died, and the seconds of processors of the slowest one. What ends this process
would have ended the server."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import psutil

from mlxpaged.core.engine.constraint import Constraint, GrammarError
from mlxpaged.parts.grammar.grammar import Grammars
from mlxpaged.parts.grammar.grammar_limits import MAX_CHARS
from mlxpaged.parts.grammar.loosening import loosened
from mlxpaged.parts.grammar.schema_limits import MAX_DEPTH, MAX_NESTING, MAX_RESOLVED
from tests.engine.constraints import LAST, LOOSE, WRAPPED, Schema

LEAVES: list[Schema] = [
    LAST,
    {"type": "string", "pattern": "^[a-z]{1,9}$"},
    {"type": "string", "minLength": 1, "maxLength": 20},
    {"enum": ["a/b", "é", 1, None]},
    {"type": "number", "minimum": 0.5},
    {"type": "array", "minItems": 2, "maxItems": 5},
    {"type": "object", "required": ["x"]},
    {},
]
BREADTH = 30
"""Most properties or branches beside those that go on."""
OVER = 1.1
"""How far beyond a limit the schemas go."""

ALL_WAYS = {name: wrap for name, (wrap, _) in WRAPPED.items()} | LOOSE


def chain(rng: random.Random) -> Schema:
    """References that lead through many schemas, in one way."""
    wrap = ALL_WAYS[rng.choice(list(ALL_WAYS))]
    depth = up_to(MAX_DEPTH, rng)
    defs = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": LAST}}


def web(rng: random.Random) -> Schema:
    """References that lead through many schemas in all ways, with loops and copies."""
    ways, depth = list(WRAPPED) if rng.random() < 0.8 else list(ALL_WAYS), up_to(MAX_DEPTH, rng)
    defs: dict[str, Schema] = {}
    for i in range(depth):
        after = rng.randrange(depth + 1) if rng.random() < 0.02 else i + 1
        defs[f"d{i}"] = ALL_WAYS[rng.choice(ways)]({"$ref": f"#/$defs/d{after}"})
        if rng.random() < 0.05:
            defs[f"d{i}"] |= beside(rng, depth, i)
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": rng.choice(LEAVES)}}


def beside(rng: random.Random, depth: int, number: int) -> Schema:
    """Keywords beside others: several schemas, some of which name later ones."""
    found = [
        {"$ref": f"#/$defs/d{rng.randint(number + 1, depth)}"} if rng.random() < 0.3 else rng.choice(LEAVES)
        for _ in range(rng.randint(1, BREADTH))
    ]
    keyword = rng.choice(("properties", "anyOf", "oneOf", "allOf", "prefixItems"))
    return {keyword: {f"k{i}": each for i, each in enumerate(found)} if keyword == "properties" else found}


def tree(rng: random.Random) -> Schema:
    """Schemas in one another without references, as deep as a text may be."""
    ways = list(WRAPPED) if rng.random() < 0.8 else list(ALL_WAYS)
    schema: Schema = rng.choice(LEAVES)
    depth = up_to(MAX_NESTING, rng)
    while nesting(schema) < depth:
        schema = ALL_WAYS[rng.choice(ways)](schema)
        if rng.random() < 0.1:
            more = {f"k{i}": rng.choice(LEAVES) for i in range(rng.randint(1, BREADTH))}
            schema = {"type": "object", "properties": {"a": schema, **more}}
    return schema


def nesting(value: Any) -> int:
    """Objects and lists in one another."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        level = [each for found in level for each in (found.values() if isinstance(found, dict) else found)]
    return depth


def copies(rng: random.Random) -> Schema:
    """References beside other keywords, each of which copies what it names. Together they make many schemas."""
    size, each = up_to(MAX_RESOLVED, rng), rng.randint(2, 200)
    defs = {"d0": {"type": "object", "properties": {f"k{i}": rng.choice(LEAVES) for i in range(each)}}}
    many = {f"p{i}": {"type": "object", "$ref": "#/$defs/d0"} for i in range(size // each)}
    return {"type": "object", "properties": many, "$defs": defs}


def wide(rng: random.Random) -> Schema:
    """As long as a text may be."""
    chars, keyword = up_to(MAX_CHARS["json_schema"], rng), rng.choice(("properties", "anyOf", "oneOf", "enum", "allOf"))
    found: list[Any] = []
    while chars > 0:
        new: Any = rng.choice(LEAVES)
        new = f"{rng.random()}" if keyword == "enum" else new
        chars -= len(json.dumps(new)) + 8 * (keyword == "properties")
        found.append(new)
    if keyword == "properties":
        return {"type": "object", "properties": {f"k{i}": each for i, each in enumerate(found)}}
    return {keyword: found}


def up_to(limit: int, rng: random.Random) -> int:
    """A number from 1 to a little more than a limit, more often a small one."""
    return int(OVER * limit ** rng.random())


KINDS: dict[str, Callable[[random.Random], Schema]] = {each.__name__: each for each in (chain, web, tree, copies, wide)}


def random_schema(number: int, seed: int) -> tuple[str, Schema]:
    """The kind, and a schema of it."""
    rng = random.Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    return kind, KINDS[kind](rng)


@dataclass
class Report:
    """counts: of each kind that were compiled and refused. reasons: for which they were, without numbers. deadly:
    numbers of those that the child process died of. slowest: seconds of processors, and the number of the schema."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    deadly: list[int] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)


def compiled(grammars: Grammars, seed: int, numbers: Iterable[int]) -> Report:
    """Half of them are loosened before, as the server does if a request is not strict."""
    report = Report()
    before = processor_seconds()
    for number in numbers:
        kind, schema = random_schema(number, seed)
        if number // len(KINDS) % 2:
            schema, _ = loosened(schema)
        try:
            grammars.compile(Constraint("json_schema", json.dumps(schema)))
        except GrammarError as error:
            report.counts[f"{kind}, refused"] += 1
            report.reasons[re.sub(r"\d+|; it is at .*|: .*", "", str(error))] += 1
            if "ended with status" in str(error):
                report.deadly.append(number)
        else:
            report.counts[f"{kind}, compiled"] += 1
        now = processor_seconds()
        report.slowest, before = max(report.slowest, (round(now - before, 2), number)), now
    return report


def processor_seconds() -> float:
    """Of this process and its children up to now, those that have ended included."""
    times = os.times()
    present = 0.0
    for child in psutil.Process().children():
        try:
            used = child.cpu_times()
        except psutil.Error:
            continue
        present += used.user + used.system
    return times.user + times.system + times.children_user + times.children_system + present


def main() -> None:
    from mlxpaged.models.loader import DEMO_PATH, load_model

    seed, first, count = map(int, sys.argv[1:])
    served: Any = load_model(str(DEMO_PATH))
    grammars = Grammars(served.tokenizer, served.vocab_size)
    grammars.tokenizer()
    print(json.dumps(vars(compiled(grammars, seed, range(first, first + count)))))


if __name__ == "__main__":
    main()
