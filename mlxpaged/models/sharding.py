"""Tensor parallel: each rank keeps its share of a model's weights, as mlx-lm's `model.shard(group)` cuts them, or
own_shares.py.

mlx-lm divides the numbers of heads without asking whether they can be divided, and a wrong share gives wrong logits on
all ranks alike. So the sizes are checked here, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.own_shares import CUTS

MOST_RANKS = 8
"""The largest number of ranks that an error message proposes."""

SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
)
"""Fields of config.json that an error message names."""


class Share:
    """Stands for a group while it is found out whether a model can be cut: mlx-lm asks a group for no more."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def least(value: int, group: mx.distributed.Group) -> int:
    """The least of the ranks' values. Raises MLX's RuntimeError if a rank is lost."""
    return least_of_each([value], group)[0]


def least_of_each(values: Sequence[int], group: mx.distributed.Group) -> list[int]:
    """For each of the values, the least that a rank has in its place. All ranks have equally many. Raises MLX's
    RuntimeError if a rank is lost."""
    result: Any = mx.distributed.all_min(mx.array(list(values), mx.int64), group=group).tolist()
    return list(map(int, result))


def shard(model: Any, config: Mapping[str, Any], group: mx.distributed.Group, load: Callable[[], Any]) -> None:
    """Leave this rank's share of the weights in a model whose weights are not read yet.

    load: makes the model again, to find the numbers of ranks that are possible. Raises UnsupportedModelError if the
    architecture cannot be cut, or not among so many ranks.
    """
    part = sharded_part(model)
    if cutter_of(part) is None:
        raise UnsupportedModelError(
            f"it cannot be cut into shares for several ranks, which works for {', '.join(architectures())}"
        )
    problem = cut(part, group)
    if problem is not None:
        possible = [
            count for count in range(2, MOST_RANKS + 1) if cut(sharded_part(load()), Share(count - 1, count)) is None
        ]
        others = f"possible are {', '.join(map(str, possible))}" if possible else "no number of ranks is possible"
        raise UnsupportedModelError(
            f"it cannot be cut among {group.size()} ranks: {problem} ({sizes(config)}); {others}"
        )
    # A slice keeps the whole array in memory. MLX copies here what is larger than the share, and nothing else.
    model.update(tree_map(mx.contiguous, model.parameters()))


def sharded_part(model: Any) -> Any:
    """The part of a model that mlx-lm can cut: in many that see, it is the text model."""
    return model if hasattr(model, "shard") else getattr(model, "language_model", model)


def cutter_of(model: Any) -> Callable[[Any], None] | None:
    """What cuts a model for a group, None if nothing can."""
    if hasattr(model, "shard"):
        shard: Callable[[Any], None] = model.shard
        return shard
    own = CUTS.get(getattr(model, "model_type", ""))
    return None if own is None else partial(own, model)


def cut(model: Any, group: Any) -> str | None:
    """Cut a model. Returns what cannot be divided, None if all can."""
    before, cutter = dict(numbers(model)), cutter_of(model)
    assert cutter is not None
    try:
        cutter(group)
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        return " ".join(str(error).split())
    after = dict(numbers(model))
    for key, count in before.items():
        part = after.get(key, count)
        if part != count and not is_share(part, count, group.size()):
            return f"{key[1]} is {count}"
    return None


def is_share(part: int, count: int, ranks: int) -> bool:
    """Whether a rank has its share of something: an equal part, or one of few KV heads, which several ranks have."""
    return part * ranks == count or (part == 1 and ranks % count == 0)


def numbers(model: Module) -> Iterator[tuple[tuple[str, str], int]]:
    """The numbers of heads and other sizes that modules keep, by module and name."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int:
                yield (path, name), value


def sizes(config: Mapping[str, Any]) -> str:
    """Those of config.json that are divided, and the group size of quantized weights."""
    fields = {**config, **(config.get("text_config") or {})}
    known = [f"{name} {fields[name]}" for name in SIZES if isinstance(fields.get(name), int)]
    quantization = fields.get("quantization")
    if isinstance(quantization, Mapping) and "group_size" in quantization:
        known.append(f"quantized in groups of {quantization['group_size']}")
    return ", ".join(known)


def architectures() -> list[str]:
    """Those that can be cut. mlx-lm's are known by their source: an import of all of them takes seconds, and some end
    the process if a package is missing."""
    files = [path for folder in mlx_lm.models.__path__ for path in Path(folder).glob("*.py")]
    found = {path.stem for path in files if "    def shard(self" in path.read_text(encoding="utf-8")}
    return sorted(CUTS.keys() | found)
