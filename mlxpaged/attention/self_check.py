"""The cases that every Metal kernel runs in before the first request: the warm-up, and the self-check.

Each case runs some of the kernels on random data, in the variants that the model's layers need. Metal compiles a kernel
when it first runs, so no request waits for that later. The self-check also compares the results with the gather
backend. If a kernel fails to compile or gives other numbers on a new chip or a new macOS, the server uses the gather
backend.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlxpaged.attention import kernels, precision
from mlxpaged.attention.kv_cache import LayerKVCache, resolve_backend
from mlxpaged.attention.layout import AttentionShape
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import Norm, Qkv, QkvShape, Rope, row_size
from mlxpaged.attention.tuning import CHUNK_PARTITION, CONTIGUOUS, DEFAULT_TUNING, FEW, MATRIX, Choice, Tuning
from mlxpaged.attention.variants import DECODE_THREADS, FULL_DEVICE
from mlxpaged.progress import ReportAmount

logger = logging.getLogger(__name__)

TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest difference of values of about 1: far above a chip's own rounding, far below a wrong key."""
TF32_TOLERANCE = 2e-2
"""The tolerance for float32 if MLX rounds it to TF32. The gather backend and contiguous copies use MLX's own attention.
It rounds queries, keys, weights and values, each by up to 5e-4 of itself, and values are up to about 5."""

QUANTUM = 0.05
"""More than a step between two 8-bit keys of the case of fused layers: a rounding of the rotation may choose either."""

SOFTCAP = 2.0
"""Changes scores of about 1."""
LONG_CONTEXT = 300
"""Tokens of more than 8 blocks: with fewer than 8 elements, MLX passes an input in another address space, and that is
another kernel to compile. Its ranges of two keys are so many that the decode kernel serves all heads of a KV head at
once."""
OVERLAPPED_STEPS = 4

"""Called with the amount that is done, and in total."""


@dataclass(frozen=True)
class KernelCheck:
    """One case and its outcome; `problem` is None if the backends agree."""

    shape: AttentionShape | QkvShape
    case: str
    problem: str | None

    @property
    def stops_metal(self) -> bool:
        """Whether the server does not use the Metal backend because of it."""
        return self.problem is not None and self.case in NEEDED_CASES


