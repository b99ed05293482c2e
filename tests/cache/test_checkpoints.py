"""Checkpoints: each id is free, reserved, attached, or pinned by a step that will read it, and never two of these."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpaged.core.blocks.checkpoints import Checkpoints
from mlxpaged.core.blocks.prefix_cache import CachedBlock


def make_chain(length: int) -> list[CachedBlock]:
    chain: list[CachedBlock] = []
    for i in range(length):
        chain.append(CachedBlock(bytes([i]), chain[-1] if chain else None, (i,), i))
    return chain


def take(checkpoints: Checkpoints, block: CachedBlock) -> int:
    checkpoint = checkpoints.reserve()
    assert checkpoint is not None
    checkpoints.attach(checkpoint, block)
    return checkpoint


def num_free(checkpoints: Checkpoints) -> int:
    """Ids that can be reserved, counted by reserving them all. None is left after that."""
    count = 0
    while checkpoints.reserve() is not None:
        count += 1
    return count


def test_a_checkpoint_that_is_replaced_is_told_before_with_its_id_if_it_is_computed() -> None:
    checkpoints, chain = Checkpoints(2), make_chain(4)
    told: list[tuple[CachedBlock, int | None]] = []
    checkpoints.call_at_replace(lambda block: told.append((block, checkpoints.computed(block))))
    first = take(checkpoints, chain[0])
    checkpoints.start_step()
    take(checkpoints, chain[1])
    take(checkpoints, chain[2])
    take(checkpoints, chain[3])
    assert told == [(chain[0], first), (chain[1], None)]
    checkpoints.forget(chain[2])
    assert len(told) == 2, "its block has left, and the pool tells that"


def test_the_deepest_checkpoint_of_a_chain_counts_its_blocks() -> None:
    checkpoints, chain = Checkpoints(4), make_chain(6)
    assert checkpoints.deepest(chain) == 0
    take(checkpoints, chain[1])
    take(checkpoints, chain[3])
    assert checkpoints.deepest(chain) == 4
    assert checkpoints.deepest(chain[:3]) == 2
    assert checkpoints.deepest(chain[:1]) == 0
    assert checkpoints.deepest([]) == 0


def test_the_least_recently_used_checkpoint_is_replaced() -> None:
    checkpoints, chain = Checkpoints(2), make_chain(4)
    first, second = take(checkpoints, chain[0]), take(checkpoints, chain[1])
    checkpoints.pin(chain[0])
    assert checkpoints.unpin(chain[0]) == first
    assert take(checkpoints, chain[2]) == second
    assert chain[0] in checkpoints
    assert chain[1] not in checkpoints
    assert take(checkpoints, chain[3]) == first
    assert [block in checkpoints for block in chain] == [False, False, True, True]


def test_a_pinned_checkpoint_is_not_replaced() -> None:
    checkpoints, chain = Checkpoints(2), make_chain(3)
    first, second = take(checkpoints, chain[0]), take(checkpoints, chain[1])
    checkpoints.pin(chain[0])
    assert checkpoints.reserve() == second
    assert checkpoints.reserve() is None, "one is pinned, one is reserved"
    checkpoints.release(second)
    assert checkpoints.unpin(chain[0]) == first
    assert num_free(checkpoints) == 2


def test_a_checkpoint_that_two_steps_will_read_is_kept_for_the_second() -> None:
    checkpoints, chain = Checkpoints(1), make_chain(1)
    only = take(checkpoints, chain[0])
    checkpoints.pin(chain[0])
    checkpoints.pin(chain[0])
    assert checkpoints.unpin(chain[0]) == only
    assert checkpoints.reserve() is None
    assert checkpoints.unpin(chain[0]) == only
    assert checkpoints.reserve() == only


def test_a_forgotten_checkpoint_is_found_by_no_prompt_and_still_read_by_the_steps_that_pinned_it() -> None:
    checkpoints, chain = Checkpoints(1), make_chain(2)
    only = take(checkpoints, chain[0])
    checkpoints.pin(chain[0])
    checkpoints.pin(chain[0])
    checkpoints.forget(chain[0])
    assert checkpoints.deepest(chain) == 0
    assert len(checkpoints) == 0
    assert checkpoints.num_reserved == 0
    assert checkpoints.unpin(chain[0]) == only
    assert checkpoints.reserve() is None
    assert checkpoints.unpin(chain[0]) == only
    assert checkpoints.reserve() == only


def test_a_forgotten_checkpoint_without_pins_is_free_at_once() -> None:
    checkpoints, chain = Checkpoints(1), make_chain(2)
    only = take(checkpoints, chain[0])
    checkpoints.forget(chain[0])
    checkpoints.forget(chain[1])  # has none
    assert checkpoints.reserve() == only


def test_a_second_checkpoint_of_a_block_is_free_again_and_the_first_one_stays() -> None:
    checkpoints, chain = Checkpoints(2), make_chain(1)
    first = take(checkpoints, chain[0])
    second = take(checkpoints, chain[0])
    assert second != first
    assert checkpoints.num_attached == 1
    checkpoints.pin(chain[0])
    assert checkpoints.unpin(chain[0]) == first
    assert num_free(checkpoints) == 2


def test_a_released_reservation_is_free_again() -> None:
    checkpoints = Checkpoints(1)
    only = checkpoints.reserve()
    assert only is not None
    assert checkpoints.num_reserved == 1
    assert checkpoints.reserve() is None
    checkpoints.release(only)
    assert checkpoints.num_reserved == 0
    assert checkpoints.reserve() == only


def test_without_capacity_there_is_no_checkpoint() -> None:
    checkpoints, chain = Checkpoints(0), make_chain(2)
    assert checkpoints.reserve() is None
    assert checkpoints.deepest(chain) == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("RALPUF"), st.integers(0, 7)), max_size=60))
def test_ids_balance_whatever_happens(capacity: int, calls: list[tuple[str, int]]) -> None:
    """A pinned id is neither reserved nor attached to another block before it is unpinned."""
    checkpoints, blocks = Checkpoints(capacity), make_chain(8)
    reserved: list[int] = []
    pinned: list[tuple[CachedBlock, int]] = []
    of: dict[CachedBlock, int] = {}
    for call, number in calls:
        block = blocks[number]
        if call == "R" and (checkpoint := checkpoints.reserve()) is not None:
            assert checkpoint not in reserved
            assert checkpoint not in [each for _, each in pinned]
            reserved.append(checkpoint)
        elif call == "A" and reserved and block not in [each for each, _ in pinned]:
            checkpoint = reserved.pop(number % len(reserved))
            if block not in checkpoints:
                of[block] = checkpoint
            checkpoints.attach(checkpoint, block)
        elif call == "L" and reserved:
            checkpoints.release(reserved.pop(number % len(reserved)))
        elif call == "P" and block in checkpoints:
            checkpoints.pin(block)
            pinned.append((block, of[block]))
        elif call == "U" and pinned:
            block, checkpoint = pinned.pop(number % len(pinned))
            assert checkpoints.unpin(block) == checkpoint
        elif call == "F":
            checkpoints.forget(block)
        assert checkpoints.num_reserved == len(reserved)
    for block, checkpoint in pinned:
        assert checkpoints.unpin(block) == checkpoint
    for checkpoint in reserved:
        checkpoints.release(checkpoint)
    for block in blocks:
        checkpoints.forget(block)
    assert len(checkpoints) == checkpoints.num_reserved == 0
    assert num_free(checkpoints) == capacity
