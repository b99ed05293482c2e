"""Rows with drafts of recurrent layers: whatever was rejected, the next row goes on from the accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.attention.token_groups import StateGroup, make_groups
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.step import BlockMoves, Row, Step
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.parts.drafting.draft_check import takes_drafts_back
from tests.models.architectures import make_architecture
from tests.models.test_states import BLOCK_SIZE, BLOCKS_EACH, Scene

WRONG = 7
"""A draft that is rejected: no sequence of the scene has it there."""

SLOTS = 60
"""Swap slots, enough for a state."""


def drafted(sequence_id: int, start: int, count: int, **more: Any) -> Row:
    """A row whose last `count - 1` tokens are drafts."""
    return Row(sequence_id, start, [0] * count, range(start, start + count), count, **more)


def sizes(groups: list[StateGroup]) -> list[tuple[int, int, int, list[int]]]:
    return [(group.first, group.last, group.length, group.sequence_ids) for group in groups]


def test_rows_with_as_many_drafts_are_one_group() -> None:
    rows = [
        drafted(3, 7, 1),
        drafted(5, 9, 1),
        drafted(1, 4, 3),
        drafted(2, 8, 3),
        drafted(4, 5, 5),
        Row(6, 0, [0] * 4),
    ]
    groups = make_groups(rows)
    assert sizes(groups) == [(0, 2, 1, [3, 5]), (2, 8, 3, [1, 2]), (8, 13, 5, [4]), (13, 17, 1, [6])]
    assert [group.is_rows for group in groups] == [True, True, True, False]
    assert [group.with_drafts for group in groups] == [[], rows[2:4], rows[4:5], []]
    alone = make_groups(rows, stack=False)
    assert [group.with_drafts for group in alone] == [[], [], *([row] for row in rows[2:5]), []]


def test_a_group_selects_its_rows_with_drafts() -> None:
    values = mx.arange(14).reshape(7, 1, 2)
    one, two = make_groups([drafted(1, 5, 1), drafted(2, 7, 3), drafted(3, 9, 3)])
    assert two.select(values, 7).tolist() == values[1:].reshape(2, 3, 2).tolist()
    assert two.select(mx.arange(7), 7).tolist() == [1, 4]
    assert mx.concatenate([g.as_rows(g.select(values, 7)) for g in (one, two)]).tolist() == values.tolist()


@dataclass
class Drafting(Scene):
    """The sequences of `Scene`. Drafts that are to be rejected are WRONG. name: of the architecture."""

    name: str = ""

    def verify(self, *rows: tuple[int, int, int, int]) -> None:
        """Run rows of a sequence, the first position, and the numbers of drafts and of right ones. The logits of
        accepted tokens are those of the sequences alone."""
        made = []
        for number, start, drafts, right in rows:
            row = self.row(number, start, 1 + drafts)
            ids = [*self.sequences[number][start : start + 1 + right], *[WRONG] * (drafts - right)]
            made.append(row._replace(token_ids=ids, logits=range(start, start + 1 + drafts), num_sampled=1 + drafts))
        result = self.runner.forward(Step(made), running=set(self.sequences))
        self.runner.finish_step(result)
        logits: Any = iter(result.tolist())
        for number, start, drafts, right in rows:
            of_row = [next(logits) for _ in range(1 + drafts)]
            for accepted in range(1 + right):
                expected = self.expected(number, start + 1 + accepted)
                assert of_row[accepted] == pytest.approx(expected, abs=2e-3), f"sequence {number}"

    @property
    def module_calls_again(self) -> int:
        return self.runner.rollback.module_calls


ARCHITECTURES = ("qwen3_5", "nemotron_h", "lfm2", "longcat_flash_ngram", "rwkv7")
"""Gated delta nets, a state-space model, convolutions, states whose modules get one sequence at a time, and layers with
two modules."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, Any]:
    path: Path = make_architecture(tmp_path_factory.mktemp("rollback") / "model", request.param)
    plain: Any = load_plain_model(path)[0]
    plain.eval()
    return load_model(str(path)), plain


@pytest.fixture
def scene(models: tuple[ServedModel, Any], request: pytest.FixtureRequest) -> Drafting:
    served, plain = models
    slots = SLOTS if served.kv_layers else 0
    scene = Drafting(ModelRunner(served, 6 * BLOCKS_EACH, BLOCK_SIZE, "gather", num_swap_slots=slots), plain)
    scene.name = request.node.callspec.params["models"]
    for number in range(6):
        scene.add(number)
        scene.sequences[number] = [token + (token == WRONG) for token in scene.sequences[number]]
    return scene


def test_one_rejection_after_another(scene: Drafting) -> None:
    """The second one goes on from the state that the first one was taken back to."""
    scene.check((0, 0, 6))
    scene.verify((0, 6, 4, 1))
    scene.verify((0, 8, 3, 0))
    scene.verify((0, 9, 5, 3))
    scene.verify((0, 13, 0, 0))
    scene.verify((0, 14, 2, 2))
    scene.verify((0, 17, 1, 0))
    scene.check((0, 18, 1))


def test_rows_of_many_lengths_beside_chunks(scene: Drafting) -> None:
    scene.check((0, 0, 6), (1, 0, 9), (2, 0, 3), (3, 0, 12))
    scene.verify((0, 6, 0, 0), (3, 12, 0, 0), (1, 9, 2, 1), (2, 3, 2, 0))
    scene.verify((2, 4, 1, 1), (1, 11, 3, 2), (0, 7, 4, 0), (3, 13, 4, 4))
    scene.check((3, 18, 1), (0, 8, 1), (2, 6, 1), (1, 14, 1), (4, 0, 7), (5, 0, 2))
    scene.verify((1, 15, 0, 0), (4, 7, 3, 1), (5, 2, 3, 3), (0, 9, 3, 0))
    scene.check((1, 16, 1), (5, 6, 1), (4, 9, 1), (0, 10, 6), (3, 19, 2))


