"""Measures which choice is fastest on this machine, for each shape class of a model's layers.

It takes a few seconds. `mlxpaged doctor` does it, and `mlxpaged serve --retune`; a start reads the times from a file
(tuning_cache.py). It measures only on a Metal device. Other devices use the defaults.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxpaged.attention import tuning
from mlxpaged.attention.gpu import has_fixed_registers
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import AttentionShape
from mlxpaged.attention.matrix import choose_variant
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.self_check import usable_tuning
from mlxpaged.attention.tuning import (
    Choice,
    ShapeClass,
    Tuning,
    candidate_choices,
    decode_ranges,
    default_choice,
    parse_tuning,
)
from mlxpaged.attention.tuning_cache import Times, TuningCache
from mlxpaged.attention.variants import may_spill
from mlxpaged.progress import ReportAmount

logger = logging.getLogger(__name__)

BUDGET_S = 5.0
"""Seconds for all shapes of a model together. Classes that are not measured in time keep the default."""

MARGIN = 0.05
"""A choice replaces the default only if it is faster by more than this share. Less is noise, and with the default for
all classes the bits of an answer do not depend on its batch."""

REPETITIONS = 5
REPETITION_S = 0.002
"""A repetition chains calls, as the layers of a model do, until it takes about this long: waiting for a result alone
costs about 0.3 ms (measured by lablup/mlxcel on an M1 Ultra)."""
MAX_CALLS = 8
ENOUGH_S = 0.05
"""Seconds after which a candidate is not repeated again."""
HOPELESS = 2.0
"""A candidate that takes this many times as long as the best one so far is not repeated."""

POOL_BYTES = 256 * 1024**2
"""Size of a timed pool: more than the caches of any chip hold, so that keys come from memory. Sequences that need more
share blocks. Decoding contexts larger than this are not copied either."""

PARTIAL_BYTES = 64 * 1024**2
"""Most memory of partial results. More ranges of keys than it has room for are not timed."""

RAGGED_SHARE = 8
"""In a timed ragged batch, one sequence has the context of the class, and the others have 1 / RAGGED_SHARE of it."""


@dataclass(frozen=True)
class Limits:
    """The largest steps that the server can have. context_length: tokens of a sequence; max_num_seqs: of a batch."""

    context_length: int
    max_num_seqs: int


@dataclass(frozen=True)
class Workload:
    """A step that represents its class: query and context lengths by sequence."""

    query_lens: list[int]
    context_lens: list[int]

    @property
    def cost(self) -> int:
        return sum(query * context for query, context in zip(self.query_lens, self.context_lens, strict=True))


Run = Callable[[int], None]
"""Makes that many calls, each a write of one token and attention over the output of the previous call, and waits. All
of it is timed, the host's work too: where a model is small, the host is what a step waits for, and the choices differ
in how much they ask of it."""

Prepare = Callable[[AttentionShape, Workload, Choice], Run]


@dataclass
class ShapeTimes:
    """Times of the layers of one shape. Missing classes were not measured. cached: whether the file had them."""

    shape: AttentionShape
    classes: list[ShapeClass]
    times: Times = field(default_factory=dict)
    cached: bool = False

    def choice(self, shape_class: ShapeClass) -> Choice:
        default = default_choice(shape_class)
        times = self.times.get(shape_class)
        if times is None:
            return default
        best = min(times, key=lambda choice: times[choice])
        return best if default not in times or times[best] < (1 - MARGIN) * times[default] else default

    @property
    def tuning(self) -> Tuning:
        return Tuning(tuple((entry, self.choice(entry)) for entry in self.classes if entry in self.times))


def can_measure() -> bool:
    return bool(mx.metal.is_available())


def classes_of(shape: AttentionShape, limits: Limits) -> list[ShapeClass]:
    """The classes that the server can have and that leave a choice. Chunks of the last class are not timed: MLX's own
    attention is near the device's peak there, and hand-written prefill kernels took 4 to 6 times as long."""
    contexts = reachable(tuning.CONTEXTS, visible_keys(shape, limits))
    batches = reachable(tuning.BATCHES, limits.max_num_seqs)
    decode = [ShapeClass(1, n, keys, ragged) for n in batches for keys in contexts for ragged in (False, True)]
    chunks = [ShapeClass(n, 1, keys) for n in reachable(tuning.CHUNKS[:-1], limits.context_length) for keys in contexts]
    return [entry for entry in decode if entry.batch > 1 or not entry.ragged] + chunks


def rarity(shape_class: ShapeClass) -> int:
    """0 for the class of most steps: one sequence with a short context decodes. Each next bound is rarer. A chunk is as
    rare as four sequences: it comes once in an answer, but it may be as long as many steps."""
    batch = tuning.BATCHES.index(shape_class.batch) if shape_class.queries == 1 else 1
    return batch + tuning.CONTEXTS.index(shape_class.context) + shape_class.ragged


def reachable(bounds: tuple[int, ...], limit: int) -> list[int]:
    """The upper bounds of the classes that values up to `limit` belong to."""
    return [bound for below, bound in zip((0, *bounds), bounds, strict=False) if below < limit]


