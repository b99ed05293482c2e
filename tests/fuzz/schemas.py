"""Random JSON schemas around the limits of depth and size, and a program that compiles some of them as a server does:
`python -m tests.fuzz.schemas SEED FIRST COUNT`. It prints how many were compiled and refused, and the number of each
schema whose compiler died. What ends this process would have ended the server."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mlxpaged.engine.constraint import Constraint, GrammarError
from mlxpaged.engine.grammar import Grammars
from mlxpaged.engine.schema_limits import MAX_DEPTH
from tests.engine.constraints import LAST, WRAPPED, Schema

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


def random_schema(number: int, seed: int) -> Schema:
    """One whose references lead through up to a tenth more schemas than are allowed. Half of them have one way to be in
    one another, and the others have several, with loops and copies."""
    rng = random.Random(f"{seed} {number}")
    depth = int(1.1 * MAX_DEPTH ** rng.random())
    ways = list(WRAPPED) if (is_mixed := rng.random() < 0.5) else [rng.choice(list(WRAPPED))]
    defs: dict[str, Schema] = {}
    for i in range(depth):
        wrap, _ = WRAPPED[rng.choice(ways)]
        after = rng.randrange(depth + 1) if is_mixed and rng.random() < 0.02 else i + 1
        defs[f"d{i}"] = wrap({"$ref": f"#/$defs/d{after}"})
        if is_mixed and rng.random() < 0.05:
            defs[f"d{i}"] |= beside(rng, depth, i)
    defs[f"d{depth}"] = rng.choice(LEAVES) if is_mixed else LAST
    return {"$ref": "#/$defs/d0", "$defs": defs}


def beside(rng: random.Random, depth: int, number: int) -> Schema:
    """Keywords beside others: several schemas, some of which name later ones."""
    found = [
        {"$ref": f"#/$defs/d{rng.randint(number + 1, depth)}"} if rng.random() < 0.3 else rng.choice(LEAVES)
        for _ in range(rng.randint(1, BREADTH))
    ]
    keyword = rng.choice(("properties", "anyOf", "oneOf", "allOf", "prefixItems"))
    return {keyword: {f"k{i}": each for i, each in enumerate(found)} if keyword == "properties" else found}


def compiled(grammars: Grammars, seed: int, numbers: Iterable[int]) -> tuple[Counter[str], list[int]]:
    """How many were compiled and refused, and those that the child process died of."""
    counts, deadly = Counter[str](), list[int]()
    for number in numbers:
        try:
            grammars.compile(Constraint("json_schema", json.dumps(random_schema(number, seed))))
        except GrammarError as error:
            counts["refused"] += 1
            if "ended with status" in str(error):
                deadly.append(number)
        else:
            counts["compiled"] += 1
    return counts, deadly


def main() -> None:
    from mlxpaged.models.loader import DEMO_PATH, load_model

    seed, first, count = map(int, sys.argv[1:])
    served: Any = load_model(str(DEMO_PATH))
    counts, deadly = compiled(Grammars(served.tokenizer, served.vocab_size), seed, range(first, first + count))
    print(json.dumps({**counts, "deadly": deadly}))


if __name__ == "__main__":
    main()
