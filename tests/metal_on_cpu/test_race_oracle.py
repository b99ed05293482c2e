"""The race detector against a plain definition of a race, on random loads, stores and barriers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import DataRace, Interpreter
from .test_language import run

GROUPS, THREADS, CELLS = 2, 64, 8
LOAD, STORE = 1, 2
# (whole threadgroup or one simdgroup, orders threadgroup memory, orders device memory)
BARRIERS = [(False, False, False), (True, True, False), (True, False, True), (True, True, True)]
BARRIERS += [(False, True, False), (False, False, True)]

SOURCE = """
    uint group = threadgroup_position_in_grid.x;
    uint i = thread_index_in_threadgroup;
    threadgroup float shared[8];
    if (i < 8) { shared[i] = 0; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0;
    for (int phase = 0; phase < phases; phase++) {
      int code = program[(phase * 2 + group) * 64 + i];
      int cell = code / 4;
      if (DEVICE) {
        device float* p = const_cast<device float*>(pool);
        if (code % 4 == 1) { sum += p[cell]; }
        if (code % 4 == 2) { p[cell] = float(i); }
      } else {
        if (code % 4 == 1) { sum += shared[cell]; }
        if (code % 4 == 2) { shared[cell] = float(i); }
      }
      int barrier_kind = barriers[phase];
      if (barrier_kind == 1) { threadgroup_barrier(mem_flags::mem_threadgroup); }
      if (barrier_kind == 2) { threadgroup_barrier(mem_flags::mem_device); }
      if (barrier_kind == 3) { threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device); }
      if (barrier_kind == 4) { simdgroup_barrier(mem_flags::mem_threadgroup); }
      if (barrier_kind == 5) { simdgroup_barrier(mem_flags::mem_device); }
    }
    out[thread_position_in_grid.x] = sum;
"""


@dataclass(frozen=True)
class Access:
    phase: int
    group: int
    thread: int
    operation: int
    cell: int


def conflict(a: Access, b: Access, barriers: list[int], device: bool) -> bool:
    """Do two accesses touch one cell, one of them storing, with nothing to order them?"""
    if a.cell != b.cell or STORE not in (a.operation, b.operation):
        return False
    if a.group != b.group:
        return device
    if a.thread == b.thread:
        return False
    same_simdgroup = a.thread // 32 == b.thread // 32
    for barrier in barriers[min(a.phase, b.phase) : max(a.phase, b.phase)]:
        whole, threadgroup_memory, device_memory = BARRIERS[barrier]
        if (whole or same_simdgroup) and (device_memory if device else threadgroup_memory):
            return False
    return True


PHASES = 5
accesses = st.builds(
    Access,
    phase=st.integers(0, PHASES - 1),
    group=st.integers(0, GROUPS - 1),
    thread=st.sampled_from([0, 1, 31, 32, 63]),
    operation=st.sampled_from([LOAD, STORE]),
    cell=st.integers(0, 1),
)


@pytest.mark.usefixtures("metal_on_cpu")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=st.lists(accesses, max_size=7, unique_by=lambda a: (a.phase, a.group, a.thread)),
    barriers=st.lists(st.integers(0, len(BARRIERS) - 1), min_size=PHASES, max_size=PHASES),
    device=st.booleans(),
    seed=st.integers(0, 3),
)
def test_races_are_found_if_and_only_if_there_are_any(
    metal_on_cpu: Interpreter, program: list[Access], barriers: list[int], device: bool, seed: int
) -> None:
    code = np.zeros((PHASES, GROUPS, THREADS), np.int32)
    for access in program:
        code[access.phase, access.group, access.thread] = access.cell * 4 + access.operation
    racy = any(conflict(a, b, barriers, device) for a, b in combinations(program, 2))
    metal_on_cpu.seeds = (seed,)

    def call() -> mx.array:
        return run(
            SOURCE,
            {
                "program": mx.array(code),
                "barriers": mx.array(barriers, mx.int32),
                "pool": mx.zeros((CELLS,)),
                "phases": mx.array(PHASES),
            },
            (GROUPS * THREADS,),
            threadgroup=(THREADS, 1, 1),
            template=[("DEVICE", device)],
        )

    if racy:
        with pytest.raises(DataRace):
            call()
    else:
        call()