def test_rows_that_are_taken_back_to_as_many_tokens_are_one_call(scene: Drafting) -> None:
    scene.check(*((number, 0, 5) for number in range(4)))
    scene.verify((0, 5, 2, 1), (1, 5, 4, 1), (2, 5, 4, 4), (3, 5, 4, 3))
    scene.check((0, 7, 1), (1, 7, 1), (2, 10, 1))
    first = scene.module_calls_again
    scene.check((3, 9, 1), (0, 8, 1))
    second = scene.module_calls_again - first
    stacked = not any(layer.alone for layer in scene.runner.recurrent)
    assert first == (second if stacked else 2 * second) > 0


def test_padded_rows_that_are_taken_back_to_different_lengths_are_one_call(
    models: tuple[ServedModel, Any], scene: Drafting
) -> None:
    """Where mlx-lm's modules take a mask of tokens and the lengths of rows."""
    pads = takes_drafts_back(models[0], BLOCK_SIZE, pads=True)
    assert pads or scene.name in ("nemotron_h", "rwkv7")
    if not pads:
        pytest.skip("its modules do not")
    scene.runner.rollback.pads = True
    scene.check(*((number, 0, 5) for number in range(4)))
    scene.verify((3, 5, 1, 0), (0, 5, 4, 1), (1, 5, 4, 3), (2, 5, 4, 0))
    scene.verify((1, 9, 1, 1), (2, 6, 4, 2), (3, 6, 4, 4), (0, 7, 4, 3))
    modules = scene.module_calls_again
    scene.check((2, 9, 1), (0, 11, 1), (1, 11, 1), (3, 11, 1))
    stacked = not any(layer.alone for layer in scene.runner.recurrent)
    assert scene.module_calls_again == 2 * modules if stacked else True


def test_a_sequence_that_skips_steps_is_taken_back_later(scene: Drafting) -> None:
    scene.check(*((number, 0, 5) for number in range(3)))
    scene.verify((0, 5, 3, 1), (1, 5, 3, 2), (2, 5, 3, 0))
    scene.verify((2, 6, 3, 2))
    scene.check((1, 8, 1))
    scene.check((1, 9, 1), (2, 9, 1))
    scene.check((0, 7, 1), (1, 10, 1))


def test_accepted_drafts_need_no_call(scene: Drafting) -> None:
    scene.check((0, 0, 5), (1, 0, 8))
    scene.verify((0, 5, 3, 3), (1, 8, 3, 3))
    scene.check((1, 12, 1), (0, 9, 1))
    assert scene.module_calls_again == 0


def test_a_position_without_a_state_is_an_error(scene: Drafting) -> None:
    scene.check((0, 0, 5))
    scene.verify((0, 5, 2, 0))
    with pytest.raises(ValueError, match="no state of position 9"):
        scene.logits((0, 9, 1))


def test_a_row_from_a_checkpoint_or_the_beginning_forgets_the_drafts(scene: Drafting) -> None:
    scene.check((0, 0, 12, None, ((8, 0),)), (1, 0, 5))
    scene.verify((0, 12, 2, 0), (1, 5, 2, 1))
    scene.check((0, 8, 3, 0), (1, 0, 4))
    scene.check((0, 11, 1), (1, 4, 1))
    assert scene.module_calls_again == 0


def test_a_forward_pass_that_raises_keeps_what_was_taken_back(scene: Drafting, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.check(*((n, 0, 6) for n in range(2)))
    scene.verify((0, 6, 2, 1), (1, 6, 2, 0))
    if not scene.runner.layers:
        pytest.skip("nothing attends")
    with monkeypatch.context() as patch:

        def failing(*_args: Any, **_kwargs: Any) -> Any:
            raise ValueError("injected")

        patch.setattr(scene.runner.layers[-1], "attend", failing)
        with pytest.raises(ValueError, match="injected"):
            scene.verify((1, 7, 3, 0), (0, 8, 3, 1))
    scene.verify((1, 7, 3, 1), (0, 8, 3, 2))
    scene.check((1, 9, 1), (0, 11, 1))


def test_nothing_is_kept_of_sequences_that_ended_and_little_of_a_chunk(scene: Drafting) -> None:
    """The arguments of a few rows are no part of those of a whole step."""
    scene.check((0, 0, 5), (1, 0, 5))
    scene.verify((0, 5, 2, 0), (1, 5, 2, 0))
    of_rows = scene.runner.rollback.argument_bytes
    assert of_rows > 0
    del scene.sequences[1]
    scene.check((0, 6, 1))
    assert scene.runner.rollback.argument_bytes == 0
    scene.verify((0, 7, 2, 0))
    assert 0 < scene.runner.rollback.argument_bytes < of_rows
    scene.runner.rebuild_pools()
    assert scene.runner.rollback.argument_bytes == 0


def test_swapped_states_are_those_of_the_accepted_tokens(scene: Drafting) -> None:
    if not scene.runner.swap.num_slots:
        pytest.skip("there are no blocks to swap")
    scene.check((0, 0, 6), (1, 0, 6))
    scene.verify((0, 6, 4, 2), (1, 6, 4, 1))
    scene.runner.move_blocks(BlockMoves(states_out=[(0, 9, list(range(SLOTS)))]))
    scene.check((1, 8, 1))
    scene.runner.move_blocks(BlockMoves(states_in=[(list(range(SLOTS)), 0)]))
    scene.check((0, 9, 1), (1, 9, 1))