class CaseRun:
    """One backend's run of a case. The runs of both backends use the same random numbers."""

    def __init__(self, shape: AttentionShape, backend: str, tuning: Tuning) -> None:
        self._shape = shape
        self._key = mx.random.key(0)
        self._blocks = -(-LONG_CONTEXT // shape.layout.block_size) + 4
        self.kv = LayerKVCache.from_layout(2 * self._blocks, shape.layout, backend, tuning)
        # Two sequences whose blocks alternate, in reverse order.
        self._tables = [list(range(2 * self._blocks - 1 - first, -1, -2)) for first in (0, 1)]
        self._sinks = self._random(shape.num_query_heads) if shape.sinks else None

    def _random(self, *dims: int) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return mx.random.normal(dims, key=key).astype(self._shape.layout.dtype)

    def step(
        self, query_lens: list[int], context_lens: list[int], spans: dict[int, list[tuple[int, int]]] | None = None
    ) -> mx.array:
        """Write random keys and values for the query tokens, and attend with random queries. spans: as in
        `AttentionMetadata.build`."""
        shape, layout, tokens = self._shape, self._shape.layout, sum(query_lens)
        tables = [self._tables[i % 2] for i in range(len(query_lens))]
        meta = AttentionMetadata.build(query_lens, context_lens, tables, layout.block_size, spans)
        (size, pe_size), scale = layout.input_sizes, layout.key_size**-0.5
        keys, values = (self._random(tokens, layout.num_kv_heads, size) for size in layout.input_sizes)
        if (kind := layout.quantization) is not None:
            # Elements in the middle between two steps might be rounded to either of them.
            keys, values = kind.dequantize(kind.quantize(keys, values))
        self.kv.write(keys, values, meta)
        queries = self._random(tokens, shape.num_query_heads, size)
        options: dict[str, Any] = {
            "window": shape.window,
            "chunk": shape.chunk,
            "mutual": shape.mutual,
            "sinks": self._sinks,
            "softcap": SOFTCAP if shape.softcap else None,
            "q_pe": scale * self._random(tokens, shape.num_query_heads, pe_size) if layout.latent else None,
        }
        return self.kv.attend(queries, meta, scale=scale, **options)

    def overlapped_steps(self) -> list[mx.array]:
        """Run decoding steps that are all in flight before the first one is waited for. Each must see its own writes
        and those of earlier steps, and none of later steps."""
        results = [self.step([5, 1], [5, 1])]
        for done in range(1, OVERLAPPED_STEPS):
            results.append(self.step([1, 1], [5 + done, 1 + done]))
            mx.async_eval(results[-1])
        return results

    def mixed_chunks(self) -> list[mx.array]:
        results = [self.step([40, 1], [40, 1]), self.step([1, 20], [41, 21])]
        if self._shape.mutual:  # with the end of an image, and with whole ones
            results.append(self.step([13, 40], [54, 61], {0: [(30, 47)], 1: [(25, 30), (31, 58)]}))
        return results

    def long_contexts(self) -> list[mx.array]:
        return [self.step([LONG_CONTEXT], [LONG_CONTEXT]), self.step([1], [LONG_CONTEXT + 1])]

    def many_sequences(self) -> list[mx.array]:
        """As many as make the decode kernel serve all heads of a KV head at once. They end at each token of two
        contexts."""
        count = -(-FULL_DEVICE // (DECODE_THREADS // 32 * self._shape.layout.num_kv_heads))
        return [self.step([count] * 2, [count] * 2), self.step([1] * count, [*range(1, count + 1)])]

    def whole_blocks(self) -> list[mx.array]:
        """Few blocks and many: fewer than 8 ids, or than 4 pairs of them, come in another address space."""
        results: list[mx.array] = []
        for count in (2, 8):
            targets = [2 * i + 1 for i in range(count)]
            data = [self._random(count, *plane.shape) for plane in self._shape.layout.planes]
            self.kv.write_blocks([target - 1 for target in targets], *data)
            self.kv.copy_blocks([(target - 1, target) for target in reversed(targets)])
            results += self.kv.read_blocks(targets)
        return results


def fused_steps(shape: QkvShape, backend: str) -> list[mx.array]:
    """One backend's queries of two steps, of fewer tokens than 8 and of more, and all that it has stored."""
    layout, kind = shape.layout, shape.kind
    normal = functools.partial(mx.random.normal, dtype=layout.dtype)
    weights = mx.random.uniform(0.25, 1.0, (2, layout.key_size), key=mx.random.key(0)).astype(layout.dtype)
    norms = (Norm(weights[0], 1e-6), Norm(weights[1], 1e-5)) if kind.norms else None
    freqs = mx.exp(mx.random.uniform(0.0, 9.0, (kind.rotated // 2,), key=mx.random.key(1)))
    rope = Rope(kind.rotated, kind.traditional, base=1e4, scale=0.5, factor=0.75)
    if kind.frequencies:
        rope = replace(rope, base=None, freqs=freqs)
    qkv = Qkv(kind.num_query_heads, norms, rope if kind.rotated else None, gated=kind.gated)
    blocks = -(-LONG_CONTEXT // layout.block_size)
    kv = LayerKVCache.from_layout(2 * blocks, layout, backend)
    tables = [list(range(0, 2 * blocks, 2)), list(range(1, 2 * blocks, 2))]
    queries = []
    for query_lens, context_lens in (([5, 1], [5, LONG_CONTEXT - 9]), ([1, 9], [6, LONG_CONTEXT])):
        meta = AttentionMetadata.build(query_lens, context_lens, tables, layout.block_size)
        size = row_size(layout, kind.num_query_heads, kind.gated)
        rows = normal((meta.num_tokens, size), key=mx.random.key(meta.num_tokens))
        queries.append(kv.write_rows(rows, qkv, meta))
    stored = kv.read_blocks(range(2 * blocks))
    return [*queries, *(stored if layout.quantization is None else layout.quantization.dequantize(stored))]


PAGED = Tuning(chunks=Choice(CHUNK_PARTITION))
IN_RANGES = Tuning(decode=Choice(8), chunks=Choice(8))  # fewer keys than a tile of any chunk sees
COPIED = Tuning(decode=CONTIGUOUS, chunks=CONTIGUOUS)


class Case(NamedTuple):
    """Steps and their tuning. latent: whether the case is for latent layouts. None: for all layouts."""

    steps: Callable[[CaseRun], list[mx.array]]
    tuning: Tuning
    latent: bool | None = None


MATRIX_CASES: dict[str, Case] = {
    "matrix_attention, mixed chunks": Case(CaseRun.mixed_chunks, Tuning(chunks=MATRIX), latent=False),
    "matrix_attention, ranges of keys": Case(
        CaseRun.mixed_chunks, Tuning(chunks=replace(MATRIX, partition=16)), latent=False
    ),
}
"""The cases of the matrix kernel. Metal works without it: no default needs it."""

FEW_CASES: dict[str, Case] = {
    "paged_decode, few heads": Case(CaseRun.many_sequences, Tuning(decode=FEW), latent=False),
    "paged_decode, few heads of long contexts": Case(
        CaseRun.long_contexts, Tuning(decode=replace(FEW, partition=2)), latent=False
    ),
}
"""The cases of decoding with few heads for a threadgroup, if the tuner has chosen it."""

NEEDED_CASES: dict[str, Case] = {
    "kv_write, paged_attention and paged_decode, overlapped steps": Case(CaseRun.overlapped_steps, PAGED, latent=False),
    "kv_write and latent_attention, overlapped steps": Case(CaseRun.overlapped_steps, PAGED, latent=True),
    "paged_attention, mixed chunks": Case(CaseRun.mixed_chunks, PAGED, latent=False),
    "latent_attention, mixed chunks": Case(CaseRun.mixed_chunks, PAGED, latent=True),
    "kv_gather, mixed chunks": Case(CaseRun.mixed_chunks, COPIED),
    "merge_partials, mixed chunks": Case(CaseRun.mixed_chunks, IN_RANGES),
    "merge_partials, long contexts": Case(CaseRun.long_contexts, Tuning(decode=Choice(2), chunks=CONTIGUOUS)),
    "paged_decode, many sequences": Case(CaseRun.many_sequences, DEFAULT_TUNING, latent=False),
    "latent_attention, many sequences": Case(CaseRun.many_sequences, DEFAULT_TUNING, latent=True),
    "block_move": Case(CaseRun.whole_blocks, DEFAULT_TUNING),
}
"""They run every kernel variant that a tuning can choose, but for the matrix kernel, with inputs of fewer than 8
elements and of more, as far as serving has both."""

CASES = NEEDED_CASES | MATRIX_CASES
"""All cases, with their tunings."""

FUSED_CASE = "qkv_write, mixed chunks"
"""Metal works without this kernel: a fused layer then normalizes, rotates and writes in separate operations."""


def self_check(
    shapes: Iterable[AttentionShape],
    report: ReportAmount = lambda done, total: None,
    cases: Mapping[str, Case] = CASES,
) -> list[KernelCheck]:
    """The cases of every shape."""
    jobs = cases_of(shapes, cases, report)
    return [KernelCheck(shape, case, difference_from_gather(shape, case)) for shape, case in jobs]


def check_fusions(shapes: Iterable[QkvShape]) -> list[KernelCheck]:
    """The case of the kernel of fused layers, for every shape."""
    jobs = [(shape, functools.partial(fused_steps, shape)) for shape in dict.fromkeys(shapes)]
    return [
        KernelCheck(
            shape, FUSED_CASE, problem_of(run, shape.layout.dtype, QUANTUM * (shape.layout.quantization is not None))
        )
        for shape, run in jobs
    ]


def warm_up(
    shapes: Iterable[AttentionShape],
    report: ReportAmount = lambda done, total: None,
    fusions: Iterable[QkvShape] = (),
) -> None:
    """Run the needed cases and the kernel of fused layers on the Metal backend only. A case that fails is logged."""

    def run(shape: AttentionShape | QkvShape, case: str, steps: Callable[[str], list[mx.array]]) -> None:
        try:
            mx.eval(steps("metal"))
        except Exception as error:
            logger.warning("%s failed (%s): %s: %s", case, shape, type(error).__name__, error)

    for shape, case in cases_of(shapes, NEEDED_CASES, report):
        run(shape, case, functools.partial(run_case, shape, case))
    for fusion in dict.fromkeys(fusions):
        run(fusion, FUSED_CASE, functools.partial(fused_steps, fusion))


def cases_of(
    shapes: Iterable[AttentionShape], cases: Mapping[str, Case], report: ReportAmount
) -> Iterator[tuple[AttentionShape, str]]:
    """Report each case before it runs, and the end."""
    jobs = [
        (shape, name)
        for shape in dict.fromkeys(shapes)
        for name, case in cases.items()
        if case.latent in (None, shape.layout.latent)
    ]
    for done, job in enumerate(jobs):
        report(done, len(jobs))
        yield job
    report(len(jobs), len(jobs))


def run_case(shape: AttentionShape, case: str, backend: str) -> list[mx.array]:
    steps, tuning, _ = (CASES | FEW_CASES)[case]
    return steps(CaseRun(shape, backend, tuning))


def difference_from_gather(shape: AttentionShape, case: str) -> str | None:
    """What is wrong with a case on the Metal backend, in a sentence; None if it passes."""
    return problem_of(functools.partial(run_case, shape, case), shape.layout.dtype)


def problem_of(steps: Callable[[str], list[mx.array]], dtype: mx.Dtype, more: float = 0.0) -> str | None:
    """steps: what a case computes on a backend. more: by which results may differ beside the tolerance."""
    try:
        expected, got = (steps(backend) for backend in ("gather", "metal"))
        difference = max(float(mx.abs(a - b).astype(mx.float32).max()) for a, b in zip(got, expected, strict=True))
    except Exception as error:  # a kernel that does not compile, or a size that the kernels do not support
        return f"{type(error).__name__}: {error}"
    if not difference <= tolerance(dtype) + more:
        return f"the results differ from the gather backend's by {difference:.3g}"
    return None


def tolerance(dtype: mx.Dtype) -> float:
    return TF32_TOLERANCE if dtype == mx.float32 and precision.rounds_float32() else TOLERANCE[dtype]


@dataclass(frozen=True)
class BackendChoice:
    """backend: to serve on. kernels_off: why the Metal kernels are not used although they could run here, in a
    sentence; None if they are used or cannot run. unfused: layers that do not use the kernel of fused layers."""

    backend: str
    kernels_off: str | None = None
    unfused: frozenset[QkvShape] = field(default_factory=frozenset)


def choose_backend(
    wanted: str,
    shapes: Iterable[AttentionShape],
    report: ReportAmount = lambda done, total: None,
    fusions: Iterable[QkvShape] = (),
) -> BackendChoice:
    """`wanted`, or for "auto" Metal if kernels run and pass the self-check. Metal's kernels are compiled on return.
    fusions: of fused layers."""
    if wanted == "metal":
        warm_up(shapes, report, fusions)
    if wanted != "auto":
        return BackendChoice(wanted)
    if not kernels.can_run():
        return BackendChoice(resolve_backend("auto"))
    failed = next((check for check in self_check(shapes, report, NEEDED_CASES) if check.problem is not None), None)
    if failed is None:
        return BackendChoice("metal", unfused=frozenset(broken_fusions(fusions)))
    reason = f"{failed.case} ({failed.shape}): {failed.problem}"
    logger.warning("the Metal kernels are not used, attention is correct but slower: %s", reason)
    return BackendChoice("gather", reason)


def broken_fusions(shapes: Iterable[QkvShape]) -> Iterator[QkvShape]:
    """Those whose kernel fails its case. The kernels are compiled on return."""
    for shape in dict.fromkeys(shapes):
        [check] = check_fusions([shape])
        if check.problem is not None:
            logger.warning(
                "the kernel of fused layers is not used, layers are slower: %s (%s): %s",
                *(check.case, shape, check.problem),
            )
            yield shape


def usable_tuning(shape: AttentionShape, tuning: Tuning) -> Tuning:
    """The tuning, or if it chose the matrix kernel or few heads, and that fails its cases, the tuning without it. The
    kernels are compiled on return."""
    if tuning.uses_few:
        few = next((check for check in self_check([shape], cases=FEW_CASES) if check.problem is not None), None)
        if few is not None:
            logger.warning("decoding takes no fewer heads at once: %s (%s): %s", few.case, few.shape, few.problem)
            tuning = tuning.without_few()
    checks = self_check([shape], cases=MATRIX_CASES) if tuning.uses_matrix else []
    failed = next((check for check in checks if check.problem is not None), None)
    if failed is None:
        return tuning
    logger.warning(
        "the matrix kernel is not used, prompt chunks take the default instead: %s (%s): %s",
        *(failed.case, failed.shape, failed.problem),
    )
    return tuning.without_matrix()
