"""What is replaced in a model between mlx-lm's load and the first request, in this order, each with its check.

1. Before weights are read, linear layers become a rank's share (sharding.py, own_shares.py). It checks the sizes.
2. On a CPU, quantized and 16-bit weights become float32 when they are read (cpu/float32.py), before the reference;
   then linear layers, rotary embeddings and activations are others (cpu/optimize.py). The probe is its check.
3. Projections, experts and norms are joined (joins.py): each beside the separate ones, on random rows.
4. Attention with a softcap, the projections of latents, attention as a whole (fused_attention.py), and modules with
   states (states.py). The probe is their check: the model's logits beside those of mlx-lm before any replacement.
5. Gated delta nets call MLX's kernel (gated_delta.py): beside mlx-lm's, with the sizes that the probe has seen.
6. Linear layers with adapters (adapted_layers.py). The probe again, with each adapter.
7. The output head computes selected rows (head.py): their logits beside those of all rows.

What takes no effect is left out (3, 5, 7) or refuses the model (1, 2, 4, 6).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from mlxpaged.attention.layer import WindowMismatchError
from mlxpaged.cpu.float32 import Storage
from mlxpaged.cpu.optimize import optimize_for_cpu, parts_of_projection
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.adapters.adapters import Adapters, check_adapters, install_adapters, load_adapters
from mlxpaged.models.checks.probe import probe, selects_rows
from mlxpaged.models.checks.reference import Reference, make_reference
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.head import RowSelection, select_rows_before_head
from mlxpaged.models.joins.fused_attention import fuse_attention
from mlxpaged.models.joins.head_projections import project_rows_together
from mlxpaged.models.joins.joins import join
from mlxpaged.models.layer_finder import Owner, Way, find_layers, is_latent
from mlxpaged.models.layers import LayerSpec
from mlxpaged.models.sharding import least
from mlxpaged.models.softcap import attend_with_softcap
from mlxpaged.models.states.gated_delta import route_gated_delta
from mlxpaged.models.states.states import call_in_groups
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage

logger = logging.getLogger(__name__)


class Replaced(NamedTuple):
    """What is known of a model after all replacements. reference: what it computed before. rows: None if its output
    head cannot select rows."""

    reference: Reference
    layers: list[LayerSpec]
    vocab_size: int
    adapters: Adapters
    rows: RowSelection | None


def replace_parts(
    model: Module,
    name: str,
    context_length: int,
    adapters: Sequence[AdapterPath],
    turns: Turns,
    group: mx.distributed.Group | None = None,
    joins: bool = True,
    storage: Storage = Storage.MODEL,
) -> Replaced:
    """Change a model whose weights are read, in place. joins: whether operations are joined and attention is fused.
    storage: of its weights.

    Raises UnsupportedModelError if its logits are others then, or AdapterError."""
    turns.begin(Stage.CHECKING_MODEL)
    reference = make_reference(model, context_length)
    loaded = load_adapters(model, name, adapters, reference, turns, storage)
    turns.take()
    optimize_for_cpu(model)
    turns.take()
    if joins:
        join(model, turns)
    turns.take()
    delta = route_gated_delta()
    layers = replace_attention(model, reference, turns, group, joins)
    delta.choose()
    installed = install_adapters(model, loaded, parts_of_projection)
    vocab_size = int(reference.logits.shape[1])
    sizes = {vocab_size} if group is None else {vocab_size, vocab_size // group.size()}  # of a head, or of its share
    rows = select_rows_before_head(model, sizes, lambda rows: selects_rows(model, layers, reference, rows))
    installed.step.head = rows
    check_adapters(model, layers, loaded, installed.step, turns)
    return Replaced(reference, layers, vocab_size, installed, rows)


def replace_attention(
    model: Module,
    reference: Reference,
    turns: Turns,
    group: mx.distributed.Group | None = None,
    fusion: bool = True,
) -> list[LayerSpec]:
    """What the model's layers keep, with which the paged batch reproduces the reference. fusion: as in `route_layers`.
    Raises UnsupportedModelError.

    If it cannot take rows of many sequences, its attention, or all of it, is called once per sequence."""
    reason: UnsupportedModelError | None = None  # of the first way, the fastest
    for way in Way:
        try:
            layers = probe_on_all_ranks(model, way, reference, turns, group, fusion)
        except UnsupportedModelError as error:
            logger.debug("by %s: %s", way.value, error)
            if isinstance(error.__cause__, WindowMismatchError):
                raise  # no way of running is right
            reason, last = reason or error, error
        else:
            if reason is not None:
                part = "its attention" if way is Way.MODULES else "the model"
                logger.warning("%s runs once per sequence, slower and without a prefix cache: %s", part, reason)
            return layers
    raise last


def probe_on_all_ranks(
    model: Module,
    way: Way,
    reference: Reference,
    turns: Turns,
    group: mx.distributed.Group | None,
    fusion: bool,
) -> list[LayerSpec]:
    """`probe`, which fails on all ranks if it fails on one: they must try the same ways."""
    problem: UnsupportedModelError | None = None
    try:
        layers = probe(model, route_layers(model, way, fusion, turns), reference, turns)
    except UnsupportedModelError as error:
        problem = error
    if group is not None and not least(problem is None, group) and problem is None:
        raise UnsupportedModelError("another rank computes other logits")
    if problem is not None:
        raise problem
    return layers


def route_layers(model: Module, way: Way, fusion: bool = False, turns: Turns | None = None) -> list[LayerSpec]:
    """Let the modules that `find_layers` finds run a step in this way. Returns what the layers keep. fusion: whether
    attention that takes all rows at once is fused. turns: of other models. Raises UnsupportedModelError."""
    specs, owners = find_layers(model, way)
    if way is Way.ROWS:
        for module in modules_of(owners):
            attend_with_softcap(module)
            for part in module.modules():
                project_rows_together(part)
    if way is Way.ROWS and fusion:
        attending = [(owner, getattr(owner.cache, "keys", None)) for owner in owners]
        found = [(each, keys.dtype) for owner, keys in attending if keys is not None for each in owner.modules]
        once = {id(each): (each, dtype) for each, dtype in found}  # Nanbeige's have two caches
        fuse_attention(list(once.values()), turns)
    grouped = [each for each in owners if way is Way.MODULES or keeps_state(each)]
    for module in [model] if way is Way.MODEL else modules_of(grouped):
        call_in_groups(module)
    return specs


def modules_of(owners: Sequence[Owner]) -> list[Module]:
    return [module for owner in owners for module in owner.modules]


def keeps_state(owner: Owner) -> bool:
    """Whether its modules are called in groups of a step's rows: they keep recurrent states, or latents, of which
    prompts are calls of their own."""
    return isinstance(owner.cache, ArraysCache) or any(map(is_latent, owner.modules))