def visible_keys(shape: AttentionShape, limits: Limits) -> int:
    return min(limits.context_length, shape.window or shape.chunk or limits.context_length)


def workload_of(shape_class: ShapeClass, shape: AttentionShape, limits: Limits) -> Workload:
    """The largest step of the class that the server can have."""
    context = min(shape_class.context, visible_keys(shape, limits))
    if shape_class.queries > 1:
        queries = min(shape_class.queries, limits.context_length)
        return Workload([queries], [max(queries, context)])
    batch = min(shape_class.batch, limits.max_num_seqs)
    others = max(1, context // RAGGED_SHARE) if shape_class.ragged else context
    return Workload([1] * batch, [context] + [others] * (batch - 1))


def candidates(shape_class: ShapeClass, shape: AttentionShape, workload: Workload) -> list[Choice]:
    """The choices to time, the default first. It skips a partition that makes as many ranges as an earlier one, and
    choices that take too much memory, the matrix kernel if it has no variant, and few heads if more have registers."""
    longest, tokens = max(workload.context_lens), sum(workload.query_lens)
    copied = sum(workload.context_lens) * shape.layout.unquantized.bytes_per_token
    bytes_per_row = 4 * shape.num_query_heads * (shape.layout.value_size + 4)
    group = shape.num_query_heads // shape.layout.num_kv_heads
    by_context = decode_ranges(shape.layout, group)
    found: list[Choice] = []
    ranges: set[int] = set()
    for choice in candidate_choices(shape_class):
        if choice.few:
            fits = has_fixed_registers() and may_spill(shape.layout, group)
        elif choice.matrix:
            fits = choose_variant(shape.layout, group) is not None
        elif choice.partition is None:
            fits = shape_class.queries > 1 or copied <= POOL_BYTES
        else:
            count = choice.num_ranges(longest, by_context)
            fits = count not in ranges and tokens * count * bytes_per_row <= PARTIAL_BYTES
            ranges.add(count)
        if fits or not found:
            found.append(choice)
    return found


def prepare(shape: AttentionShape, workload: Workload, choice: Choice) -> Run:
    """Use a pool of zeros: the time does not depend on the contents of a key."""
    layout, size = shape.layout, shape.layout.block_size
    needed = [-(-context // size) for context in workload.context_lens]
    blocks = min(sum(needed), max(1, POOL_BYTES // layout.bytes_per_block))
    firsts = [sum(needed[:i]) for i in range(len(needed))]
    tables = [[(first + i) % blocks for i in range(count)] for first, count in zip(firsts, needed, strict=True)]
    kv = LayerKVCache.from_layout(blocks, layout, "metal", Tuning(decode=choice, chunks=choice))
    meta = AttentionMetadata.build(workload.query_lens, workload.context_lens, tables, size)
    sizes = layout.input_sizes
    queries, q_pe = (mx.zeros((meta.num_tokens, shape.num_query_heads, size), layout.dtype) for size in sizes)
    sinks = mx.zeros((shape.num_query_heads,), layout.dtype) if shape.sinks else None
    options: dict[str, Any] = {
        "scale": layout.key_size**-0.5,
        "window": shape.window,
        "chunk": shape.chunk,
        "sinks": sinks,
        "softcap": 1.0 if shape.softcap else None,
        "q_pe": q_pe if layout.latent else None,
    }
    one_token = AttentionMetadata.build([1], workload.context_lens[:1], tables[:1], size)

    def run(calls: int) -> None:
        out = queries
        for _ in range(calls):
            # A write comes first, as in a layer. Without it, a copy of keys would not wait for the previous call's
            # attention and would run beside it.
            keys, values = (of_size(out[:1, : layout.num_kv_heads], size) for size in sizes)
            kv.write(keys, values, one_token)
            out = kv.attend(of_size(out, sizes[0]), meta, **options)
        mx.eval(out)

    return run


def of_size(rows: mx.array, size: int) -> mx.array:
    """[..., n] -> [..., size]: cut, or padded with zeros."""
    if rows.shape[-1] >= size:
        return rows if rows.shape[-1] == size else rows[..., :size]
    return mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, size - rows.shape[-1])])


class Tuner:
    """Times candidates until its budget is spent. clock: seconds, as time.perf_counter."""

    def __init__(self, prepare: Prepare = prepare, clock: Callable[[], float] = time.perf_counter) -> None:
        self._prepare = prepare
        self._clock = clock

    def measure(
        self, wanted: list[ShapeTimes], limits: Limits, report: ReportAmount = lambda done, total: None
    ) -> None:
        """Measure all classes, those that most steps belong to first, so that the budget cuts off rare ones."""
        deadline = self._clock() + BUDGET_S
        jobs = [(workload_of(entry, one.shape, limits), entry, one) for one in wanted for entry in one.classes]
        jobs.sort(key=lambda job: (rarity(job[1]), job[0].cost))
        for done, (workload, entry, one) in enumerate(jobs):
            report(done, len(jobs))
            times = self._compare(entry, one.shape, workload, deadline)
            if times is None:
                return
            if times:
                one.times[entry] = times
        report(len(jobs), len(jobs))

    def _compare(
        self, shape_class: ShapeClass, shape: AttentionShape, workload: Workload, deadline: float
    ) -> dict[Choice, float] | None:
        """Seconds per call, by choice, for choices that work. None if there was no time for all of them."""
        times: dict[Choice, float] = {}
        for choice in candidates(shape_class, shape, workload):
            if self._clock() >= deadline:
                return None
            try:
                times[choice] = self.time(self._prepare(shape, workload, choice), min(times.values(), default=None))
            except Exception as error:  # a kernel that does not compile, or too little memory
                message = "%s failed for %s and is not timed: %s: %s"
                logger.error(message, choice, shape_class, type(error).__name__, error)
        return times

    def time(self, run: Run, best: float | None = None) -> float:
        """Seconds per call. best: of the candidates before, if there are any."""
        run(1)  # compiles kernels and fills the pool
        once = self._elapsed(run, 1)
        calls = max(1, min(MAX_CALLS, int(REPETITION_S / once)))
        if calls == 1 and best is not None and once > HOPELESS * best:
            return once
        times: list[float] = []
        while len(times) < REPETITIONS and sum(times) < ENOUGH_S:
            times.append(self._elapsed(run, calls))
        return statistics.median(times) / calls

    def _elapsed(self, run: Run, calls: int) -> float:
        start = self._clock()
        run(calls)
        return max(self._clock() - start, 1e-9)  # the clock may not have moved


def tune(
    shapes: Iterable[AttentionShape],
    limits: Limits,
    retune: bool = False,
    cache: TuningCache | None = None,
    tuner: Tuner | None = None,
    report: ReportAmount = lambda done, total: None,
    measures: bool = True,
) -> list[ShapeTimes]:
    """Times of each distinct shape: from the cache, else measured now and stored. retune: measure all. report: called
    with the numbers of classes that are measured, and of all that are missing. measures: false if the cache must do.

    The times are empty if nothing can be measured here.
    """
    found = [ShapeTimes(shape, classes_of(shape, limits)) for shape in dict.fromkeys(shapes)]
    if not can_measure():
        return found
    cache = cache or TuningCache()
    for one in found:
        one.times = {} if retune else cache.load(cache_key(one.shape, limits), one.classes)
        one.cached = bool(one.times)
    missing = [one for one in found if not one.cached and measures]
    if missing:
        try:
            (tuner or Tuner()).measure(missing, limits, report)
        finally:
            mx.clear_cache()  # frees the timed pools
    for one in missing:
        if one.times:
            cache.save(cache_key(one.shape, limits), one.times)
    return found


def cache_key(shape: AttentionShape, limits: Limits) -> str:
    """Includes the limits as far as workloads depend on them."""
    context, batch = min(limits.context_length, tuning.CONTEXTS[-1]), min(limits.max_num_seqs, tuning.BATCHES[-1])
    return f"{shape}; {context} tokens, {batch} sequences"


def choose_tunings(
    backend: str,
    setting: str,
    shapes: Iterable[AttentionShape],
    limits: Limits,
    retune: bool = False,
    report: ReportAmount = lambda done, total: None,
) -> Mapping[AttentionShape, Tuning]:
    """The tuning of every shape for an engine that serves on `backend`. setting: value of `--attention-tuning`. retune:
    measure now; otherwise what is not in the file has the defaults.

    Logs one line that says where the tuning comes from.
    """
    forced = parse_tuning(setting)
    if backend != "metal":
        if retune or forced not in (None, tuning.DEFAULT_TUNING):
            logger.warning("attention tuning has no effect: attention runs on the %s backend", backend)
        return {}
    if forced is not None:
        logger.info("attention tuning: %s, as configured", setting)
        return {shape: usable_tuning(shape, forced) for shape in dict.fromkeys(shapes)}
    found = tune(shapes, limits, retune, report=report, measures=retune)
    level = logging.WARNING if retune and not can_measure() else logging.INFO
    logger.log(level, "attention tuning: %s", summary(found))
    return {one.shape: usable_tuning(one.shape, one.tuning) for one in found}


def summary(found: list[ShapeTimes]) -> str:
    """One log line for all shapes."""
    if not can_measure():
        return "default, because nothing is measured without a Metal device"
    classes = sum(len(one.classes) for one in found)
    measured = sum(len(one.times) for one in found if not one.cached)
    cached = sum(len(one.times) for one in found if one.cached)
    changed = sum(one.choice(entry) != default_choice(entry) for one in found for entry in one.times)
    missing = classes - measured - cached
    if not measured and not cached:
        return "default; `mlxpaged doctor MODEL` measures which kernels are fastest on this Mac"
    cut = f"; {missing} were not measured in time and keep the default" if missing else ""
    return f"{measured} shape classes measured, {cached} cached, {changed} differ from the default{cut}"
