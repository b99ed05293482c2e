"""Computes a model in the other half type than its checkpoint's, if it gives the same logits.

The GPUs of M1 and M2 have no arithmetic in bfloat16: each load and store converts. Others measured float16 14 to 34 %
faster there, prompts and decoding (jundot/omlx#3277, raullenchai/Rapid-MLX#3154). float16 has three more bits, but ends
at 65,504. So the largest numbers of a prompt are looked at before, and its logits are compared after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.attention.gpu import M1, M2
from mlxpaged.models.checks.reference import (
    differences,
    forward,
    make_prompt,
    measure_rounding,
    other_calls,
    vocabulary,
)
from mlxpaged.models.errors import in_one_line
from mlxpaged.models.files.weights import recast
from mlxpaged.progress import ReportAmount

logger = logging.getLogger(__name__)

HALF_TYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
NAMES = {dtype: name for name, dtype in HALF_TYPES.items()}

WITHOUT_BFLOAT16 = (M1, M2)

MOST_NUMBER = {mx.float16: 65504.0, mx.bfloat16: 3.3e38}
HEADROOM = 4.0
"""Other prompts may have numbers that are so many times as large as those of the trial. The largest of a model are
those of its first tokens, and nearly the same in each prompt."""

TRIAL_TOKENS = 48
TIMES_ROUNDING = 3.0
"""Logits may move so many times as far as by the rounding of the type before."""
LEAST, MOST = 1e-2, 0.5
"""The least and the greatest difference that is allowed, whatever the rounding is: as of the probe in half types."""


@dataclass(frozen=True)
class Trial:
    """What a prompt gives. logits: [TRIAL_TOKENS, vocabulary]. dtype: of the logits as the model returns them. largest:
    number that goes into or comes out of a layer. rounding: as of Reference."""

    logits: mx.array
    dtype: mx.Dtype
    largest: float
    rounding: float


def target_of(wanted: str, dtype: str, generation: int | None) -> mx.Dtype | None:
    """The type that a model is recast to; None if it stays. wanted: "auto", "float16", "bfloat16", or "model". dtype:
    of most of its weights; models in float32 stay. generation: of the GPU."""
    if dtype not in HALF_TYPES or wanted == "model":
        return None
    if wanted == "auto":
        wanted = "float16" if generation in WITHOUT_BFLOAT16 else dtype
    return None if wanted == dtype else HALF_TYPES[wanted]


def recast_if_equal(model: Module, dtype: str, target: mx.Dtype, report: ReportAmount) -> str | None:
    """Recast a model that is read. Returns why it cannot be used so: then its weights may have been changed."""
    before = HALF_TYPES[dtype]
    tokens = make_prompt(vocabulary(model), 0, TRIAL_TOKENS)
    try:
        trial = tried(model, tokens)
        if not trial.largest * HEADROOM <= MOST_NUMBER[target]:
            return f"it computes with numbers of {trial.largest:.3g}, which leaves no room in {NAMES[target]}"
        recast(model, before, target, report)
        computed = logits_type(model, tokens)
        logits = forward(model, tokens, range(len(tokens)))
    except Exception as error:  # of any architecture
        return f"it does not run: {type(error).__name__}: {in_one_line(error)}"
    if computed != (target if trial.dtype == before else trial.dtype):
        return f"it computes partly in {str(computed).removeprefix('mlx.core.')} then"
    if not mx.isfinite(logits).all():
        return "its logits are not finite then"
    found: Any = differences(logits, trial.logits).tolist()
    difference = sorted(found)[(len(found) - 1) // 4]  # a router of experts moves single rows far, as in the probe
    allowed = min(max(LEAST, TIMES_ROUNDING * trial.rounding), MOST)
    logger.debug("in %s, logits differ by %.2g, allowed are %.2g", NAMES[target], difference, allowed)
    if not difference <= allowed:
        return f"its logits differ by {difference:.2%} then, and rounding explains {allowed:.2%}"
    return None


def tried(model: Module, tokens: Sequence[int]) -> Trial:
    largest: list[mx.array] = []
    with watched(model, largest):
        logits = forward(model, tokens, range(len(tokens)))
    mx.eval(logits, largest)
    rounding = measure_rounding(model, tokens, logits)
    most: Any = mx.stack(largest).max().item() if largest else 0.0
    return Trial(logits, logits_type(model, tokens), float(most), rounding)


def logits_type(model: Any, tokens: Sequence[int]) -> mx.Dtype:
    """The type of its logits. It is float32 if some layer has a weight in another half type."""
    dtype: mx.Dtype = model(mx.array([list(tokens[:2])]), cache=make_prompt_cache(model)).dtype
    return dtype


@contextmanager
def watched(model: Module, largest: list[mx.array]) -> Any:
    """Note the largest numbers of the innermost modules. Norms see what the layers add up, and a layer's last product
    what its activation multiplies."""

    def noting(base: type[Module]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = base.__call__(self, *args, **kwargs)
            for each in (*args, result):
                if isinstance(each, mx.array) and each.dtype in NAMES:
                    largest.append(mx.abs(each).max().astype(mx.float32))
            return result

        return call

    with other_calls(model, noting):
        yield
